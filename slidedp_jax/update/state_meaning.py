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
      hyperparameters: name -> place among the shared values, of those that `inject_hyperparams`
        keeps and no schedule sets.
      scheduled: names of those that a schedule sets.
    """

    names: Mapping[str, tuple[str, ...]]
    programs: Mapping[str, str]
    shared: tuple[str, ...]
    hyperparameters: Mapping[str, int]
    scheduled: frozenset[str]


def digest(text: str) -> str:
    """Short, and the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def leaf_names(state: Any) -> list[str]:
    """A name for each leaf of a state tree: the class that holds it and its attribute there."""
    return [_name(state, path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def numbered(names: Sequence[str]) -> list[str]:
    """Names that occur once as they are, others with their number (`mu[0]`, `mu[1]`)."""
    return [
        f"{name}[{names[:place].count(name)}]" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def hyperparameters(
    state: Any, owners: Sequence[str | None]
) -> tuple[dict[str, int], frozenset[str]]:
    """Names and places of hyperparameters among shared values, and names of those by schedule.

    A name is what `inject_hyperparams` calls it (`learning_rate`), with the labels and places that
    lead to it in front where several have that name (`fast.learning_rate`).

    Args:
      state: of the transformation.
      owners: of each leaf the parameter that owns it.
    """
    shared = [
        path
        for (path, _), owner in zip(
            jax.tree_util.tree_flatten_with_path(state)[0], owners, strict=True
        )
        if owner is None
    ]
    scheduled = {_inside(path, "hyperparams_states") for path in shared} - {None}
    found = {
        place: index
        for index, path in enumerate(shared)
        if (place := _inside(path, "hyperparams")) is not None
    }
    short = [place[-1] for place in found]

    def name(place: tuple[str, ...]) -> str:
        return place[-1] if short.count(place[-1]) == 1 else ".".join(place)

    free = {name(place): index for place, index in found.items() if place not in scheduled}
    return free, frozenset(name(place) for place in found if place in scheduled)


def _inside(path: Sequence[Any], field: str) -> tuple[str, ...] | None:
    """Labels and places on the way to an entry of a dict `field`, and its key."""
    for depth, key in enumerate(path[:-1]):
        inner = path[depth + 1]
        if getattr(key, "name", None) == field and isinstance(inner, jax.tree_util.DictKey):
            before = [getattr(k, "key", getattr(k, "idx", None)) for k in path[:depth]]
            return (*(str(part) for part in before if part is not None), str(inner.key))
    return None


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
