"""Places in a pytree, and the parameter names that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from slidedp_jax.errors import UserError

Path = tuple[Any, ...]
"""Keys, indices or attribute names from the root of a pytree to one of its nodes."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name: their path joined by dots, as `models.streamed.Stage` names them."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise UserError("two parameters have the same name once their paths are joined by dots")
    return named


def dotted(path: Path) -> str:
    """`("layers", 3)` -> `layers.3`."""
    return ".".join(map(str, path))


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
    return ", ".join(sorted(keys)[:20]) or "nothing"


def layer_nodes(root: Any, layers: str | Sequence[str], is_layer: Any) -> dict[str, Any]:
    """Each layer by its dotted path, bottom first.

    Args:
      root: the model.
      layers: path of a list of layers, or one path per layer.
      is_layer: whether a node is one layer rather than a list of them.

    Raises:
      UserError: a path leads nowhere, to no list, or there is no layer.
    """
    if not isinstance(layers, str):
        nodes = {path: find(root, path) for path in layers}
        if len(nodes) != len(layers):
            raise UserError(f"layers={list(layers)!r} names a layer twice; give each one once")
    else:
        group = find(root, layers)
        if is_layer(group) or not isinstance(group, Sequence | Mapping):
            raise UserError(
                f"layers={layers!r} is a {type(group).__name__}, not a list of layers. Give the "
                "path of a list (nnx.List, list, tuple, dict in order), or a list with the path of "
                "each layer; stacked parameters with a leading layer axis must be taken apart"
            )
        keys = list(group) if isinstance(group, Mapping) else range(len(group))
        nodes = {f"{layers}.{key}": group[key] for key in keys}
    if not nodes:
        raise UserError(f"layers={layers!r} holds no layer; a decoder has at least one")
    return nodes
