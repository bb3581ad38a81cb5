"""What XLA's pool of page-locked host memory really takes for what is asked of it.

The pool is a best-fit allocator with coalescing (`xla/tsl/framework/bfc_allocator.cc`) that grows
by regions. A region is at least as large as the request, a power of two times 2 MiB, and every
region after the first of its size is twice the one before; regions are never given back. So the
pool can hold almost twice what is in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from planner.hardware import MIB

FIRST_REGION_BYTES = 2 * MIB


def pinned_pool_bytes(requests: Iterable[float]) -> float:
    """Size that the pool grows to when all `requests` are held at once.

    Requests are placed largest first, into the first region with room.

    Args:
      requests: bytes of each allocation.
    """
    return _pool_bytes(
        tuple(sorted((request for request in requests if request > 0), reverse=True))
    )


@lru_cache(maxsize=1024)
def _pool_bytes(requests: tuple[float, ...]) -> float:
    next_region = float(FIRST_REGION_BYTES)
    total = 0.0
    free: list[float] = []
    for request in requests:
        for index, room in enumerate(free):
            if room >= request:
                free[index] -= request
                break
        else:
            grown_to_fit = next_region < request
            while next_region < request:
                next_region *= 2
            total += next_region
            free.append(next_region - request)
            if not grown_to_fit:
                next_region *= 2
    return total
