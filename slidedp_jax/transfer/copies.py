"""Copies between host and compute devices that take no detour.

On GPUs an upload of a page-locked view is a plain DMA. On the CPU backend
`device_put` may alias the host state, so the copy is made by hand: a later in-place update must not
reach what was uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

Index = tuple["slice[int | None, int | None, None]", ...] | None
"""A shard's place in its array; of flat arrays, one slice."""


def upload(
    pieces: Sequence[np.ndarray], sharding: NamedSharding, shape: tuple[int, ...]
) -> jax.Array:
    """Copy one piece to each device of `sharding`'s mesh, in its order; returns at once on GPUs.

    The pieces are the shards of an array of `shape`; of a replicated one, they are all the same.
    """
    size = pieces[0].shape[0]
    in_host_memory = sharding.mesh.devices.flat[0].platform == "cpu"

    def shard(index: Index) -> np.ndarray:
        piece: np.ndarray = pieces[_start(index) // size]
        if in_host_memory:
            piece = piece.copy()
        return piece

    # One call for all devices; a list of arrays for `device_put` costs several times as much.
    return jax.make_array_from_callback(shape, sharding, shard)


def download(array: jax.Array) -> jax.Array:
    """Start copying a device array into pinned host memory, with the same mesh and spec."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    pinned = NamedSharding(sharding.mesh, sharding.spec, memory_kind="pinned_host")
    copy: jax.Array = jax.device_put(array, pinned)
    return copy


def on_host_devices(parts: Sequence[np.ndarray], sharding: NamedSharding, size: int) -> jax.Array:
    """One array [size] over the host devices from pieces in host memory, without a copy.

    (Without a copy if the pieces begin on 64-byte boundaries, as blocks of real models do.)
    """
    piece = len(parts[0])
    return jax.make_array_from_callback(
        (size,), sharding, lambda index: parts[_start(index) // piece]
    )


def _start(index: Index) -> int:
    assert index is not None
    return index[0].start or 0
