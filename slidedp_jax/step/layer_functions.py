"""What the programs of a chunk are made of, in a trace: layers in turn, frozen leaves, sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import LayerFn, LayerOutput
from slidedp_jax.state.layout import Trained

LayerFns = tuple[LayerFn, ...]


@dataclass(frozen=True, kw_only=True)
class ChunkKind:
    """What tells the training programs of one chunk from those of another.

    Attributes:
      layer_fns: the chunk's layers.
      widen: sum gradients in fp32 (several microbatches).
      trained: which leaves are trained; None: all.
      needs_dx: whether a chunk below needs the gradient of x.
      gives_aux: whether a layer has an auxiliary loss.
      gives_sums: whether a layer gives sums for a loss over the whole step.
      keeps: names of the results that stay on the device from forward to backward
        (`models.named_results`); the others are computed again.
    """

    layer_fns: LayerFns
    widen: bool
    trained: Trained | None = None
    needs_dx: bool = True
    gives_aux: bool = False
    gives_sums: bool = False
    keeps: frozenset[str] = frozenset()


def choose(trees: tuple[Any, ...], trained: Trained | None) -> tuple[Any, Any]:
    """Trees with None in place of frozen leaves, and the same of trained ones."""
    if trained is None or all(map(all, trained)):
        return trees, (None,) * len(trees)

    def pick(wanted: bool) -> tuple[Any, ...]:
        return tuple(
            jax.tree.unflatten(
                jax.tree.structure(tree),
                [
                    leaf if flag == wanted else None
                    for leaf, flag in zip(jax.tree.leaves(tree), flags, strict=True)
                ],
            )
            for tree, flags in zip(trees, trained, strict=True)
        )

    return pick(True), pick(False)


def merge(chosen: Any, frozen: Any) -> Any:
    """What `choose` took apart."""
    if not jax.tree.leaves(frozen):
        return chosen
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        chosen,
        frozen,
        is_leaf=lambda leaf: leaf is None,
    )


def apply_layers(
    layer_fns: LayerFns, trees: Any, x: jax.Array, batch: Any
) -> jax.Array | LayerOutput:
    """X after the layers, with the sum of their auxiliary losses where any has one.

    What layers give for a loss over the whole step comes as a tuple of those that give some. A
    batch with `layer_index` carries that of the first.
    """
    total, sums = None, []
    for index, (layer_fn, params) in enumerate(zip(layer_fns, trees, strict=True)):
        own = batch
        if "layer_index" in batch:
            own = {**batch, "layer_index": batch["layer_index"] + index}
        output = layer_fn(params, x, own)
        if not isinstance(output, LayerOutput):
            x = output
            continue
        x = output.x
        if output.aux is not None:
            _check_aux(output.aux)
            total = output.aux if total is None else total + output.aux
        if output.sums is not None:
            _check_sums(output.sums)
            sums.append(output.sums)
    if total is None and not sums:
        return x
    return LayerOutput(x, total, tuple(sums) or None)


def per_device(output: jax.Array | LayerOutput) -> jax.Array | LayerOutput:
    """What a chunk's program gives of it: each device's own sums, with a leading dimension of 1."""
    if not isinstance(output, LayerOutput):
        return output
    x, *own = output
    return LayerOutput(x, *jax.tree.map(lambda part: part[None], own))


def cotangent(kind: ChunkKind, dy: jax.Array, more: tuple[Any, ...]) -> Any:
    """That of `apply_layers`' output.

    Args:
      kind: of the chunk.
      dy: by x.
      more: 1 / supervised tokens if there is an auxiliary loss, then the derivatives of the loss
        over the whole step by the chunk's sums if it gives some.
    """
    if not more:
        return dy
    parts = iter(more)
    aux = next(parts) if kind.gives_aux else None
    return LayerOutput(dy, aux, next(parts) if kind.gives_sums else None)


def _check_aux(aux: jax.Array) -> None:
    if aux.shape != () or aux.dtype != jnp.float32:
        raise UserError(
            f"a layer's auxiliary loss is {aux.dtype}{list(aux.shape)}; it must be one float32 "
            "number, the sum over the rows at hand. Add it up in float32 whatever the compute "
            "dtype: jnp.sum(..., dtype=jnp.float32)"
        )


def _check_sums(sums: Any) -> None:
    odd = {str(leaf.dtype) for leaf in jax.tree.leaves(sums)} - {"float32"}
    if odd:
        raise UserError(
            f"a layer's sums are of {', '.join(sorted(odd))}; they add up over the rows of a step, "
            "so they must be float32"
        )


def accumulate(sums: Any, gradients: Any, widen: bool) -> Any:
    """Own gradients as [1, ...], added to `sums` if there are any."""

    def own(part: jax.Array) -> jax.Array:
        return part[None].astype(jnp.float32 if widen else part.dtype)

    if sums is None:
        return jax.tree.map(own, gradients)
    return jax.tree.map(lambda total, part: total + own(part), sums, gradients)
