"""What lies on several hosts, whole on each: for reading beside steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_LARGEST_BLOCK = 1 << 24
_SMALLEST_BLOCK = 1 << 12
"""Bytes that cross at once; a program is compiled for each power of two."""


@final
class HostGather:
    """Gathers arrays of different lengths from all hosts, through one compute device of each.

    A collective: every host calls it in the same order, from the thread that issues steps.

    Args:
      mesh: compute devices, host by host.
    """

    def __init__(self, mesh: Mesh):
        first = {device.process_index: device for device in reversed(list(mesh.devices.flat))}
        own = np.array([first[host] for host in sorted(first)])
        hosts = Mesh(own, ("host",), axis_types=(jax.sharding.AxisType.Auto,))
        self._num_hosts = len(own)
        self._rows = NamedSharding(hosts, PartitionSpec("host"))
        same = NamedSharding(hosts, PartitionSpec())
        self._gather = jax.jit(lambda x: x, out_shardings=same)

    def gather(self, own: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """The arrays [n] of all hosts, one behind the other.

        Args:
          own: this host's.
          sizes: elements of each host's, which every host knows.
        """
        item = own.dtype.itemsize
        most, flat = max(sizes) * item, own.view(np.uint8)
        parts: list[list[np.ndarray]] = [[] for _ in sizes]
        for start in range(0, most, _LARGEST_BLOCK):
            rest = min(most - start, _LARGEST_BLOCK)
            length = max(_SMALLEST_BLOCK, 1 << (rest - 1).bit_length())
            block = np.zeros((1, length), np.uint8)
            some = flat[start : start + length]
            block[0, : len(some)] = some
            shape = (self._num_hosts, length)
            fill = functools.partial(_given, block)
            placed = jax.make_array_from_callback(shape, self._rows, fill)
            rows = np.asarray(self._gather(placed))
            for host, size in enumerate(sizes):
                parts[host].append(rows[host, : max(0, min(length, size * item - start))])
        return np.concatenate([part for of_host in parts for part in of_host]).view(own.dtype)


def _given(block: np.ndarray, _: Any) -> np.ndarray:
    return block
