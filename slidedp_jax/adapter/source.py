"""What every kind of user's model is brought to before it becomes stages.

Functions take the parameters that they may read, then what the runtime hands on. `key` is a PRNG
key while a model that draws random numbers is trained, else None. Letters: B rows, T tokens, D
hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.adapter.stacked import Stack, StackedLeaves
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Batch

Tree = Any
Key = jax.Array | None
Values = Mapping[str, Any]
"""Every parameter of a model by name: its value, or its shape where it is not to be read."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model as parameters by name and functions over them.

    Attributes:
      shapes: of all parameters by name, `jax.ShapeDtypeStruct`.
      value: name -> what the user's model holds now, an array or its shape.
      layers: dotted path and shapes of the parameters of each layer, bottom first; no mapping,
        whose keys JAX's functions over trees sort as text. Their names are path and place in the
        layer's tree, joined by a dot.
      embed: (values, batch, key) -> x [B, T, D].
      layer_fns: per layer (layer tree, x, batch, key) -> x or (x, aux); equal layers share one
        object.
      head_loss: (values, x, batch, key) -> scalar.
      whole: a function of the user's whole model, (model, batch) -> anything, as one of
        (values, batch), all of which have values.
      stacked: whether layers lie in stacks, and were taken apart.
      write_back: masters by name -> the user's model with them; names that are left out stay as
        they are.
    """

    shapes: Mapping[str, jax.ShapeDtypeStruct]
    value: Callable[[str], Any]
    layers: tuple[tuple[str, Tree], ...]
    embed: Callable[[Values, Batch, Key], jax.Array]
    layer_fns: tuple[Callable[[Tree, jax.Array, Batch, Key], Any], ...]
    head_loss: Callable[[Values, jax.Array, Batch, Key], jax.Array]
    whole: Callable[[Callable[..., Any]], Callable[[Values, Batch], Any]]
    stacked: bool
    write_back: Callable[[Mapping[str, np.ndarray]], Any]


class NamedTree:
    """A tree of parameters by name, and back; layers that are stacked are parameters each.

    Attributes:
      leaves: of the tree by name, as they were.
      shapes: of the parameters by name.
    """

    def __init__(self, tree: Tree, stacks: Sequence[Stack] = ()):
        self.leaves = named_leaves(tree)
        self._structure = jax.tree.structure(tree)
        self._stacked = StackedLeaves(self.leaves, stacks)
        self.shapes = {name: self._stacked.shape(name) for name in self._stacked.parts()}

    def tree(self, values: Values) -> Tree:
        """The user's tree around some values."""
        leaves = [self._stacked.leaf(name, values) for name in self.leaves]
        return jax.tree.unflatten(self._structure, leaves)

    def value(self, name: str, leaves: Values) -> Any:
        """A parameter, of the leaves as they are now."""
        return self._stacked.value(name, leaves)

    def written(self, masters: Mapping[str, np.ndarray], leaves: Values) -> dict[str, Any]:
        """The leaves with masters in them, each as the kind of array that it was."""
        new = dict(leaves)
        for name, parts in self._stacked.names.items():
            if not masters.keys().isdisjoint(parts):
                values = {
                    part: masters[part] if part in masters else self.value(part, leaves)
                    for part in parts
                }
                new[name] = like(self._stacked.leaf(name, values), leaves[name])
        return new

    def of_leaves(self, leaves: Values) -> Tree:
        """The user's tree around other leaves."""
        return jax.tree.unflatten(self._structure, [leaves[name] for name in self.leaves])


class Rows(dict[str, Any]):
    """The arrays of the rows at hand; what is not there is asked for in vain, but helpfully."""

    def __missing__(self, name: str) -> Any:
        hint = {
            "segment_ids": "rows are packed or padded only where the batches have segment_ids; "
            "read batch.get('segment_ids'), or pass packed=True to adapt() if all have them",
            "key": "random numbers are drawn only in training and with dropout=True; read "
            "batch.get('key')",
            "layer_index": "only layer has an index",
            "labels": "read batch['targets']: the labels, already shifted by one",
        }
        raise UserError(
            f"a model function asked for batch[{name!r}]; the batch has {sorted(self)}. "
            + hint.get(name, "Name further arrays of your batches in adapt(token_arrays=...)")
        )


def one_per_layer(
    layer: Callable[..., Any] | Sequence[Callable[..., Any]], num_layers: int
) -> list[Callable[..., Any]]:
    """The user's layer functions, bottom first."""
    fns = list(layer) if isinstance(layer, Sequence) else [layer] * num_layers
    if len(fns) != num_layers:
        raise UserError(f"layer= has {len(fns)} functions for {num_layers} layers; give one each")
    return fns


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf without its values."""
    return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)


def like(value: np.ndarray, old: Any) -> Any:
    """A master as the kind of array that the user had: its dtype and its devices."""
    value = np.asarray(value).astype(old.dtype)
    if isinstance(old, np.ndarray):
        return value
    if isinstance(old, jax.Array):
        return jax.device_put(value, old.sharding)
    return jax.numpy.asarray(value)
