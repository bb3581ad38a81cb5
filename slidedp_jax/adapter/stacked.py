"""Layers that lie in a model as one: each of its arrays holds all layers along an axis.

So do `flax.linen.scan` and `flax.nnx.vmap` make them, and most code that runs `jax.lax.scan` over
its layers. Taken apart they are parameters `path.3.rest` that are views of the user's arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.adapter.paths import Stacked, named_leaves
from slidedp_jax.errors import UserError


class Stack:
    """A stack of layers that has been found in a model.

    Args:
      place: where.
      node: its parameters, a tree of arrays or shapes.

    Attributes:
      num_layers: in it.

    Raises:
      UserError: its arrays are of different lengths, or lack the axis.
    """

    def __init__(self, place: Stacked, node: Any):
        self.path, self.axis = place.path, place.axis
        leaves = named_leaves(node)
        short = [name for name, leaf in leaves.items() if len(leaf.shape) <= place.axis]
        lengths = {leaf.shape[place.axis]: name for name, leaf in leaves.items() if not short}
        if place.axis < 0 or short or len(lengths) != 1:
            found = {name: tuple(leaf.shape) for name, leaf in list(leaves.items())[:6]}
            raise UserError(
                f"layers={place!r}: the arrays there are {found}, which do not hold the same "
                f"number of layers along axis {place.axis}. Give the axis of the layers (0 for "
                "nn.scan and nnx.vmap by default, 1 in some models), and the path of the stack "
                "alone"
            )
        (self.num_layers,) = lengths

    def shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """Of one layer's part of an array."""
        axis = self.axis
        return jax.ShapeDtypeStruct((*leaf.shape[:axis], *leaf.shape[axis + 1 :]), leaf.dtype)

    def names(self, name: str) -> list[str]:
        """Of the layers' parts of a parameter."""
        rest = name.removeprefix(self.path)
        return [f"{self.path}.{number}{rest}" for number in range(self.num_layers)]

    def part(self, leaf: Any, number: int) -> Any:
        """One layer's part of an array, a view where memory allows it; of a shape, a shape."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return self.shape(leaf)
        if isinstance(leaf, jax.Array) and not _is_in_host_memory(leaf):
            return jax.lax.dynamic_index_in_dim(leaf, number, self.axis, keepdims=False)
        return np.moveaxis(np.asarray(leaf), self.axis, 0)[number]

    def together(self, parts: Sequence[Any], leaf: Any) -> Any:
        """The array of which these are the layers' parts, with the dtype of `leaf`.

        Where one has a shape alone, so has the whole.
        """
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in parts):
            return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
        if any(isinstance(part, jax.Array) for part in parts):
            return jnp.stack(parts, self.axis)
        whole = np.empty(leaf.shape, leaf.dtype)
        for number, part in enumerate(parts):
            np.moveaxis(whole, self.axis, 0)[number] = part
        return whole


class StackedLeaves:
    """The leaves of a tree of which some hold several layers.

    Args:
      leaves: by name.
      stacks: whose paths begin the names of what they hold.

    Attributes:
      names: leaf -> names of its parts in order of the layers; its own name if it is no stack's.
    """

    def __init__(self, leaves: Mapping[str, Any], stacks: Sequence[Stack]):
        self._leaves = leaves
        self._stack_of = {
            name: stack
            for stack in stacks
            for name in leaves
            if name == stack.path or name.startswith(f"{stack.path}.")
        }
        self.names = {
            name: self._stack_of[name].names(name) if name in self._stack_of else [name]
            for name in leaves
        }
        self._places = {
            part: (leaf, number)
            for leaf, parts in self.names.items()
            for number, part in enumerate(parts)
        }

    def parts(self) -> list[str]:
        """Names of all parameters."""
        return list(self._places)

    def shape(self, part: str) -> jax.ShapeDtypeStruct:
        """Of a parameter."""
        leaf, _ = self._places[part]
        if leaf in self._stack_of:
            return self._stack_of[leaf].shape(self._leaves[leaf])
        return jax.ShapeDtypeStruct(tuple(self._leaves[leaf].shape), self._leaves[leaf].dtype)

    def value(self, part: str, leaves: Mapping[str, Any]) -> Any:
        """A parameter, of the leaves as they are now."""
        leaf, number = self._places[part]
        if leaf in self._stack_of:
            return self._stack_of[leaf].part(leaves[leaf], number)
        return leaves[leaf]

    def leaf(self, name: str, values: Mapping[str, Any]) -> Any:
        """A leaf of the tree around some values."""
        if name not in self._stack_of:
            return values[name]
        parts = [values[part] for part in self.names[name]]
        return self._stack_of[name].together(parts, self._leaves[name])


def _is_in_host_memory(array: jax.Array) -> bool:
    """Whether NumPy can look at an array without a copy."""
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"
