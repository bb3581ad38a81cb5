"""The dithers of a flat array's elements, as the update's programs make them while they walk.

A dither is a hash of a key and an index within the parameter (`state.weight_rounding`). Programs
know an element by its place in the flat array, and one program serves all chunks of a structure, so
what belongs to the parameters comes as data: a number per block, to which the place in the block is
added, and a table for the few blocks that more than one parameter shares. Blocks are divided into
runs of elements that follow each other in one parameter: as long as the places allow, 64 where all
parameters have multiples of 64 elements. That keeps the table small and each of its entries good
for whole vector registers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.state.layout import FlatLayout
from slidedp_jax.state.traced_dither import hashed
from slidedp_jax.state.weight_rounding import NEAREST, SECTION, WeightRounding

_LONGEST_RUN = 64

Tables = Sequence[jax.Array]
"""In a program, a device's share of what `BlockDithers.arrays` lists; nothing for `nearest`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockDithers:
    """What makes the dithers of a flat array, cut for some devices.

    Attributes:
      first: per block, what is hashed for its first element, less the entry of its row; uint32
        [blocks].
      row: per block, its row in the device's share of `rows`; uint32 [blocks].
      rows: what is added for each run of a block; uint32 [devices * R, block_size / run]. The first
        row of each device is for all blocks of one parameter: 0, run, 2 run, ...
    """

    first: np.ndarray
    row: np.ndarray
    rows: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All three, each to be cut along its first dimension."""
        return self.first, self.row, self.rows


def block_dithers(
    layout: FlatLayout, rounding: WeightRounding, num_devices: int
) -> BlockDithers | None:
    """The tables of a part; None where every dither is the same.

    Args:
      layout: of the part.
      rounding: its keys.
      num_devices: over which the flat array is sharded, in equal pieces.
    """
    if rounding.seed is None:
        return None
    size, blocks = layout.block_size, len(layout.block_groups)
    run = run_length(layout)
    first, shared = np.zeros(blocks, np.uint32), set[int]()
    stretches = list(_stretches(layout, rounding))
    for begin, end, offset in stretches:
        own = np.arange(begin // size, -(-end // size), dtype=np.uint64)
        first[own] = (own * size + offset) % SECTION
        if begin % size:
            shared.add(begin // size)
    first[list(shared)] = 0
    per_device = blocks // num_devices
    counts = np.bincount([block // per_device for block in shared], minlength=num_devices)
    height = 1 + int(counts.max())
    rows = np.zeros((num_devices, height, size // run), np.uint32)
    rows[:, 0] = np.arange(0, size, run)
    row, used = np.zeros(blocks, np.uint32), np.ones(num_devices, np.uint32)
    for block in sorted(shared):
        device = block // per_device
        row[block] = used[device]
        rows[device, used[device]] = _offsets_of_runs(stretches, block, size, run)
        used[device] += 1
    return BlockDithers(first=first, row=row, rows=rows.reshape(-1, size // run))


def run_length(layout: FlatLayout) -> int:
    """The largest power of two up to 64 at whose multiples all parameters and blocks begin."""
    return math.gcd(_LONGEST_RUN, layout.block_size, *(slot.offset for slot in layout.slots))


def _stretches(layout: FlatLayout, rounding: WeightRounding) -> Iterator[tuple[int, int, int]]:
    """(first place, place behind the last, what to add to a place to get what is hashed)."""
    for slot in layout.slots:
        keys = rounding.keys(slot.name, slot.size)
        assert keys is not None
        for number, key in enumerate(keys):
            begin = slot.offset + number * SECTION
            end = min(begin + SECTION, slot.offset + slot.size)
            yield begin, end, (int(key) - slot.offset) % SECTION


def _offsets_of_runs(
    stretches: Sequence[tuple[int, int, int]], block: int, size: int, run: int
) -> np.ndarray:
    places = np.arange(block * size, (block + 1) * size, run, dtype=np.uint64)
    offsets = np.zeros(len(places), np.uint32)
    for begin, end, offset in stretches:
        own = (places >= begin) & (places < end)
        offsets[own] = (places[own] + np.uint64(offset)) % SECTION
    return offsets


def dither_of_block(tables: Tables, number: jax.Array, block_size: int) -> jax.Array:
    """Dithers of one block, uint32 [block_size], or one for all; in a trace."""
    if not tables:
        return jnp.asarray(NEAREST)
    first, row, rows = tables
    of_runs = jax.lax.dynamic_slice(rows, (row[number], jnp.uint32(0)), (1, rows.shape[1]))
    lanes = jax.lax.broadcasted_iota(jnp.uint32, (rows.shape[1], block_size // rows.shape[1]), 1)
    return hashed(first[number] + of_runs.reshape(-1, 1) + lanes).reshape(-1)


def dither_of_piece(tables: Tables, block_size: int, *, second: bool = False) -> jax.Array:
    """Dithers of a device's whole piece, uint32 [piece], or one for all; in a trace.

    Args:
      tables: of the device.
      block_size: elements per block.
      second: the same in other operations. XLA:CPU writes an array that two programs of a piece
        need to memory, though making it twice is cheaper by far than reading it.
    """
    if not tables:
        return jnp.asarray(NEAREST)
    first, row, rows = tables
    of_runs = first[:, None] + rows.at[row].get(mode="promise_in_bounds")
    shape = (*of_runs.shape, block_size // rows.shape[1])
    if second:
        of_runs = jax.lax.optimization_barrier(of_runs)
        signed = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        lanes = jax.lax.bitcast_convert_type(signed, jnp.uint32)
    else:
        lanes = jax.lax.broadcasted_iota(jnp.uint32, shape, 2)
    return hashed(of_runs[:, :, None] + lanes).reshape(-1)
