"""How XLA's pool of page-locked host memory is made as large as the waiting gradients need.

The pool is a best-fit allocator with coalescing (`xla/tsl/framework/bfc_allocator.cc`) that grows
by regions and never gives one back. Left to itself it doubles: a request that does not fit brings a
region of a power of two times 2 MiB, twice the largest so far, and the pool ends up with almost
twice what is in use (measured: 16 GiB for the 7.5 GiB of a 4B model's gradients, whose largest, the
embedding's, comes last). But a region that is asked for in one piece, larger than all before it, is
made in just that size rounded up to a power of two. So the pool is filled at the start by requests
of ascending powers of two that add up to the need; all are freed, and the regions stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from slidedp_jax.planner.hardware import MIB

SMALLEST_REGION_BYTES = 2 * MIB
ROOM_FOR_OTHERS_BYTES = 64 * MIB
"""For what else is copied by way of page-locked memory: token ids, losses."""
_SAVED_AT_ONCE_BYTES = 768 * MIB
"""What a save that steps wait for has on its way from the devices: twelve pieces of 64 MiB."""
_SPLIT_FROM_BYTES = 128 * MIB
"""A chunk of the pool is split when at least so much, or half of it, would be left over."""
_STEPS_PER_NEED = 32


def resident_copy_bytes(sizes: Sequence[float]) -> float:
    """Page-locked memory for what a save takes of the state that stays on the devices.

    Beside steps, an array at a time leaves as a whole (`update.resident_copies`): fp32 moments, or
    both halves of the weights. Without its own room the pool would grow in the middle of a step, to
    twice what it was, and the step would wait for it.

    Args:
      sizes: padded parameters of each part of the model that stays, on this host.
    """
    arrays = [4.0 * size for size in sizes]
    return max(max(arrays, default=0.0), min(_SAVED_AT_ONCE_BYTES, sum(arrays)))


def pool_regions(requests: Sequence[float]) -> tuple[int, ...]:
    """Sizes of the regions, ascending powers of two, that hold all `requests` at once.

    Args:
      requests: bytes of each allocation, in the order in which they are made.
    """
    return _regions(tuple(request for request in requests if request > 0))


@lru_cache(maxsize=1024)
def _regions(requests: tuple[float, ...]) -> tuple[int, ...]:
    if not requests:
        return ()
    need = sum(requests) + min(ROOM_FOR_OTHERS_BYTES, sum(requests))
    unit = SMALLEST_REGION_BYTES
    while unit * _STEPS_PER_NEED < need:
        unit *= 2
    count = -(-int(need) // unit)
    while True:
        regions = tuple(unit << bit for bit in range(count.bit_length()) if count >> bit & 1)
        if _fit(regions, requests):
            return regions
        count += 1


def _fit(regions: Sequence[int], requests: Sequence[float]) -> bool:
    """Whether best fit finds a place for every request."""
    room = [float(region) for region in regions]
    for request in requests:
        best, smallest = -1, math.inf
        for index, free in enumerate(room):
            if request <= free < smallest:
                best, smallest = index, free
        if best < 0:
            return False
        left = smallest - request
        room[best] = left if left >= min(request, _SPLIT_FROM_BYTES) else 0.0
    return True
