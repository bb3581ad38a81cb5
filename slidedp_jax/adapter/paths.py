"""Places in a pytree, and the parameter names that are made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from slidedp_jax.errors import UserError


@dataclass(frozen=True)
class Stacked:
    """Place of layers that are stacked, for `slidedp_jax.adapt(layers=...)`.

    Attributes:
      path: dotted path of the node whose arrays hold the layers (`"decoder.layers"`).
      axis: along which axis of each array, not negative.
    """

    path: str
    axis: int = 0


Layers = str | Stacked | Sequence[str | Stacked]
"""Where the layers of a model are."""

_NUMBER = re.compile(r"([0-9]+)")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name: their path joined by dots, as `models.streamed.Stage` names them."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise UserError("two parameters have the same name once their paths are joined by dots")
    return named


def child(node: Any, key: Any) -> Any:
    """What lies under one key of a mapping, a sequence or an object; KeyError if nothing does."""
    if isinstance(node, Mapping):
        for candidate in node:
            if str(candidate) == str(key):
                return node[candidate]
    elif hasattr(node, str(key)):
        return getattr(node, str(key))
    elif isinstance(node, Sequence) and str(key).isdigit() and int(key) < len(node):
        return node[int(key)]
    raise KeyError(key)


def find(root: Any, path: str) -> Any:
    """The node at a dotted path.

    Raises:
      UserError: there is none; the message lists what is there instead.
    """
    node = root
    walked: list[str] = []
    for key in path.split("."):
        try:
            node = child(node, key)
        except KeyError:
            place = f"{type(node).__name__} at {'.'.join(walked) or 'the root'}"
            raise UserError(
                f"layers={path!r}: the {place} has no {key!r}; it has {_keys(node)}"
            ) from None
        walked.append(key)
    return node


def _keys(node: Any) -> str:
    if isinstance(node, Mapping):
        keys = [str(key) for key in node]
    elif isinstance(node, Sequence):
        keys = [f"0 to {len(node) - 1}"]
    else:
        keys = [name for name in vars(node) if not name.startswith("_")]
    return ", ".join((by_number(keys) or sorted(keys))[:20]) or "nothing"


def looks_stacked(tree: Any) -> bool:
    """Whether all arrays of a tree, which are several, have the same first dimension above 1."""
    first = {leaf.shape[:1] for leaf in jax.tree.leaves(tree)}
    return len(jax.tree.leaves(tree)) > 1 and len(first) == 1 and first.pop() > (1,)


def layer_nodes(
    root: Any, layers: Layers, is_layer: Any
) -> tuple[tuple[str, Any, Stacked | None], ...]:
    """Dotted path and node of each layer or stack of layers, bottom first.

    Args:
      root: the model.
      layers: path of a list or mapping of layers, a stack, or one path or stack after the other.
      is_layer: whether a node is one layer rather than a list of them.

    Raises:
      UserError: a path leads nowhere, to no list, there is no layer, or their order is in doubt.
    """
    if isinstance(layers, Stacked):
        return ((layers.path, find(root, layers.path), layers),)
    if not isinstance(layers, str):
        paths = [place.path if isinstance(place, Stacked) else place for place in layers]
        nodes = tuple(
            (path, find(root, path), place if isinstance(place, Stacked) else None)
            for path, place in zip(paths, layers, strict=True)
        )
        if len(set(paths)) != len(nodes):
            raise UserError(f"layers={list(layers)!r} names a layer twice; give each one once")
        _check_listed(paths)
    else:
        group = find(root, layers)
        if is_layer(group) or not isinstance(group, Sequence | Mapping):
            raise UserError(
                f"layers={layers!r} is a {type(group).__name__}, not a list of layers. Give the "
                "path of a list (nnx.List, list, tuple, dict), or a list with the path of each "
                "layer; if its arrays hold all layers along an axis, as nn.scan and nnx.vmap make "
                f"them, layers=slidedp_jax.Stacked({layers!r})"
            )
        if isinstance(group, Mapping):
            _refuse_parts_of_a_stack(group, layers)
        keys = _ordered_keys(group, layers) if isinstance(group, Mapping) else range(len(group))
        nodes = tuple((f"{layers}.{key}", group[key], None) for key in keys)
    if not nodes:
        raise UserError(f"layers={layers!r} holds no layer; a decoder has at least one")
    return nodes


def _refuse_parts_of_a_stack(group: Mapping[Any, Any], layers: str) -> None:
    """A mapping that is one layer's parts, each of whose arrays holds all layers."""
    if not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(group)):
        return  # modules, which are told apart by themselves
    kinds = {str(jax.tree.map(lambda leaf: leaf.shape, part)) for part in group.values()}
    if by_number(group) is None and len(kinds) > 1 and looks_stacked(group):
        size = jax.tree.leaves(group)[0].shape[0]
        raise UserError(
            f"layers={layers!r} holds {_keys(group)}, which look like the parts of stacked layers: "
            f"all their arrays have the first dimension {size}. If that is the number of layers "
            f"(nn.scan, a scan of one's own), give layers=slidedp_jax.Stacked({layers!r}); if each "
            "of these is a layer, give the list of their paths, bottom first"
        )


def by_number(names: Iterable[Any]) -> list[Any] | None:
    """The names in the order of the numbers in them; None if they differ by more than numbers.

    As text, `layer_10` comes before `layer_2`.
    """
    names = list(names)
    parts = [_NUMBER.split(str(name)) for name in names]
    numbers = [tuple(map(int, part[1::2])) for part in parts]
    if len({tuple(part[::2]) for part in parts}) > 1 or len(set(numbers)) < len(names):
        return None
    return [name for _, name in sorted(zip(numbers, names, strict=True), key=lambda pair: pair[0])]


def _ordered_keys(group: Mapping[Any, Any], layers: str) -> list[Any]:
    """Keys of a mapping of layers, bottom layer first.

    `jax.tree.map`, `jax.jit` and checkpoints return a mapping with its keys sorted as text, so that
    its own order says nothing where it is the sorted one.
    """
    keys = list(group)
    numbered = by_number(keys)
    as_text = sorted(keys, key=str)
    backwards = numbered is not None and len(keys) > 1 and keys == numbered[::-1] != as_text
    if numbered is not None and not backwards:
        return numbered
    if backwards or (len(keys) > 1 and keys == as_text):
        why = "backwards by number" if backwards else "as sorted by name, not numbered"
        raise UserError(
            f"layers={layers!r} is a {type(group).__name__} whose keys lie {why} "
            f"({', '.join(map(str, keys[:5]))}, ...), so which layer comes first is in doubt. Give "
            f"a list with the path of each layer, bottom first: "
            f"layers={[f'{layers}.{key}' for key in keys[:2]]} and so on"
        )
    return keys


def _check_listed(layers: Sequence[str]) -> None:
    """Refuse paths that somebody has sorted as text."""
    numbered = by_number(layers)
    if numbered is not None and list(layers) == sorted(layers) != numbered:
        raise UserError(
            f"layers= lists the layers in the order of their names as text "
            f"({', '.join(layers[:4])}, ...), which is not that of their numbers: give them bottom "
            f"first ({', '.join(numbered[:4])}, ...)"
        )
