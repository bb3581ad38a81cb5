"""How the parameters of consecutive stages lie in flat arrays.

A chunk has one part for each kind of update that its parameters need: parameters with the same
optimizer state share a part, frozen ones make a part of their own. Within a part, parameters are
packed group by group (a group is a set of parameters that the optimizer treats alike, such as
decayed and not decayed), each group padded to whole blocks, the part to whole blocks on every host
device. In a group those come first whose sizes are multiples of large powers of two, so that
matrices begin where blocks do. The update kernel learns a block's group from `block_groups`.
Element i of a flat array lies on host device i // piece_size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.models.streamed import Stage
from slidedp_jax.planner.chunking import blocks_of_rows

FROZEN = -1
"""Kind of update of parameters that have none."""

Trained = tuple[tuple[bool, ...], ...]
"""Per stage and leaf of its tree, whether the leaf is updated."""


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


def spans(offset: int, size: int, piece_size: int) -> Iterator[tuple[int, slice, slice]]:
    """(piece, slice within the piece, slice within the range) that cover a range of a flat array.

    Args:
      offset: first element of the range.
      size: elements of the range.
      piece_size: elements of each piece of the array.
    """
    start, end = offset, offset + size
    while start < end:
        piece, inner = divmod(start, piece_size)
        length = min(end - start, piece_size - inner)
        outer = start - offset
        yield piece, slice(inner, inner + length), slice(outer, outer + length)
        start += length


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Layout of one part of a chunk, a flat array.

    Attributes:
      name: unique over all chunks (`layers.0-2`).
      slots: one per parameter, in the order of the stages' tree leaves.
      block_size: elements that the update kernel handles at once; all of one group.
      num_pieces: host devices K over which the flat array is sharded.
      block_groups: group of each block, length padded_size / block_size.
      kind: which of the optimizer's kinds of update the part needs; `FROZEN` for none.
      by_rows: the pieces hold whole rows of the matrix that comes first.
    """

    name: str
    slots: tuple[Slot, ...]
    block_size: int
    num_pieces: int
    block_groups: tuple[int, ...]
    kind: int = 0
    by_rows: bool = False

    @property
    def padded_size(self) -> int:
        """Elements of the flat array, padding included."""
        return len(self.block_groups) * self.block_size

    @property
    def piece_size(self) -> int:
        """Elements on each host device."""
        return self.padded_size // self.num_pieces

    @property
    def trained(self) -> bool:
        """Whether its parameters are updated."""
        return self.kind != FROZEN

    @cached_property
    def num_parameters(self) -> int:
        """Elements that are parameters."""
        return sum(slot.size for slot in self.slots)

    def spans(self, offset: int, size: int) -> Iterator[tuple[int, slice, slice]]:
        """(piece, slice within the piece, slice within the range) that cover a range."""
        return spans(offset, size, self.piece_size)

    def cut(self, flat: jax.Array) -> list[jax.Array]:
        """Flat [padded_size] -> its parameters; for use inside a trace."""
        return [
            flat[slot.offset : slot.offset + slot.size].reshape(slot.shape) for slot in self.slots
        ]

    def pack(self, leaves: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """Parameters -> flat [padded_size] of `dtype`, zeros in the padding; in a trace."""
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


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Layout of one chunk.

    Attributes:
      name: what the chunk is called in logs and errors (`layers.0-2`).
      parts: its flat arrays, a frozen one last.
      trees: the tree structure of each stage.
      leaf_parts: for each leaf of the stages' trees, the part in which it lies.
      resident: whether its state stays on the compute devices.
    """

    name: str
    parts: tuple[FlatLayout, ...]
    trees: tuple[Any, ...]
    leaf_parts: tuple[int, ...]
    resident: bool = False

    @property
    def trained_parts(self) -> tuple[FlatLayout, ...]:
        """Parts that are updated, the first ones."""
        return tuple(part for part in self.parts if part.trained)

    @property
    def slots(self) -> list[Slot]:
        """Slots of all parts, in the order of the stages' tree leaves."""
        slots = [iter(part.slots) for part in self.parts]
        return [next(slots[part]) for part in self.leaf_parts]

    @cached_property
    def trained(self) -> Trained:
        """Per stage and leaf, whether it is updated."""
        return self._per_stage([self.parts[part].trained for part in self.leaf_parts])

    @property
    def padded_size(self) -> int:
        """Elements of all flat arrays of one kind, padding included."""
        return sum(part.padded_size for part in self.parts)

    @property
    def num_parameters(self) -> int:
        """Elements that are parameters."""
        return sum(part.num_parameters for part in self.parts)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for chunks whose arrays look alike, whatever their names: a key for compilation."""
        return (*self.structure, self.resident)

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """The same, wherever the state lies."""
        parts = tuple(
            (
                tuple((slot.shape, slot.offset) for slot in part.slots),
                part.padded_size,
                part.num_pieces,
                part.trained,
            )
            for part in self.parts
        )
        return (parts, self.trees, self.leaf_parts)

    def unpack(self, parameters: Sequence[Sequence[jax.Array]]) -> tuple[Any, ...]:
        """The parameters of each part, in the order of its slots -> one tree per stage."""
        leaves = [iter(own) for own in parameters]
        return self.unflatten([next(leaves[part]) for part in self.leaf_parts])

    def pack(self, trees: Sequence[Any], dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        """Trees per stage, None in place of frozen leaves -> a flat array per trained part."""
        owners = [part for part in self.leaf_parts if self.parts[part].trained]
        leaves = jax.tree.leaves(tuple(trees))
        pairs = list(zip(owners, leaves, strict=True))
        return tuple(
            part.pack([leaf for owner, leaf in pairs if owner == number], dtype)
            for number, part in enumerate(self.parts)
            if part.trained
        )

    def unflatten(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One value per leaf -> one tree per stage."""
        return tuple(
            jax.tree.unflatten(tree, own)
            for tree, own in zip(self.trees, self._per_stage(leaves), strict=True)
        )

    def _per_stage(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        values = iter(leaves)
        return tuple(tuple(itertools.islice(values, tree.num_leaves)) for tree in self.trees)


def lay_out(
    name: str,
    stages: Sequence[Stage],
    groups: Mapping[str, int],
    *,
    block_size: int,
    num_pieces: int,
    kinds: Mapping[str, int] | None = None,
    by_rows: str | None = None,
) -> ChunkLayout:
    """Lay out the parameters of `stages` as one chunk.

    Args:
      name: name of the chunk.
      stages: consecutive stages, first one first.
      groups: full parameter name -> group of optimizer treatment within its kind, 0, 1, ...
      block_size: elements per block.
      num_pieces: host devices; flat arrays are padded to whole blocks on each.
      kinds: full parameter name -> kind of update, `FROZEN` for none; None: all of kind 0.
      by_rows: a matrix that comes first in its part, whose pieces then hold whole rows of it.
    """
    shapes = {
        parameter: tuple(leaf.shape)
        for stage in stages
        for parameter, leaf in zip(
            stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True
        )
    }
    kind_of = dict.fromkeys(shapes, 0) if kinds is None else {key: kinds[key] for key in shapes}
    present = sorted(set(kind_of.values()), key=lambda kind: (kind == FROZEN, kind))
    return ChunkLayout(
        name=name,
        parts=tuple(
            _lay_out_part(
                name if len(present) == 1 else f"{name}, part {number + 1}",
                {key: shape for key, shape in shapes.items() if kind_of[key] == kind},
                groups,
                block_size=block_size,
                num_pieces=num_pieces,
                kind=kind,
                by_rows=by_rows if by_rows is not None and kind_of.get(by_rows) == kind else None,
            )
            for number, kind in enumerate(present)
        ),
        trees=tuple(jax.tree.structure(stage.shapes) for stage in stages),
        leaf_parts=tuple(present.index(kind_of[parameter]) for parameter in shapes),
    )


def _lay_out_part(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    groups: Mapping[str, int],
    *,
    block_size: int,
    num_pieces: int,
    kind: int,
    by_rows: str | None,
) -> FlatLayout:
    own_groups = {parameter: 0 if kind == FROZEN else groups[parameter] for parameter in shapes}
    offsets: dict[str, int] = {}
    block_groups: list[int] = []
    first_group = None if by_rows is None else own_groups[by_rows]
    for group in sorted(set(own_groups.values()), key=lambda group: (group != first_group, group)):
        offset = len(block_groups) * block_size
        members = [parameter for parameter in shapes if own_groups[parameter] == group]
        for parameter in sorted(
            members, key=lambda name: (name != by_rows, -_alignment(shapes[name], block_size))
        ):
            offsets[parameter] = offset
            offset += math.prod(shapes[parameter])
        blocks = -(-offset // block_size)
        block_groups.extend([group] * (blocks - len(block_groups)))
    unit = num_pieces * (1 if by_rows is None else blocks_of_rows(shapes[by_rows][1], block_size))
    block_groups.extend([block_groups[-1]] * (-len(block_groups) % unit))
    return FlatLayout(
        name=name,
        slots=tuple(
            Slot(
                name=parameter,
                shape=shape,
                group=own_groups[parameter],
                offset=offsets[parameter],
            )
            for parameter, shape in shapes.items()
        ),
        block_size=block_size,
        num_pieces=num_pieces,
        block_groups=tuple(block_groups),
        kind=kind,
        by_rows=by_rows is not None,
    )


def _alignment(shape: tuple[int, ...], block_size: int) -> int:
    """The largest power of two up to a block that divides a parameter's size."""
    size = math.prod(shape)
    return min(size & -size, block_size)


def block_groups_array(layout: FlatLayout) -> np.ndarray:
    """`block_groups` as int32 [padded_size / block_size]."""
    return np.asarray(layout.block_groups, np.int32)
