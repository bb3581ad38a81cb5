"""Models that are a pytree of parameters and functions, Flax Linen's among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.core import meta

from slidedp_jax.adapter.paths import Layers, Stacked, layer_nodes, named_leaves
from slidedp_jax.adapter.source import (
    NamedTree,
    Rows,
    Source,
    Tree,
    one_per_layer,
    shape_of,
)
from slidedp_jax.adapter.stacked import Stack
from slidedp_jax.errors import UserError

_LINEN_STATE = {"batch_stats", "cache", "intermediates", "losses"}


def from_tree(
    tree: Tree,
    *,
    layers: Layers,
    embed: Callable[..., jax.Array],
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    head_loss: Callable[..., jax.Array],
) -> Source:
    """A pytree of arrays or shapes and functions over it; see `slidedp_jax.adapter.adapt`."""
    state = _LINEN_STATE & set(tree) if isinstance(tree, Mapping) else set()
    if state:
        raise UserError(
            f"the variables hold the collections {sorted(state)}, which a forward pass changes; "
            "only parameters are trained. Pass variables['params'], and use layers without such "
            "state (LayerNorm or RMSNorm for BatchNorm, no cache)"
        )
    _check_leaves(tree)
    found = layer_nodes(tree, layers, lambda node: hasattr(node, "shape"))
    _refuse_shared(tree)
    stacks = [Stack(place, node) for _, node, place in found if place is not None]
    named = NamedTree(tree, stacks)
    nodes = _apart(found, stacks)
    fns = one_per_layer(layer, len(nodes))
    shared: dict[Any, Callable[..., Any]] = {}
    layer_fns = tuple(
        shared.setdefault((fn, _structure(node)), _with_key(fn))
        for fn, (_, node) in zip(fns, nodes, strict=True)
    )

    def write_back(parameters: Mapping[str, np.ndarray]) -> Tree:
        return named.of_leaves(named.written(parameters, named.leaves))

    return Source(
        shapes=named.shapes,
        value=lambda name: named.value(name, named.leaves),
        layers=tuple(nodes),
        embed=_of_tree(named, embed),
        layer_fns=layer_fns,
        head_loss=_of_tree(named, head_loss),
        whole=lambda fn: lambda values, batch: fn(named.tree(values), batch),
        stacked=bool(stacks),
        write_back=write_back,
    )


def _apart(
    found: Sequence[tuple[str, Tree, Stacked | None]], stacks: Sequence[Stack]
) -> list[tuple[str, Tree]]:
    """Path and shapes of each layer, those of stacks one by one."""
    nodes, left = [], iter(stacks)
    for path, node, place in found:
        if place is None:
            nodes.append((path, jax.tree.map(shape_of, node)))
        else:
            stack = next(left)
            own = jax.tree.map(stack.shape, node)
            nodes += [(name, own) for name in stack.names(path)]
    return nodes


def _of_tree(named: NamedTree, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the whole tree as one of its leaves by name."""
    run = _with_key(fn)
    return lambda values, *rest: run(named.tree(values), *rest)


def _with_key(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The last argument but the key is the batch; a key becomes `batch["key"]`."""

    def call(*arguments: Any) -> Any:
        *before, batch, key = arguments
        return fn(*before, batch if key is None else Rows(batch, key=key))

    return call


def _structure(node: Tree) -> Any:
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in map(shape_of, jax.tree.leaves(node)))
    return jax.tree.structure(node), shapes


def _check_leaves(tree: Tree) -> None:
    """Arrays or shapes, and nothing around them."""
    boxes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, meta.AxisMetadata))
    if any(isinstance(box, meta.AxisMetadata) for box in boxes):
        raise UserError(
            "the parameters lie in boxes of flax.linen (with_logical_partitioning, "
            "with_partitioning); pass flax.linen.unbox(params), which is what the model takes too"
        )
    for name, leaf in named_leaves(tree).items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UserError(
                f"{name} is no array but a {type(leaf).__name__}; a tree of parameters holds "
                "arrays alone. Of an Equinox module pass the arrays, "
                "`arrays, rest = eqx.partition(model, eqx.is_inexact_array)`, and let the "
                "functions put them together: `eqx.combine(arrays, rest)`"
            )


def _refuse_shared(tree: Tree) -> None:
    """One array at two places would be trained as two."""
    seen: dict[int, str] = {}
    for name, leaf in named_leaves(tree).items():
        if not isinstance(leaf, jax.ShapeDtypeStruct) and seen.setdefault(id(leaf), name) != name:
            raise UserError(
                f"{seen[id(leaf)]} and {name} are one array, which would be trained as two. Shared "
                "weights must be one leaf that the functions read (embedding and head may both "
                "read it, layers may not); copy one of them if they are to be trained apart"
            )
