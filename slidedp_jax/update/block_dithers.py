"""The dithers of a flat array's elements, as the update's programs get them.

A dither follows from a parameter's key and an index within it (`state.weight_rounding`). Programs
know an element by its place in the flat array, and one program serves all chunks of a structure, so
what belongs to the parameters comes as data: where in the table each block begins, and what the few
blocks need that hold more than one parameter, or two sections of one.

Programs that walk over blocks read the dithers of a block from memory, in one piece: the table lies
in the caches of each core, and behind it the dithers of those few blocks. They walk in runs of
blocks that follow each other in the table. What XLA:CPU makes of a loop decides how fast it is, and
three things are done for its sake (JAX 0.11; each cost a fifth of the update's rate or more):

- A run's place in the table is one number for all its blocks. Looked up for each block, it made two
  operations more, and a loop of more than eight goes through a thread pool.
- The table holds 32 bits per number. Where there is more than one operation per byte, XLA cuts a
  kernel into pieces for several threads, though these blocks are far too small for that.
- The two readers of a block's dithers, the join and the split, get the table as two operands, one
  array in memory: a slice that both need would be written to memory, by an operation of its own.

A program that takes its piece as one expression computes them from their places, since reading at
computed places is slow.
It does so by runs of elements that follow each other in the table: of 64 elements, where all
parameters have multiples of 64.
"""

from __future__ import annotations

import bisect
import collections
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.state.layout import FlatLayout
from slidedp_jax.state.traced_dither import permuted
from slidedp_jax.state.weight_rounding import NEAREST, SECTION, TABLE, WeightRounding, begin
from slidedp_jax.update.kernel_form import KernelForm

_LONGEST_RUN = 64
_RANGE = SECTION - 1

Tables = Sequence[jax.Array]
"""In a program, a device's share of what `block_dithers` gives."""


def block_dithers(
    layout: FlatLayout, rounding: WeightRounding, num_devices: int, form: KernelForm
) -> tuple[np.ndarray, ...]:
    """What makes the dithers of a part; each array is to be cut along its first dimension.

    Args:
      layout: of the part.
      rounding: its keys.
      num_devices: over which the flat array is sharded, in equal pieces.
      form: of the kernel.

    Returns:
      Nothing for `nearest`. For forms that walk: where each block begins in its device's table,
      int32 [blocks]; runs of blocks, int32 [devices * R, 4]; and the tables, uint32 [devices * n].
      A run is its first block and the one behind its last, counted within the device, what is to be
      added to an element's index to find it in the table, and its blocks' group; those of a device
      ascend, and empty ones fill up. For `whole`: each block's first place,
      less that of its row, uint32 [blocks]; its row among its device's, uint32 [blocks]; and what
      is to be added for each run of a block, uint32 [devices * R, block_size / run], of which the
      first row of each device is 0, run, 2 run, ...
    """
    if rounding.seed is None:
        return ()
    places = _Places(layout, rounding, num_devices)
    return places.rows() if form == "whole" else places.tables()


def run_length(layout: FlatLayout) -> int:
    """The largest power of two up to 64 at whose multiples all parameters and blocks begin."""
    return math.gcd(_LONGEST_RUN, layout.block_size, *(slot.offset for slot in layout.slots))


class _Places:
    """Places in the table of a flat array's elements.

    Attributes:
      first: of the first element of each block; of blocks of padding alone, any; uint32 [blocks].
      shared: blocks whose other elements do not follow it in the table, in order.
    """

    def __init__(self, layout: FlatLayout, rounding: WeightRounding, num_devices: int):
        self._size = layout.block_size
        self._run = run_length(layout)
        self._groups = np.asarray(layout.block_groups, np.int32)
        self._num_devices = num_devices
        self._per_device = len(layout.block_groups) // num_devices
        self._stretches = sorted(_stretches(layout, rounding))
        self._starts = [start for start, _, _ in self._stretches]
        self.first = np.zeros(len(layout.block_groups), np.uint32)
        shared = set[int]()
        for start, end, place in self._stretches:
            own = np.arange(start // self._size, -(-end // self._size))
            self.first[own] = (place + own * self._size - start) % SECTION
            if start % self._size:
                shared.add(start // self._size)
        self.shared = sorted(shared)

    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For forms that walk; see `block_dithers`."""
        starts, behind = self.first.astype(np.int32), SECTION + self._size
        height = self._height()
        tables = np.zeros((self._num_devices, behind + height * self._size), np.uint32)
        tables[:, :SECTION] = TABLE
        tables[:, SECTION:behind] = np.resize(TABLE, self._size)
        for block, device, number in self._numbered():
            starts[block] = behind + number * self._size
            elements = np.arange(block * self._size, (block + 1) * self._size)
            tables[device, starts[block] :][: self._size] = TABLE[self._of_elements(elements)]
        return starts, self._runs(starts), tables.reshape(-1)

    def _runs(self, starts: np.ndarray) -> np.ndarray:
        """Blocks of a device that follow each other in the table; see `block_dithers`.

        As many rows for every device, and for every part of that structure: where a section begins
        in the table, and so in which of its blocks the table ends, is the parameter's own.
        """
        blocks, size = np.arange(self._per_device), self._size
        rows = []
        for device in range(self._num_devices):
            own = slice(device * self._per_device, (device + 1) * self._per_device)
            deltas, groups = starts[own] - blocks * size, self._groups[own]
            new = np.ones(len(blocks), bool)
            new[1:] = (deltas[1:] != deltas[:-1]) | (groups[1:] != groups[:-1])
            first = blocks[new]
            end = np.append(first[1:], self._per_device)
            rows.append(np.stack([first, end, deltas[new], groups[new]], axis=1))
        most = self._most_runs()
        runs = np.zeros((self._num_devices, most, 4), np.int32)
        runs[:, :, 3] = self._groups[-1]
        for device, own_rows in enumerate(rows):
            runs[device, : len(own_rows)] = own_rows
        return runs.reshape(-1, 4)

    def _most_runs(self) -> int:
        """Twice the stretches, shared blocks and groups of the device that has most of them."""
        size, blocks = self._size, len(self._groups)
        begins = np.zeros(blocks + 1, bool)
        for start, end, _ in self._stretches:
            begins[[start // size, -(-start // size), -(-end // size)]] = True
        for block in self.shared:
            begins[[block, block + 1]] = True
        begins[1:-1] |= self._groups[1:] != self._groups[:-1]
        begins[:: self._per_device] = True
        return 2 * int(begins[:-1].reshape(self._num_devices, -1).sum(axis=1).max())

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For `whole`; see `block_dithers`."""
        first, row = self.first.copy(), np.zeros(len(self.first), np.uint32)
        runs = self._size // self._run
        rows = np.zeros((self._num_devices, 1 + self._height(), runs), np.uint32)
        rows[:, 0] = np.arange(0, self._size, self._run)
        for block, device, number in self._numbered():
            first[block], row[block] = 0, 1 + number
            elements = np.arange(block * self._size, (block + 1) * self._size, self._run)
            rows[device, 1 + number] = self._of_elements(elements)
        return first, row, rows.reshape(-1, runs)

    def _height(self) -> int:
        """Most shared blocks of a device."""
        owners = [block // self._per_device for block in self.shared]
        return int(np.bincount(owners, minlength=self._num_devices).max())

    def _numbered(self) -> list[tuple[int, int, int]]:
        """Of shared blocks: (block, its device, its number among those of the device)."""
        of_device: collections.Counter[int] = collections.Counter()
        numbered = []
        for block in self.shared:
            device = block // self._per_device
            numbered.append((block, device, of_device[device]))
            of_device[device] += 1
        return numbered

    def _of_elements(self, elements: np.ndarray) -> np.ndarray:
        """Places of elements of one block in ascending order; 0 of padding."""
        places = np.zeros(len(elements), np.int64)
        first = max(0, bisect.bisect_right(self._starts, elements[0]) - 1)
        behind = bisect.bisect_right(self._starts, elements[-1])
        for start, end, place in self._stretches[first:behind]:
            own = (elements >= start) & (elements < end)
            places[own] = (place + elements[own] - start) % SECTION
        return places


def _stretches(layout: FlatLayout, rounding: WeightRounding) -> list[tuple[int, int, int]]:
    """(first element, element behind the last, place of the first) of each section.

    Blocks of padding alone are taken for sections, too; any dithers will do for them.
    """
    found = []
    for slot in layout.slots:
        key = rounding.key(slot.name)
        assert key is not None
        for section, start in enumerate(range(0, slot.size, SECTION)):
            end = min(start + SECTION, slot.size)
            found.append((slot.offset + start, slot.offset + end, begin(key, section)))
    behind = max(end for _, end, _ in found)
    padding = range(behind + -behind % layout.block_size, layout.padded_size, SECTION)
    return found + [(start, min(start + SECTION, layout.padded_size), 0) for start in padding]


def dither_of_block(table: jax.Array, start: jax.Array, block_size: int) -> jax.Array:
    """Dithers of the block that begins there in the table, uint32 [block_size], in a trace."""
    return jax.lax.dynamic_slice(table, (start,), (block_size,)).astype(jnp.uint32)


def dither_of_piece(tables: Tables, block_size: int, *, second: bool = False) -> jax.Array | None:
    """Dithers of a device's whole piece, uint32 [piece], in a trace; None for `nearest`.

    Args:
      tables: of the device.
      block_size: elements per block.
      second: the same in other operations. XLA:CPU writes an array to memory that two kernels need,
        though making it twice is cheaper by far than reading it.
    """
    if not tables:
        return None
    if tables[0].dtype == jnp.int32:  # of a form that walks
        starts, _, table, *_ = tables
        elements = starts[:, None] + jax.lax.broadcasted_iota(
            jnp.int32, (len(starts), block_size), 1
        )
        found = table.at[elements].get(mode="promise_in_bounds")
        return found.reshape(-1).astype(jnp.uint32)
    first, row, rows = tables
    of_runs = first[:, None] + rows.at[row].get(mode="promise_in_bounds")
    shape = (*of_runs.shape, block_size // rows.shape[1])
    if second:
        of_runs = jax.lax.optimization_barrier(of_runs)
        signed = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        lanes = jax.lax.bitcast_convert_type(signed, jnp.uint32)
    else:
        lanes = jax.lax.broadcasted_iota(jnp.uint32, shape, 2)
    return permuted(of_runs[:, :, None] + lanes).reshape(-1)


def dither_or_nearest(dither: jax.Array | None) -> jax.Array:
    """Dithers, or the one that rounds all to nearest."""
    return jnp.asarray(NEAREST) if dither is None else dither
