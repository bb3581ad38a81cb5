"""The dithers of a flat array's elements, as the update's programs make them while they walk.

A dither follows from a key and an index within the parameter (`state.weight_rounding`). Programs
know an element by its place in the flat array, and one program serves all chunks of a structure, so
what belongs to the parameters comes as data: a place per block, and a table for the few blocks that
more than one parameter shares. Blocks are divided into runs of elements that follow each other in
one unit of one parameter, as long as the places of the parameters allow: whole units where all of
them have multiples of 64 elements. What is thorough, and slow, is then done once per run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.state.layout import FlatLayout
from slidedp_jax.state.traced_dither import factors_and_starts
from slidedp_jax.state.weight_rounding import NEAREST, UNIT, WeightRounding

_SHORTEST_KEPT_RUN = 16
"""Numbers of shorter runs would take more memory than they save work."""

Tables = Sequence[jax.Array]
"""In a program, a device's share of what `BlockDithers.arrays` lists; nothing for `nearest`."""

Runs = tuple[jax.Array, jax.Array] | None
"""Factor and start of each run, uint32 [blocks, runs]; None where every dither is the same."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockDithers:
    """What makes the dithers of a flat array, cut for some devices.

    A place is written as two numbers: key plus unit, and lane, which may be 64 or more.

    Attributes:
      first: place of each block's first element, less that of the first run of its row; uint32
        [blocks, 2].
      row: per block, its row in the device's share of `rows`; uint32 [blocks].
      rows: what is to be added for each run of a block; uint32 [devices * R, block_size / run, 2].
        The first row of each device is for all blocks of one parameter: lanes 0, run, 2 run, ...
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
    first, shared = np.zeros((blocks, 2), np.uint32), set[int]()
    stretches = list(_stretches(layout, rounding))
    for begin, end, key in stretches:
        own = np.arange(begin // size, -(-end // size))
        first[own] = _places(own * size - begin, key)
        if begin % size:
            shared.add(begin // size)
    first[sorted(shared)] = 0
    per_device = blocks // num_devices
    counts = np.bincount([block // per_device for block in shared], minlength=num_devices)
    rows = np.zeros((num_devices, 1 + int(counts.max()), size // run, 2), np.uint32)
    rows[:, 0, :, 1] = np.arange(0, size, run)
    row, used = np.zeros(blocks, np.uint32), np.ones(num_devices, np.uint32)
    for block in sorted(shared):
        device = block // per_device
        row[block] = used[device]
        rows[device, used[device]] = _places_of_runs(stretches, block, size, run)
        used[device] += 1
    return BlockDithers(first=first, row=row, rows=rows.reshape(-1, size // run, 2))


def run_length(layout: FlatLayout) -> int:
    """The largest power of two up to 64 at whose multiples all parameters and blocks begin."""
    return math.gcd(UNIT, layout.block_size, *(slot.offset for slot in layout.slots))


def _stretches(layout: FlatLayout, rounding: WeightRounding) -> Iterator[tuple[int, int, int]]:
    """(first element, element behind the last, key) of each parameter."""
    for slot in layout.slots:
        key = rounding.key(slot.name)
        assert key is not None
        yield slot.offset, slot.offset + slot.size, key


def _places(indices: np.ndarray, key: int) -> np.ndarray:
    """Indices within a parameter -> (key plus unit, lane), uint32 [..., 2]."""
    units, lanes = np.divmod(indices, UNIT)
    return np.stack([(units + key) % 2**32, lanes], axis=-1).astype(np.uint32)


def _places_of_runs(
    stretches: Sequence[tuple[int, int, int]], block: int, size: int, run: int
) -> np.ndarray:
    elements = np.arange(block * size, (block + 1) * size, run)
    places = np.zeros((len(elements), 2), np.uint32)
    for begin, end, key in stretches:
        own = (elements >= begin) & (elements < end)
        places[own] = _places(elements[own] - begin, key)
    return places


def runs_of_blocks(tables: Tables, block_size: int) -> Runs:
    """Factor and start of every run of a device's piece; in a trace."""
    if not tables:
        return None
    first, row, rows = tables
    places = first[:, None, :] + rows.at[row].get(mode="promise_in_bounds")
    units, lanes = places[..., 0] + (places[..., 1] >> 6), places[..., 1] & (UNIT - 1)
    factors, starts = factors_and_starts(units)
    starts = starts + factors * lanes
    if block_size // rows.shape[1] < _SHORTEST_KEPT_RUN:
        return factors, starts
    # Kept from being made again for every element.
    kept: tuple[jax.Array, jax.Array] = jax.lax.optimization_barrier((factors, starts))
    return kept


def dither_of_block(runs: Runs, number: jax.Array, block_size: int) -> jax.Array:
    """Dithers of one block, uint32 [block_size], or one for all; in a trace."""
    if runs is None:
        return jnp.asarray(NEAREST)
    count = runs[0].shape[1]
    own = (jax.lax.dynamic_slice(array, (number, 0), (1, count)) for array in runs)
    factors, starts = (array.reshape(count, 1) for array in own)
    lanes = jax.lax.broadcasted_iota(jnp.uint32, (count, block_size // count), 1)
    return _of_lanes(factors, lanes, starts)


def dither_of_piece(runs: Runs, block_size: int, *, second: bool = False) -> jax.Array:
    """Dithers of a device's whole piece, uint32 [piece], or one for all; in a trace.

    Args:
      runs: of the piece.
      block_size: elements per block.
      second: the same in other operations. XLA:CPU writes an array to memory that two kernels need,
        though making it twice is cheaper by far than reading it.
    """
    if runs is None:
        return jnp.asarray(NEAREST)
    factors, starts = (array[:, :, None] for array in runs)
    shape = (*runs[0].shape, block_size // runs[0].shape[1])
    if second:
        signed = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        lanes = jax.lax.bitcast_convert_type(signed, jnp.uint32)
    else:
        lanes = jax.lax.broadcasted_iota(jnp.uint32, shape, 2)
    return _of_lanes(factors, lanes, starts)


def _of_lanes(factors: jax.Array, lanes: jax.Array, starts: jax.Array) -> jax.Array:
    dithers: jax.Array = ((factors * lanes + starts) >> 16).reshape(-1)
    return dithers
