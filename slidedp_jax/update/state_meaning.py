"""What an optimizer's state arrays are: their names, and how each is made from its old value.

Arrays of equal shapes may hold different things: AdaBelief's second moment is not Adam's. So a
checkpoint says what its arrays are, and a trainer takes only what it would have made itself,
whatever its learning rates and other constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class StateMeaning:
    """The state of an optax transformation.

    Attributes:
      names: parameter name -> name of each of its state arrays, such as `ScaleByAdamState.mu`.
      programs: parameter name -> digest of the program that makes the arrays' next values, without
        its constants; a version of JAX and optax has its own.
      shared: names of the values that no parameter owns, such as `ScaleByAdamState.count`.
    """

    names: Mapping[str, tuple[str, ...]]
    programs: Mapping[str, str]
    shared: tuple[str, ...]


def digest(text: str) -> str:
    """Short, and the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def leaf_names(state: Any) -> list[str]:
    """A name for each leaf of a state tree: the class that holds it and its attribute there."""
    return [_name(state, path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def _name(root: Any, path: Sequence[Any]) -> str:
    node, name = root, "state"
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            name = f"{type(node).__name__}.{key.name}"
            node = getattr(node, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            node = node[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            node = node[key.key]
        else:  # a container of somebody's own: what lies inside it has no better name
            return f"{name}{jax.tree_util.keystr((key,))}"
    return name
