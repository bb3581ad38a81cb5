"""State of a part that stays on the compute devices, each holding its share of the flat arrays.

Used like `host_store.PartState`. What the host writes (loading, restoring) is gathered in host
memory for one array at a time, and sent when all of it is there or when it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.chunk import FlatLayout, spans


class DevicePartState:
    """Arrays of one part of a chunk: index 0 is `high`, 1 is `low`, the rest optimizer state.

    Args:
      layout: of the part.
      arrays: zeros [padded_size], sharded over the compute devices.
    """

    def __init__(self, layout: FlatLayout, arrays: Sequence[jax.Array]):
        self.layout = layout
        self._arrays = list(arrays)
        self._zero = set(range(len(arrays)))
        self._written: dict[int, _Written] = {}
        self._lock = threading.Lock()

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays, with all that has been written."""
        with self._lock:
            for index in list(self._written):
                self._send(index)
            return list(self._arrays)

    def replace(self, arrays: Sequence[jax.Array]) -> None:
        """Take the results of an update."""
        assert not self._written, "written while an update was running"
        self._arrays = list(arrays)
        self._zero.clear()

    def write(self, index: int, offset: int, values: np.ndarray) -> None:
        """Set a range of array `index`; several threads may write different ranges."""
        with self._lock:
            if index not in self._written:
                array = self._arrays[index]
                fresh = index in self._zero
                old = np.zeros(array.shape, array.dtype) if fresh else np.array(array)
                self._written[index] = _Written(old, missing=self.layout.num_parameters)
            written = self._written[index]
            written.writers += 1
        written.values[offset : offset + len(values)] = values
        with self._lock:
            written.writers -= 1
            written.missing -= len(values)
            if written.missing <= 0 and not written.writers and index in self._written:
                self._send(index)

    def _send(self, index: int) -> None:
        """Replace an array by what was written, and free that."""
        values = self._written.pop(index).values
        sharding = self._arrays[index].sharding
        self._arrays[index] = jax.block_until_ready(jax.device_put(values, sharding))
        self._zero.discard(index)

    def read(self, index: int, offset: int, size: int) -> np.ndarray:
        """A fresh copy of a range of array `index`."""
        array = self.arrays[index]
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        share = len(array) // sharding.mesh.size
        out = np.empty(size, array.dtype)
        for piece, inner, outer in spans(offset, size, share):
            own = array.addressable_data(piece)
            out[outer] = _cut(own, inner.start, inner.stop - inner.start)
        return out


@dataclasses.dataclass
class _Written:
    """An array on its way to the devices, how much of it is missing, and who is writing."""

    values: np.ndarray
    missing: int
    writers: int = 0


@functools.partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, start: int, size: int) -> jax.Array:
    """A range of one device's share; compiled once per size, not per place."""
    return jax.lax.dynamic_slice(array, (start,), (size,))
