"""The model's passes as programs of the compute devices: forward, backward, head, generation.

Everything runs in `shard_map` over the data axis: weights are the same on every device, rows are
split. A program is compiled once per distinct structure of a chunk, whatever the depth.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import inputs_read
from slidedp_jax.models.named_results import DECIDED, named_bytes
from slidedp_jax.models.streamed import Cache, CachedFn, LayerOutput, StreamedModel
from slidedp_jax.state.layout import ChunkLayout, Trained
from slidedp_jax.step.kept_programs import Body, KeptPrograms, kind_inputs
from slidedp_jax.step.layer_functions import (
    ChunkKind,
    LayerFns,
    accumulate,
    apply_layers,
    choose,
    cotangent,
    merge,
    per_device,
)
from slidedp_jax.transfer.copies import place
from slidedp_jax.transfer.device_groups import DATA_AXIS
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap
from slidedp_jax.transfer.wire_programs import WirePrograms


@dataclass(frozen=True, kw_only=True)
class Gives:
    """What the layers of a chunk give beside x.

    Attributes:
      aux: auxiliary losses.
      sums: what a loss over the whole step is made of.
      decided: results that backward must not compute again.
    """

    aux: bool
    sums: bool
    decided: bool


@dataclass(frozen=True, kw_only=True)
class LossOfStep:
    """A loss that is a function of sums over the whole step, the same on every device.

    Attributes:
      loss: [1], times the supervised tokens of the step, so that it adds up with token losses.
      derivatives: per chunk that gives sums, those of the loss by them.
      figures: float32 scalars by name.
    """

    loss: jax.Array
    derivatives: tuple[Any, ...]
    figures: dict[str, jax.Array]


class ComputePrograms:
    """Compiled programs of one model on one mesh.

    Args:
      model: the decoder.
      on_devices: compiles for the compute devices, in the dtype of weights and activations.
      wire: programs that unpack weights and pack gradients.
      loss_chunk_tokens: tokens whose logits exist at once, where the model leaves that open.
      embed_trained: which leaves of the embedding are trained; None: all.
      head_trained: which leaves of the head are trained; None: all.
    """

    def __init__(
        self,
        model: StreamedModel,
        on_devices: DeviceMap,
        wire: WirePrograms,
        *,
        loss_chunk_tokens: int,
        embed_trained: Trained | None = None,
        head_trained: Trained | None = None,
    ):
        self._embed_trained = embed_trained
        self._head_trained = head_trained
        self._model = model
        self._head_loss = model.head_loss(loss_chunk_tokens)
        self._on_devices = on_devices
        self.wire = wire
        self.compute_dtype = on_devices.compute_dtype
        # Caches of this object, not of its class, which would keep every program for ever.
        self.forward = functools.cache(self._make_forward)
        self.cached_forward = functools.cache(self._make_cached_forward)
        self.kept = functools.cache(functools.partial(KeptPrograms, self._on_devices))
        self._backward_bodies = functools.cache(self._make_backward_body)
        self._backward: dict[Any, Callable[..., Any]] = {}
        self._gives: dict[LayerFns, Gives] = {}
        self.head_backward = functools.cache(self._make_head_backward)
        self.embed = self._on_devices(model.embed_fn, (SAME, ROWS), ROWS)
        self.logits = self._on_devices(model.head_logits_fn, (SAME, SAME, ROWS), ROWS)
        self.logits_at = self._on_devices(self._logits_at, (SAME, SAME, ROWS, ROWS), ROWS)
        self.loss = self._on_devices(self._loss, (SAME, SAME, ROWS, ROWS), ROWS)
        self._total = self._on_devices(_total, (ROWS,), ROWS)
        self._on_all_hosts = self._on_devices(_gathered, (ROWS, ROWS), (SAME, SAME))
        self._of_sums = self._on_devices(self._loss_of_sums, (ROWS, SAME), SAME)
        self.embed_backward = self._on_devices(
            self._embed_backward, (SAME, ROWS, ROWS, ROWS), ROWS, donate=(3,)
        )

    def layer_index(self, index: int) -> jax.Array:
        """A layer's index on every device, int32 [G], as the batches carry it."""
        mesh = self._on_devices.mesh
        rows = NamedSharding(mesh, ROWS)
        placed: jax.Array = place(np.full(mesh.size, index, np.int32), rows)
        return placed

    def totals(self, parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Sums over chunks of float32 [G], given per chunk and microbatch, per microbatch."""
        return [self._total(of_chunks) for of_chunks in zip(*parts, strict=True)]

    def total(self, parts: tuple[jax.Array, ...]) -> jax.Array:
        """Sum of float32 [G] arrays."""
        added: jax.Array = self._total(parts)
        return added

    def on_all_hosts(
        self, parts: Sequence[jax.Array], flags: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Float32 [G] and int32 [G, n] of each device -> the same, all of them on every device.

        By one collective; what every device has anyway is left as it is.
        """
        own = [number for number, part in enumerate(parts) if not part.is_fully_replicated]
        found, flags = self._on_all_hosts(tuple(parts[number] for number in own), flags)
        gathered = list(parts)
        for number, part in zip(own, found, strict=True):
            gathered[number] = part
        return gathered, flags

    def loss_of_sums(self, sums: Sequence[Sequence[Any]], scale: jax.Array) -> LossOfStep:
        """The loss over the whole step, of what chunks gave per microbatch.

        Args:
          sums: per chunk that gives some, per microbatch, a tuple over its layers.
          scale: 1 / supervised tokens of the step.
        """
        loss, derivatives, figures = self._of_sums(tuple(map(tuple, sums)), scale)
        return LossOfStep(loss=loss, derivatives=derivatives, figures=figures)

    def _loss_of_sums(self, parts: Any, scale: jax.Array) -> Any:
        """(sums per chunk and microbatch [1, ...], scale) -> as `LossOfStep`."""
        of_step = self._model.loss_of_sums
        if of_step is None:
            raise UserError(
                "a layer gives sums, but the model has no loss_of_sums that says what they are for"
            )
        add = functools.partial(jax.tree.map, lambda *same: sum(same[1:], start=same[0]))
        own = jax.tree.map(lambda part: part[0], tuple(add(*of_chunk) for of_chunk in parts))
        totals = jax.lax.psum(own, DATA_AXIS)

        def loss(chunks: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return of_step(tuple(itertools.chain.from_iterable(chunks)))

        (value, figures), derivatives = jax.value_and_grad(loss, has_aux=True)(totals)
        return value[None] / scale, derivatives, figures

    def gives(self, layer_fns: LayerFns, trees: Any, x: jax.Array, batch: Any) -> Gives:
        """What a chunk's layers give beside x, read off the trace of `forward` on such arrays.

        Whoever calls `forward` on them next finds it traced.
        """
        if layer_fns not in self._gives:
            traced = self.forward(layer_fns).trace(trees, x, batch)
            output = traced.out_info
            if not isinstance(output, LayerOutput):
                output = LayerOutput(output)
            self._gives[layer_fns] = Gives(
                aux=output.aux is not None,
                sums=output.sums is not None,
                decided=named_bytes(traced.jaxpr, DECIDED) > 0,
            )
        return self._gives[layer_fns]

    def backward(self, kind: ChunkKind, *, above: ChunkLayout | None = None) -> Callable[..., Any]:
        """Backward of a chunk.

        Args:
          kind: the chunk's structure; where it keeps results, forward was `kept(kind).forward`.
          above: another chunk, whose accumulated gradients are summed over the devices meanwhile.

        Returns:
          The program (trees, x before the chunk, [kept results,] dy, batch, sums or None, [scale],
          [derivatives]) -> (dx, sums), where sums are trees of [G, ...], each device's own
          gradients, scale is 1 / supervised tokens of the step, if a layer has an auxiliary loss,
          and derivatives are those that `loss_of_sums` gives for the chunk, if a layer gives sums;
          with `above`, (its gradients, the same arguments) -> (as `WirePrograms.pack` does,
          (dx, sums)).
        """
        name = kind, None if above is None else above.structure
        if name not in self._backward:
            body = self.kept(kind).backward if kind.keeps else self._backward_bodies(kind)
            if above is None:
                program = self._on_devices(
                    body.function, body.inputs, (ROWS, ROWS), donate=body.donate
                )
            else:
                pack = functools.partial(self.wire.packed, above)

                def both(gradients: Any, *arguments: Any) -> Any:
                    return pack(gradients), body.function(*arguments)

                program = self._on_devices(
                    both,
                    (ROWS, *body.inputs),
                    ((ROWS, ROWS), (ROWS, ROWS)),
                    donate=[1 + number for number in body.donate],
                )
            self._backward[name] = program
        return self._backward[name]

    def _make_forward(self, layer_fns: LayerFns) -> jax.stages.Wrapped:
        """(trees per layer, x, batch) -> x after the chunk's layers.

        Where a layer gives more, `LayerOutput` with their sums [G] and, of each layer that gives
        some, what a loss over the whole step is made of [G, ...].
        """

        def body(trees: Any, x: jax.Array, batch: Any) -> jax.Array | LayerOutput:
            return per_device(apply_layers(layer_fns, trees, x, batch))

        return self._on_devices(body, (SAME, ROWS, ROWS), ROWS)

    def _make_cached_forward(self, layer_fns: tuple[CachedFn, ...]) -> Callable[..., Any]:
        """(trees per layer, x, batch, caches per layer) -> (x, caches); the caches are donated."""

        def body(trees: Any, x: jax.Array, batch: Any, caches: tuple[Cache, ...]) -> Any:
            kept = []
            for layer_fn, params, cache in zip(layer_fns, trees, caches, strict=True):
                x, cache = layer_fn(params, x, batch, cache)
                kept.append(cache)
            return x, tuple(kept)

        return self._on_devices(body, (SAME, ROWS, ROWS, ROWS), (ROWS, ROWS), donate=(3,))

    def _make_backward_body(self, kind: ChunkKind) -> Body:
        """(trees, x, dy, batch, sums or None, [scale], [derivatives]) -> (dx, sums of gradients).

        Recomputes the chunk. Sums are in fp32 with `widen`, else in the compute dtype. Frozen
        leaves have none; without `needs_dx`, dx is None.
        """

        def body(trees: Any, x: jax.Array, dy: jax.Array, batch: Any, sums: Any, *more: Any) -> Any:
            chosen, frozen = choose(trees, kind.trained)

            def forward(chosen: Any, x: jax.Array) -> jax.Array | LayerOutput:
                return apply_layers(kind.layer_fns, merge(chosen, frozen), x, batch)

            d_output = cotangent(kind, dy, more)
            if kind.needs_dx:
                gradients, dx = jax.vjp(forward, chosen, x)[1](d_output)
            else:
                (gradients,), dx = jax.vjp(lambda t: forward(t, x), chosen)[1](d_output), None
            return dx, accumulate(sums, gradients, kind.widen)

        return Body(
            function=body,
            inputs=(SAME, ROWS, ROWS, ROWS, ROWS, *kind_inputs(kind)),
            donate=(2, 4) if kind.needs_dx else (4,),
        )

    def _make_head_backward(self, widen: bool, needs_dx: bool = True) -> Callable[..., Any]:
        """(head, embed or None, x, batch, scale, sums or None) -> (loss sums [G], dx, sums).

        `scale` is 1 / supervised tokens of the step, `sums` of (head, embed) gradients; those of a
        tied embedding are always fp32, since the lookup's are added to them. Frozen leaves have no
        gradients; without `needs_dx`, dx is None.
        """

        def body(
            head: Any, embed: Any, x: jax.Array, batch: Any, scale: jax.Array, sums: Any
        ) -> Any:
            (head,), (frozen_head,) = choose((head,), self._head_trained)
            frozen_embed = None
            if embed is not None:
                (embed,), (frozen_embed,) = choose((embed,), self._embed_trained)

            def loss(head: Any, embed: Any, x: jax.Array) -> jax.Array:
                return self._head_loss(
                    merge(head, frozen_head), merge(embed, frozen_embed), x, batch
                )

            if needs_dx:
                value, pullback = jax.vjp(loss, head, embed, x)
                head_gradients, embed_gradients, dx = pullback(scale.astype(value.dtype))
            else:
                value, pullback = jax.vjp(lambda h, e: loss(h, e, x), head, embed)
                (head_gradients, embed_gradients), dx = pullback(scale.astype(value.dtype)), None
            head_sums, embed_sums = sums if sums is not None else (None, None)
            total = (
                accumulate(head_sums, head_gradients, widen),
                accumulate(embed_sums, embed_gradients, True),
            )
            return value[None], dx, total

        return self._on_devices(
            body, (SAME, SAME, ROWS, ROWS, SAME, ROWS), (ROWS, ROWS, ROWS), donate=(5,)
        )

    def embed_backward_reads_values(self, batch: Any, dx: jax.Array) -> bool:
        """Whether the embedding's gradient depends on its parameters; a lookup's does not."""
        embed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.compute_dtype),
            self._model.embed.shapes,
        )
        used = inputs_read(jax.make_jaxpr(self._embed_gradients)(embed, batch, dx))
        return any(used[: len(jax.tree.leaves(embed))])

    def _loss(self, head: Any, embed: Any, x: jax.Array, batch: Any) -> jax.Array:
        return self._head_loss(head, embed, x, batch)[None]

    def _logits_at(self, head: Any, embed: Any, x: jax.Array, index: jax.Array) -> jax.Array:
        """Logits [B, V] of one token of each row, `index` int32 [B]."""
        chosen = jnp.take_along_axis(x, index[:, None, None], axis=1)
        return self._model.head_logits_fn(head, embed, chosen)[:, 0]

    def _embed_backward(self, embed: Any, batch: Any, dx: jax.Array, sums: Any) -> Any:
        """Gradients of the embedding in fp32, added to `sums` (for a tied model, the head's)."""
        if embed is None:
            embed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), self._model.embed.shapes)
        return accumulate(sums, self._embed_gradients(embed, batch, dx), True)

    def _embed_gradients(self, embed: Any, batch: Any, dx: jax.Array) -> Any:
        """Rows that occur often add up in fp32: the lookup is differentiated at fp32 weights."""
        embed_for = self._model.embed_for
        embed_fn = self._model.embed_fn if embed_for is None else embed_for(self.compute_dtype)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), embed)
        (chosen,), (frozen,) = choose((wide,), self._embed_trained)

        def lookup(chosen: Any) -> jax.Array:
            return embed_fn(merge(chosen, frozen), batch).astype(dx.dtype)

        return jax.vjp(lookup, chosen)[1](dx)[0]


def _total(parts: tuple[jax.Array, ...]) -> jax.Array:
    return sum(parts[1:], start=parts[0])


def _gathered(parts: tuple[jax.Array, ...], flags: jax.Array) -> Any:
    """In `shard_map`: float32 [1] each and int32 [1, n] -> float32 [G] each and int32 [G, n]."""
    bits = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts]
    rows = jax.lax.all_gather(jnp.concatenate([*bits, flags[0]]), DATA_AXIS)
    columns = jax.lax.bitcast_convert_type(rows[:, : len(parts)], jnp.float32)
    return tuple(columns[:, number] for number in range(len(parts))), rows[:, len(parts) :]
