"""Copies between host and compute devices that take no detour.

On GPUs an upload of a page-locked view is a plain DMA. On the CPU backend
`device_put` may alias the host state, so the copy is made by hand: a later in-place update must not
reach what was uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

Index = tuple["slice[int | None, int | None, None]", ...] | None
"""A shard's place in its array; of flat arrays, one slice."""


def upload(
    pieces: Sequence[np.ndarray],
    sharding: NamedSharding,
    shape: tuple[int, ...],
    first: int = 0,
) -> jax.Array:
    """Copy one piece to each device of `sharding`'s mesh, in its order; returns at once on GPUs.

    The pieces are the shards of an array of `shape`; of a replicated one, they are all the same.
    They are those of this host's devices, the first of which is the `first` of the mesh.
    """
    size = pieces[0].shape[0]
    in_host_memory = sharding.mesh.devices.flat[0].platform == "cpu"

    def shard(index: Index) -> np.ndarray:
        piece: np.ndarray = pieces[_start(index) // size - first]
        if in_host_memory:
            piece = piece.copy()
        return piece

    # One call for all devices; a list of arrays for `device_put` costs several times as much.
    return jax.make_array_from_callback(shape, sharding, shard)


def download(array: jax.Array) -> jax.Array:
    """Start copying a device array into pinned host memory, with the same mesh and spec."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    return to_memory(array, NamedSharding(sharding.mesh, sharding.spec, memory_kind="pinned_host"))


def to_memory(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Start copying to another memory of the same devices, each its own shard."""
    if array.is_fully_addressable:
        copy: jax.Array = jax.device_put(array, sharding)
        return copy
    # Across hosts `device_put` makes a program of it, which compute would wait for.
    shards = [
        jax.device_put(
            shard.data, SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind)
        )
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def place(values: Any, sharding: NamedSharding) -> Any:
    """NumPy arrays on the devices, of which this host fills its own; all hosts have the same.

    `device_put` across hosts would compare them all, by a collective.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)

    def fill(array: Any) -> jax.Array:
        whole = np.asarray(array)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(fill, values)


def first_of_this_host(mesh: Mesh) -> tuple[int, int]:
    """(number in the mesh of this host's first device, devices of this host), side by side."""
    own = [
        number
        for number, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    assert own == list(range(own[0], own[0] + len(own))), "hosts follow one another in a mesh"
    return own[0], len(own)


def over_hosts(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array of this host's devices -> that of all hosts' of which it is the share.

    Args:
      array: [n].
      sharding: of the result, [H * n]; nothing is copied.
    """
    if sharding.is_fully_addressable:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    size = len(shards[0]) * sharding.mesh.size
    return jax.make_array_from_single_device_arrays((size,), sharding, shards)


def of_this_host(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The reverse of `over_hosts`: [H * n] -> [n], with the sharding of this host's devices."""
    if array.is_fully_addressable:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    size = len(shards[0]) * len(shards)
    return jax.make_array_from_single_device_arrays((size,), sharding, shards)


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
