"""Copies between host and compute devices that take no detour.

On GPUs an upload is `device_put` of a page-locked view, a plain DMA. On the CPU backend
`device_put` may alias the host state, so the copy is made by hand: a later in-place update must not
reach what was uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def upload(views: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Copy each view to the device beside it; returns at once on GPUs."""
    if devices[0].platform == "cpu":
        return [
            jnp.array(view, copy=True, device=device)
            for view, device in zip(views, devices, strict=True)
        ]
    return jax.device_put(list(views), list(devices))


def download(array: jax.Array) -> jax.Array:
    """Start copying a device array into pinned host memory, with the same mesh and spec."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    return jax.device_put(
        array, NamedSharding(sharding.mesh, sharding.spec, memory_kind="pinned_host")
    )


def on_host_devices(parts: Sequence[np.ndarray], sharding: NamedSharding, size: int) -> jax.Array:
    """One array [size] over the host devices from pieces in host memory, without a copy.

    (Without a copy if the pieces begin on 64-byte boundaries, as blocks of real models do.)
    """
    piece = len(parts[0])
    return jax.make_array_from_callback(
        (size,), sharding, lambda index: parts[(index[0].start or 0) // piece]
    )
