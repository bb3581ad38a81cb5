"""State of a part that stays on the compute devices, each holding its share of the flat arrays.

Used like `host_store.PartState`. What the host writes (loading, restoring) is gathered in host
memory for one array at a time, and sent when all of it is there or when it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from slidedp_jax.state.host_share import WHOLE, HostShare
from slidedp_jax.state.layout import FlatLayout, spans

_ELEMENTS_AT_ONCE = 1 << 24
"""Read at once: bounds what passes through page-locked memory."""
_SMALLEST_CUT = 1 << 16
"""Fewer elements are not worth a program of their own."""


class DevicePartState:
    """Arrays of one part of a chunk: index 0 is `high`, 1 is `low`, the rest optimizer state.

    Args:
      layout: of the part.
      arrays: [padded_size / H] each, zeros where no parameter is, sharded over the compute devices
        of this host.
      share: the part of the flat arrays that lies on this host.
    """

    elements_at_once = _ELEMENTS_AT_ONCE

    def __init__(self, layout: FlatLayout, arrays: Sequence[jax.Array], share: HostShare = WHOLE):
        self.layout = layout
        self._first = share.first(layout.padded_size)
        self._share = share
        owned = (share.owned(layout.padded_size, slot.offset, slot.size) for slot in layout.slots)
        self._num_parameters = sum(own.stop - own.start for own in owned)
        self.dtypes = [array.dtype for array in arrays]
        self._arrays = list(arrays)
        self._written: dict[int, _Written] = {}
        self._changed = threading.Condition()

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays, with all that has been written."""
        with self._changed:
            self._changed.wait_for(lambda: not any(w.writers for w in self._written.values()))
            for index in list(self._written):
                self._send(index)
            return list(self._arrays)

    def replace(self, arrays: Sequence[jax.Array]) -> None:
        """Take the results of an update."""
        assert not self._written, "written while an update was running"
        self._arrays = list(arrays)

    def write(self, index: int, offset: int, values: np.ndarray) -> None:
        """Set a range of array `index`; several threads may write different ranges.

        What lies on other hosts is left to them.
        """
        own = self._share.owned(self.layout.padded_size, offset, len(values))
        values, offset = values[own], offset + own.start - self._first
        if not len(values):
            return
        with self._changed:
            if index not in self._written:
                array = self._arrays[index]
                self._written[index] = _Written(np.zeros(array.shape, array.dtype))
            written = self._written[index]
            written.writers += 1
        done = 0
        try:
            written.values[offset : offset + len(values)] = values
            done = len(values)
        finally:
            with self._changed:
                written.writers -= 1
                written.ranges[offset] = max(done, written.ranges.get(offset, 0))
                whole = sum(written.ranges.values()) >= self._num_parameters
                if whole and not written.writers:
                    self._send(index)
                self._changed.notify_all()

    def _send(self, index: int) -> None:
        """Bring what was written into an array, and free it."""
        written, old = self._written.pop(index), self._arrays[index]
        values = written.values
        if not written.covers(self._num_parameters):
            values = np.array(old)
            for offset, size in written.ranges.items():
                values[offset : offset + size] = written.values[offset : offset + size]
        self._arrays[index] = jax.block_until_ready(jax.device_put(values, old.sharding))

    def read(self, index: int, offset: int, size: int) -> np.ndarray:
        """A fresh copy of a range of array `index`."""
        out = np.empty(size, self.dtypes[index])
        self.read_into(index, offset, out)
        return out

    def read_into(self, index: int, offset: int, out: np.ndarray) -> None:
        """Copy the range of array `index` that begins at `offset` and is as long as `out`.

        It lies on this host. All of it is cut on the devices before any is waited for: a program
        waits for those of a step that were issued before it. So that takes as much memory there as
        `out`, but no more than `elements_at_once` elements.
        """
        if not len(out):
            return
        array = self.arrays[index]
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        share = len(array) // sharding.mesh.size
        block_size = self.layout.block_size
        assert 0 <= offset - self._first <= len(array) - len(out), "on another host"
        for piece, inner, outer in spans(offset - self._first, len(out), share):
            own = array.addressable_data(piece)
            for first in range(0, outer.stop - outer.start, self.elements_at_once):
                some = out[outer][first : first + self.elements_at_once]
                begin = inner.start + first
                cuts = [
                    (start, _sent(cut(own, begin + start, size, block_size)))
                    for start, size in _sizes(len(some), share - begin)
                ]
                for start, values in cuts:
                    into = some[start : start + len(values)]
                    into[:] = np.asarray(values)[: len(into)]

    def sent_to_host(self, index: int) -> list[jax.Array]:
        """Start copying all of array `index`, of each device its share, in their order.

        No program runs for it, so it waits for none that was issued before; on GPUs it takes as
        much page-locked memory as the array is large.
        """
        array = self.arrays[index]
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        return [_sent(array.addressable_data(n)) for n in range(sharding.mesh.size)]


def _sent(values: jax.Array) -> jax.Array:
    """Start the copy to page-locked memory, whose address NumPy then takes.

    Straight into other memory, a GPU's values go at 1.3 GB/s, by a processor's work.
    """
    (device,) = values.devices()
    if device.platform == "cpu":
        return values
    copy: jax.Array = jax.device_put(
        values, SingleDeviceSharding(device, memory_kind="pinned_host")
    )
    return copy


def _sizes(length: int, room: int) -> Iterator[tuple[int, int]]:
    """(begin, size) that cover a length by few sizes, since a program is compiled for each.

    Powers of two; the last one may reach beyond the length, but not beyond the room.
    """
    start, size = 0, _ELEMENTS_AT_ONCE
    while start < length:
        while size > max(length - start, _SMALLEST_CUT):
            size //= 2
        size = min(size, room - start)
        yield start, size
        start += size


@dataclasses.dataclass
class _Written:
    """An array on its way to the devices: what was written where, and how many are writing."""

    values: np.ndarray
    ranges: dict[int, int] = dataclasses.field(default_factory=dict)
    writers: int = 0

    def covers(self, num_elements: int) -> bool:
        """Whether the ranges are all that there is, each element in one of them."""
        ordered = sorted(self.ranges.items())
        disjoint = all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ordered))
        return disjoint and sum(self.ranges.values()) == num_elements


def cut(array: jax.Array, start: int, size: int, block_size: int) -> jax.Array:
    """Elements [start, start + size) of one device's share; compiled once per size, not per place.

    Indices of programs are int32, so a place beyond 2^31 is given as a row of blocks and an offset.
    """
    rows = len(array) // block_size
    count = min(rows, -(-size // block_size) + 1)
    first = min(start // block_size, rows - count)
    offset = start - first * block_size
    elements: jax.Array = _cut_rows(array, first, offset, count, size, block_size)
    return elements


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _cut_rows(
    array: jax.Array, first: int, offset: int, count: int, size: int, block_size: int
) -> jax.Array:
    rows = jax.lax.dynamic_slice(array.reshape(-1, block_size), (first, 0), (count, block_size))
    return jax.lax.dynamic_slice(rows.reshape(-1), (offset,), (size,))
