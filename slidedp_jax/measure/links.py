"""Copies between host memory and the devices, by size and company, and collectives among devices.

They go the ways that training takes (`transfer.routes`): up from page-locked memory, down into the
pool of page-locked memory, gathered and summed in `shard_map`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slidedp_jax.measure.stopwatch import Measurement, Stopwatch
from slidedp_jax.planner.hardware import MIB
from slidedp_jax.state.pinned_memory import PageLock
from slidedp_jax.transfer.copies import download, upload
from slidedp_jax.transfer.device_groups import DATA_AXIS
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap
from slidedp_jax.transfer.routes import GradientPath, ShardAllGather

SIZES = {"gpu": (4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB), "cpu": (1 * MIB, 4 * MIB, 32 * MIB)}
"""Bytes of one copy, by platform."""

GATHERED = {"gpu": (64 * MIB, 512 * MIB), "cpu": (4 * MIB, 32 * MIB)}
"""Bytes of what an all-gather makes."""

PIECES = 16


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """Compute devices on the axis `data`."""
    return Mesh(np.array(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def platform_of(devices: Sequence[jax.Device]) -> str:
    """`cpu` or `gpu`."""
    return "cpu" if devices[0].platform == "cpu" else "gpu"


@contextmanager
def locked_slabs(devices: Sequence[jax.Device], num_bytes: int) -> Iterator[list[np.ndarray]]:
    """Page-locked bfloat16 arrays of so many bytes, one per device, and unlocked afterwards.

    They stay allocated (mappings with live views cannot be closed), which the process's end undoes.
    """
    lock = PageLock(devices[0])
    slabs = []
    for _ in devices:
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        slab = np.frombuffer(memory, np.uint16).view(jnp.bfloat16)
        slab[:] = 1
        slabs.append(slab)
    try:
        lock.lock((slab.ctypes.data, num_bytes) for slab in slabs)
        yield slabs
    finally:
        lock.release()


class Link:
    """Copies of one size between slabs and some devices, each to its own."""

    def __init__(self, devices: Sequence[jax.Device], slabs: Sequence[np.ndarray], num_bytes: int):
        self._sharding = NamedSharding(mesh_of(devices), PartitionSpec(DATA_AXIS))
        elements = num_bytes // 2
        self._pieces = [slab[:elements] for slab in slabs]
        self._shape = (elements * len(devices),)
        self._resident = jax.block_until_ready(self.start_up())

    def start_up(self) -> jax.Array:
        """Begin the copies to the devices."""
        return upload(self._pieces, self._sharding, self._shape)

    def start_down(self) -> jax.Array:
        """Begin the copies back."""
        return download(self._resident)

    def up(self) -> None:
        """Copy, and wait."""
        jax.block_until_ready(self.start_up())

    def down(self) -> None:
        """Copy back, and wait."""
        jax.block_until_ready(self.start_down())

    def both(self) -> None:
        """Two copies each way at once, and wait."""
        copies = [start() for _ in range(2) for start in (self.start_up, self.start_down)]
        jax.block_until_ready(copies)


def measure_links(watch: Stopwatch, devices: Sequence[jax.Device]) -> None:
    """Each device's link by size, both ways, and all at once."""
    sizes = SIZES[platform_of(devices)]
    groups = [(list(devices), "all" if len(devices) > 1 else "each")]
    groups += [([device], "each") for device in devices[: len(devices) if len(devices) > 1 else 0]]
    with locked_slabs(devices, sizes[-1]) as slabs:
        for group, company in groups:
            own = slabs[: len(group)]
            marks: dict[str, Any] = {"at_once": company, "devices": [d.id for d in group]}
            for size in sizes if len(group) == len(devices) else sizes[-1:]:
                link, work = Link(group, own, size), float(size * len(group))
                marks["size"] = size
                watch.time("h2d", link.up, work=work, about=dict(marks))
                watch.time("d2h", link.down, work=work, about=dict(marks))
            watch.time("both ways", link.both, work=4.0 * work, about=dict(marks))
        _measure_pieces(watch, devices, slabs, sizes[0])


def _measure_pieces(
    watch: Stopwatch, devices: Sequence[jax.Device], slabs: Sequence[np.ndarray], size: int
) -> None:
    """One array of sixteen pieces against one of the same bytes in one."""
    elements = size // 2
    pieces = [slab[:elements] for slab in slabs for _ in range(PIECES)]
    route = ShardAllGather(mesh_of(devices))

    def fetch() -> None:
        jax.block_until_ready(route.fetch(pieces))

    work = float(size * len(pieces))
    watch.time("h2d in pieces", fetch, work=work, about={"size": size, "pieces": PIECES})


def measure_collectives(watch: Stopwatch, devices: Sequence[jax.Device]) -> None:
    """Gather, sum and scatter over the devices; work is what comes into each of them."""
    if len(devices) < 2:
        return
    mesh = mesh_of(devices)
    on_devices = DeviceMap(mesh, jnp.bfloat16)
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    remote = (len(devices) - 1) / len(devices)
    gradients = GradientPath("reduce_scatter", mesh, sharding, jnp.dtype(jnp.bfloat16))
    gather = on_devices(lambda own: ShardAllGather(mesh).assemble([own]), (ROWS,), SAME)
    scatter = on_devices(lambda own: gradients.to_wire(own[0])[0], (ROWS,), ROWS)
    for size in GATHERED[platform_of(devices)]:
        elements = size // 2 // len(devices) * len(devices)
        make = jax.jit(
            partial(jnp.ones, dtype=jnp.bfloat16), static_argnums=0, out_shardings=sharding
        )
        own, whole = make(elements), make((len(devices), elements))
        for name, program, given in (("gather", gather, own), ("scatter", scatter, whole)):
            call = partial(_finished, program, given)
            watch.time(name, call, work=size * remote, about={"size": size})


def _finished(program: Callable[..., Any], *arguments: Any) -> None:
    jax.block_until_ready(program(*arguments))


def measure_peer_copies(watch: Stopwatch, devices: Sequence[jax.Device]) -> None:
    """A copy from the first device to the second."""
    if len(devices) < 2:
        return
    size = SIZES[platform_of(devices)][-1]
    array = jax.block_until_ready(jax.device_put(jnp.ones(size // 2, jnp.bfloat16), devices[0]))
    watch.time(
        "device to device",
        lambda: jax.block_until_ready(jax.device_put(array, devices[1])),
        work=float(size),
        about={"size": size},
    )


def link_points(watch: Stopwatch, name: str) -> list[Measurement]:
    """Copies of all devices at once, by size."""
    whole = watch.all(name, at_once="all") or watch.all(name, at_once="each")
    return sorted(whole, key=lambda one: one.about["size"])
