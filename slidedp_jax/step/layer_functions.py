"""What the programs of a chunk are made of, in a trace: layers in turn, frozen leaves, sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.state.layout import Trained

LayerFns = tuple[Callable[..., jax.Array], ...]


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


def apply_layers(layer_fns: LayerFns, trees: Any, x: jax.Array, batch: Any) -> jax.Array:
    """X after the layers; a batch with `layer_index` carries that of the first."""
    for index, (layer_fn, params) in enumerate(zip(layer_fns, trees, strict=True)):
        own = batch
        if "layer_index" in batch:
            own = {**batch, "layer_index": batch["layer_index"] + index}
        x = layer_fn(params, x, own)
    return x


def accumulate(sums: Any, gradients: Any, widen: bool) -> Any:
    """Own gradients as [1, ...], added to `sums` if there are any."""

    def own(part: jax.Array) -> jax.Array:
        return part[None].astype(jnp.float32 if widen else part.dtype)

    if sums is None:
        return jax.tree.map(own, gradients)
    return jax.tree.map(lambda total, part: total + own(part), sums, gradients)
