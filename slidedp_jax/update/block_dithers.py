"""The dithers of a flat array's elements, as the update's programs get them.

A dither follows from a parameter's key and an index within it (`state.weight_rounding`). Programs
know an element by its place in the flat array, and one program serves all chunks of a structure, so
what belongs to the parameters comes as data: where in the table each block begins, and what the few
blocks need that hold more than one parameter, or two sections of one.

Programs that walk over blocks read the dithers of a block from memory, in one piece: the table lies
in the caches of each core, and behind it the dithers of those few blocks. A program that takes its
piece as one expression computes them from their places, since reading at computed places is slow.
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
      int32 [blocks], and the tables, uint16 [devices * n]. For `whole`: each block's first place,
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

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """For forms that walk; see `block_dithers`."""
        starts, behind = self.first.astype(np.int32), SECTION + self._size
        height = self._height()
        tables = np.zeros((self._num_devices, behind + height * self._size), np.uint16)
        tables[:, :SECTION] = TABLE
        tables[:, SECTION:behind] = np.resize(TABLE, self._size)
        for block, device, number in self._numbered():
            starts[block] = behind + number * self._size
            elements = np.arange(block * self._size, (block + 1) * self._size)
            tables[device, starts[block] :][: self._size] = TABLE[self._of_elements(elements)]
        return starts, tables.reshape(-1)

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
    """(first element, element behind the last, place of the first) of each section."""
    found = []
    for slot in layout.slots:
        key = rounding.key(slot.name)
        assert key is not None
        for section, start in enumerate(range(0, slot.size, SECTION)):
            end = min(start + SECTION, slot.size)
            found.append((slot.offset + start, slot.offset + end, begin(key, section)))
    return found


def dither_of_block(tables: Tables, number: jax.Array, block_size: int) -> jax.Array | None:
    """Dithers of one block, uint32 [block_size], in a trace; None for `nearest`."""
    if not tables:
        return None
    starts, table = tables
    dithers = jax.lax.dynamic_slice(table, (starts[number],), (block_size,))
    return dithers.astype(jnp.uint32)


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
    if len(tables) == 2:
        starts, table = tables
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
