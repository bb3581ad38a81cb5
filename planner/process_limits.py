"""What a process is given of a machine's memory: set by `configure()`, counted on by plans.

One place for both, so that no plan counts on memory that its run will not have.
"""

from __future__ import annotations

DEVICE_MEMORY_FRACTION = 0.92
"""Share of a GPU's memory that JAX's allocator takes at its start, unless told otherwise. What else
the GPU holds (context, kernels, communication buffers) lies in the rest."""

_PINNED_SHARE = 0.6
_SMALLEST_PINNED_GIB = 8


def usable_device_bytes(total_bytes: float, reserve_bytes: float) -> float:
    """Bytes of one GPU that a run can count on.

    Args:
      total_bytes: memory of the GPU.
      reserve_bytes: what it holds before the first array, beside the allocator's share.
    """
    return min(total_bytes, DEVICE_MEMORY_FRACTION * total_bytes + reserve_bytes)


def pinned_pool_limit_gib(host_memory_bytes: float) -> int:
    """Limit in GiB of JAX's pool of page-locked memory on a host, unless told otherwise.

    Gradients wait there. JAX's own limit of 64 GiB is too little for large models, and none at all
    would let a mistake take the whole host.
    """
    return max(_SMALLEST_PINNED_GIB, int(_PINNED_SHARE * host_memory_bytes / 2**30))
