"""How the parameters of consecutive stages lie in one flat array.

A chunk's parameters are packed group by group (a group is a set of parameters that the optimizer
treats alike, such as decayed and not decayed), each group padded to whole blocks, the chunk to
whole blocks on every host device. The update kernel learns a block's group from `block_groups`.
Element i of the flat array lies on host device i // piece_size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.streamed import Stage


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one parameter lies: elements [offset, offset + size) of its chunk."""

    name: str
    shape: tuple[int, ...]
    group: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Layout of one chunk.

    Attributes:
      name: what the chunk is called in logs and errors (`layers.0-2`).
      slots: one per parameter, in the order of the stages' tree leaves.
      trees: the tree structure of each stage.
      block_size: elements that the update kernel handles at once; all of one group.
      num_pieces: host devices K over which the flat array is sharded.
      block_groups: group of each block, length padded_size / block_size.
    """

    name: str
    slots: tuple[Slot, ...]
    trees: tuple[Any, ...]
    block_size: int
    num_pieces: int
    block_groups: tuple[int, ...]

    @property
    def padded_size(self) -> int:
        """Elements of the flat array, padding included."""
        return len(self.block_groups) * self.block_size

    @property
    def piece_size(self) -> int:
        """Elements on each host device."""
        return self.padded_size // self.num_pieces

    @cached_property
    def num_parameters(self) -> int:
        """Elements that are parameters."""
        return sum(slot.size for slot in self.slots)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for chunks whose arrays look alike, whatever their names: a key for compilation."""
        slots = tuple((slot.shape, slot.offset) for slot in self.slots)
        return (slots, self.trees, self.padded_size, self.num_pieces)

    def unpack(self, flat: jax.Array) -> tuple[Any, ...]:
        """Flat [padded_size] -> one tree of parameters per stage; for use inside a trace."""
        leaves = [
            flat[slot.offset : slot.offset + slot.size].reshape(slot.shape) for slot in self.slots
        ]
        return self.unflatten(leaves)

    def pack(self, trees: Sequence[Any], dtype: jnp.dtype) -> jax.Array:
        """Trees per stage -> flat [padded_size] of `dtype`, zeros in the padding; in a trace."""
        leaves = [leaf for tree in trees for leaf in jax.tree.leaves(tree)]
        ordered = sorted(zip(self.slots, leaves, strict=True), key=lambda pair: pair[0].offset)
        parts: list[jax.Array] = []
        end = 0
        for slot, leaf in ordered:
            if slot.offset > end:
                parts.append(jnp.zeros(slot.offset - end, dtype))
            parts.append(leaf.astype(dtype).reshape(-1))
            end = slot.offset + slot.size
        if end < self.padded_size:
            parts.append(jnp.zeros(self.padded_size - end, dtype))
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def unflatten(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One value per slot -> one tree per stage."""
        trees = []
        start = 0
        for tree in self.trees:
            trees.append(jax.tree.unflatten(tree, leaves[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return tuple(trees)


def lay_out(
    name: str,
    stages: Sequence[Stage],
    groups: Mapping[str, int],
    *,
    block_size: int,
    num_pieces: int,
) -> ChunkLayout:
    """Lay out the parameters of `stages` as one chunk.

    Args:
      name: name of the chunk.
      stages: consecutive stages, first one first.
      groups: full parameter name -> group of optimizer treatment, 0, 1, ...
      block_size: elements per block.
      num_pieces: host devices; the flat array is padded to whole blocks on each.
    """
    shapes = [
        (parameter, tuple(leaf.shape))
        for stage in stages
        for parameter, leaf in zip(
            stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True
        )
    ]
    offsets: dict[str, int] = {}
    block_groups: list[int] = []
    for group in sorted({groups[parameter] for parameter, _ in shapes}):
        offset = len(block_groups) * block_size
        for parameter, shape in shapes:
            if groups[parameter] == group:
                offsets[parameter] = offset
                offset += math.prod(shape)
        blocks = -(-offset // block_size)
        block_groups.extend([group] * (blocks - len(block_groups)))
    last = block_groups[-1] if block_groups else 0
    block_groups.extend([last] * (-len(block_groups) % num_pieces))
    return ChunkLayout(
        name=name,
        slots=tuple(
            Slot(name=parameter, shape=shape, group=groups[parameter], offset=offsets[parameter])
            for parameter, shape in shapes
        ),
        trees=tuple(jax.tree.structure(stage.shapes) for stage in stages),
        block_size=block_size,
        num_pieces=num_pieces,
        block_groups=tuple(block_groups),
    )


def block_groups_array(layout: ChunkLayout) -> np.ndarray:
    """`block_groups` as int32 [padded_size / block_size]."""
    return np.asarray(layout.block_groups, np.int32)
