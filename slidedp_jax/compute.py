"""The programs that compute devices run: unpack, forward, backward, gradient packing.

Everything runs in `shard_map` over the data axis: weights are the same on every device, rows are
split. A program is compiled once per distinct structure of a chunk, whatever the depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.streamed import Cache, CachedFn, StreamedModel
from slidedp_jax.chunk import ChunkLayout
from slidedp_jax.routes import DATA_AXIS, GradientPath, WeightPath
from slidedp_jax.split_float import join

_ROWS, _SAME = PartitionSpec(DATA_AXIS), PartitionSpec()

LayerFns = tuple[Callable[..., jax.Array], ...]


class ComputePrograms:
    """Compiled programs of one model on one mesh.

    Args:
      model: the decoder.
      mesh: compute devices, one axis `data`.
      weights: weight route.
      gradients: gradient route.
      compute_dtype: dtype of weights and activations.
    """

    def __init__(
        self,
        model: StreamedModel,
        mesh: Mesh,
        weights: WeightPath,
        gradients: GradientPath,
        compute_dtype: Any,
    ):
        self._model = model
        self._mesh = mesh
        self._weights = weights
        self._gradients = gradients
        self.compute_dtype = jnp.dtype(compute_dtype)
        # Caches of this object, not of its class, which would keep every program for ever.
        self.forward = functools.cache(self._make_forward)
        self.cached_forward = functools.cache(self._make_cached_forward)
        self.backward = functools.cache(self._make_backward)
        self.head_backward = functools.cache(self._make_head_backward)
        self._unpack: dict[Any, Callable[..., Any]] = {}
        self._pack: dict[Any, Callable[..., Any]] = {}
        self.embed = self._map(model.embed_fn, (_SAME, _ROWS), _ROWS)
        self.logits = self._map(model.head_logits_fn, (_SAME, _SAME, _ROWS), _ROWS)
        self.logits_at = self._map(self._logits_at, (_SAME, _SAME, _ROWS, _ROWS), _ROWS)
        self.loss = self._map(self._loss, (_SAME, _SAME, _ROWS, _ROWS), _ROWS)
        self.embed_backward = self._map(
            self._embed_backward, (_SAME, _ROWS, _ROWS, _ROWS), _ROWS, donate=(3,)
        )

    def _map(
        self, function: Callable[..., Any], inputs: Any, outputs: Any, donate: Sequence[int] = ()
    ) -> Callable[..., Any]:
        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=tuple(donate))

    def layer_index(self, index: int) -> jax.Array:
        """A layer's index on every device, int32 [G], as the batches carry it."""
        rows = NamedSharding(self._mesh, _ROWS)
        return jax.device_put(np.full(self._mesh.size, index, np.int32), rows)

    def unpack(self, layout: ChunkLayout, arrays: tuple[tuple[jax.Array, ...], ...]) -> Any:
        """Fetched arrays of a chunk -> one parameter tree per stage, in the compute dtype.

        `arrays` holds what the weight route fetched of `high` and, in fp32 compute, of `low`.
        """
        program = self._unpack.get(layout.signature)
        if program is None:

            def body(arrays: Any) -> Any:
                flats = [self._weights.assemble(part) for part in arrays]
                flat = join(*flats) if len(flats) == 2 else flats[0]
                return layout.unpack(flat)

            program = self._map(body, (self._weights.spec,), _SAME)
            self._unpack[layout.signature] = program
        return program(arrays)

    def pack(self, layout: ChunkLayout, trees: Any) -> tuple[jax.Array, jax.Array]:
        """Accumulated gradients of a chunk -> (wire array, sums of squares [G])."""
        program = self._pack.get(layout.signature)
        if program is None:

            def body(trees: Any) -> tuple[jax.Array, jax.Array]:
                own = jax.tree.map(lambda leaf: leaf[0], trees)
                dtype = jnp.result_type(*jax.tree.leaves(own))
                return self._gradients.to_wire(layout.pack(own, dtype))

            program = self._map(body, (_ROWS,), (_ROWS, _ROWS))
            self._pack[layout.signature] = program
        return program(trees)

    def _make_forward(self, layer_fns: LayerFns) -> Callable[..., jax.Array]:
        """(trees per layer, x, batch) -> x after the chunk's layers."""

        def body(trees: Any, x: jax.Array, batch: Any) -> jax.Array:
            return _apply(layer_fns, trees, x, batch)

        return self._map(body, (_SAME, _ROWS, _ROWS), _ROWS)

    def _make_cached_forward(self, layer_fns: tuple[CachedFn, ...]) -> Callable[..., Any]:
        """(trees per layer, x, batch, caches per layer) -> (x, caches); the caches are donated."""

        def body(trees: Any, x: jax.Array, batch: Any, caches: tuple[Cache, ...]) -> Any:
            kept = []
            for layer_fn, params, cache in zip(layer_fns, trees, caches, strict=True):
                x, cache = layer_fn(params, x, batch, cache)
                kept.append(cache)
            return x, tuple(kept)

        return self._map(body, (_SAME, _ROWS, _ROWS, _ROWS), (_ROWS, _ROWS), donate=(3,))

    def _make_backward(self, layer_fns: LayerFns, widen: bool) -> Callable[..., Any]:
        """(trees, x before the chunk, dy, batch, sums or None) -> (dx, sums of gradients).

        Recomputes the chunk. Sums are trees of [G, ...]: each device's own gradients, in fp32 with
        `widen` (several microbatches), else in the compute dtype.
        """

        def body(trees: Any, x: jax.Array, dy: jax.Array, batch: Any, sums: Any) -> Any:
            _, pullback = jax.vjp(lambda t, h: _apply(layer_fns, t, h, batch), trees, x)
            gradients, dx = pullback(dy)
            return dx, _accumulate(sums, gradients, widen)

        return self._map(body, (_SAME, _ROWS, _ROWS, _ROWS, _ROWS), (_ROWS, _ROWS), donate=(2, 4))

    def _make_head_backward(self, widen: bool) -> Callable[..., Any]:
        """(head, embed or None, x, batch, scale, sums or None) -> (loss sums [G], dx, sums).

        `scale` is 1 / supervised tokens of the step, `sums` of (head, embed) gradients; those of a
        tied embedding are always fp32, since the lookup's are added to them.
        """

        def body(
            head: Any, embed: Any, x: jax.Array, batch: Any, scale: jax.Array, sums: Any
        ) -> Any:
            value, pullback = jax.vjp(
                lambda h, e, y: self._model.head_loss_fn(h, e, y, batch), head, embed, x
            )
            head_gradients, embed_gradients, dx = pullback(scale.astype(value.dtype))
            head_sums, embed_sums = sums if sums is not None else (None, None)
            total = (
                _accumulate(head_sums, head_gradients, widen),
                _accumulate(embed_sums, embed_gradients, True),
            )
            return value[None], dx, total

        return self._map(
            body, (_SAME, _SAME, _ROWS, _ROWS, _SAME, _ROWS), (_ROWS, _ROWS, _ROWS), donate=(5,)
        )

    def embed_backward_reads_values(self, batch: Any, dx: jax.Array) -> bool:
        """Whether the embedding's gradient depends on its parameters; a lookup's does not."""
        embed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.compute_dtype),
            self._model.embed.shapes,
        )
        closed = jax.make_jaxpr(self._embed_gradients)(embed, batch, dx)
        _, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        return any(used[: len(jax.tree.leaves(embed))])

    def _loss(self, head: Any, embed: Any, x: jax.Array, batch: Any) -> jax.Array:
        return self._model.head_loss_fn(head, embed, x, batch)[None]

    def _logits_at(self, head: Any, embed: Any, x: jax.Array, index: jax.Array) -> jax.Array:
        """Logits [B, V] of one token of each row, `index` int32 [B]."""
        chosen = jnp.take_along_axis(x, index[:, None, None], axis=1)
        return self._model.head_logits_fn(head, embed, chosen)[:, 0]

    def _embed_backward(self, embed: Any, batch: Any, dx: jax.Array, sums: Any) -> Any:
        """Gradients of the embedding in fp32, added to `sums` (for a tied model, the head's)."""
        if embed is None:
            embed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), self._model.embed.shapes)
        return _accumulate(sums, self._embed_gradients(embed, batch, dx), True)

    def _embed_gradients(self, embed: Any, batch: Any, dx: jax.Array) -> Any:
        """Rows that occur often add up in fp32: the lookup is differentiated at fp32 weights."""
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), embed)

        def lookup(params: Any) -> jax.Array:
            return self._model.embed_fn(params, batch).astype(dx.dtype)

        return jax.vjp(lookup, wide)[1](dx)[0]


def _apply(layer_fns: LayerFns, trees: Any, x: jax.Array, batch: Any) -> jax.Array:
    for index, (layer_fn, params) in enumerate(zip(layer_fns, trees, strict=True)):
        own = batch
        if "layer_index" in batch:
            own = {**batch, "layer_index": batch["layer_index"] + index}
        x = layer_fn(params, x, own)
    return x


def _accumulate(sums: Any, gradients: Any, widen: bool) -> Any:
    """Own gradients as [1, ...], added to `sums` if there are any."""

    def own(part: jax.Array) -> jax.Array:
        return part[None].astype(jnp.float32 if widen else part.dtype)

    if sums is None:
        return jax.tree.map(own, gradients)
    return jax.tree.map(lambda total, part: total + own(part), sums, gradients)
