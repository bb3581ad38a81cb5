"""Page-locked memory: of arrays that JAX's CPU devices own, and of the pool for downloads.

GPUs copy from and into such memory without staging. A range is registered with the CUDA driver
through the GPU client; every GPU of the process may then read it at full speed. A registered range
must be unregistered before its memory is freed: a stale registration makes later pinned allocations
fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import PINNED_LIMIT_GIB, page_lock, page_unlock
from slidedp_jax.planner.hardware import GIB, size_text
from slidedp_jax.process import current_setup

SMALLEST_LOCKED_BYTES = 1 << 20
"""Smaller ranges share pages with their neighbours and cannot be registered; copies of them are
staged, which costs microseconds."""


class PageLock:
    """Registered ranges of one process; `release` unregisters them all.

    On the CPU backend nothing is registered.
    """

    def __init__(self, device: jax.Device):
        self._gpu = device if device.platform != "cpu" else None
        self._pointers: list[int] = []

    def lock(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Register (address, bytes) ranges.

        Raises:
          RuntimeError: the driver refuses (locked-memory limit, not enough memory); nothing stays
            registered.
        """
        if self._gpu is None:
            return
        total = 0
        for pointer, num_bytes in ranges:
            if num_bytes < SMALLEST_LOCKED_BYTES:
                continue
            try:
                page_lock(self._gpu, pointer, num_bytes)
            except Exception as error:
                self.release()
                raise RuntimeError(
                    f"page-locking {num_bytes} bytes of host memory failed after {total} bytes: "
                    f"{error}. Raise the locked-memory limit (ulimit -l) or free host memory."
                ) from error
            self._pointers.append(pointer)
            total += num_bytes

    def release(self) -> None:
        """Unregister every range; must run before their memory is freed."""
        while self._pointers:
            assert self._gpu is not None
            page_unlock(self._gpu, self._pointers.pop())


def check_pinned_limit(regions: Sequence[int], device: jax.Device) -> None:
    """Whether the pool may become as large as `regions`, bytes each, before anything is made.

    Raises:
      UserError: its limit, fixed at the start of the process, is lower.
    """
    limit_gib, need = current_setup().pinned_limit_gib, sum(regions)
    if device.platform != "cpu" and need > limit_gib * GIB:
        raise UserError(
            f"the gradients of a step wait in {size_text(need)} of page-locked memory, and this "
            f"process allows {limit_gib} GiB: pass pinned_limit_gib={-(-need // GIB)} to "
            f"slidedp_jax.configure(), or set {PINNED_LIMIT_GIB} to that, if the host has it"
        )


def reserve_pinned(regions: Sequence[int], device: jax.Device) -> None:
    """Make regions of page-locked memory, bytes each, for the downloads to come.

    They are held together and then given to the pool of `device`'s client, which keeps them; see
    `planner.pinned_pool`. Takes about 0.6 s per GiB. Nothing is done on CPUs.
    """
    if device.platform == "cpu":
        return
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    # Untouched zeros take no memory of their own.
    jax.block_until_ready([jax.device_put(np.zeros(size, np.uint8), pinned) for size in regions])
