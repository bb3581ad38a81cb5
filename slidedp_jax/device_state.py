"""State of a part that stays on the compute devices, each holding its share of the flat arrays.

Used like `host_store.PartState`. What the host writes (loading, restoring) is gathered in host
memory and sent when the arrays are next asked for.
"""

from __future__ import annotations

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
      arrays: flat arrays [padded_size], sharded over the compute devices.
    """

    def __init__(self, layout: FlatLayout, arrays: Sequence[jax.Array]):
        self.layout = layout
        self._arrays = list(arrays)
        self._written: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays, with all that has been written."""
        with self._lock:
            for index, values in self._written.items():
                self._arrays[index] = jax.block_until_ready(
                    jax.device_put(values, self._arrays[index].sharding)
                )
            self._written.clear()
            return list(self._arrays)

    def replace(self, arrays: Sequence[jax.Array]) -> None:
        """Take the results of an update."""
        assert not self._written, "written while an update was running"
        self._arrays = list(arrays)

    def write(self, index: int, offset: int, values: np.ndarray) -> None:
        """Set a range of array `index`; several threads may write different ranges."""
        with self._lock:
            if index not in self._written:
                self._written[index] = np.array(self._arrays[index])
            whole = self._written[index]
        whole[offset : offset + len(values)] = values

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


@functools.partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, start: int, size: int) -> jax.Array:
    """A range of one device's share; compiled once per size, not per place."""
    return jax.lax.dynamic_slice(array, (start,), (size,))
