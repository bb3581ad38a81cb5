"""The host's memory and the host update: alone, and beside the copies of training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slidedp_jax.measure.links import Link, locked_slabs, platform_of
from slidedp_jax.measure.stopwatch import Measurement, Stopwatch
from slidedp_jax.planner.hardware import MIB
from slidedp_jax.state.host_store import HOST_AXIS
from slidedp_jax.state.layout import FlatLayout, Slot
from slidedp_jax.state.weight_rounding import DEFAULT_ROUNDING, WeightRounding
from slidedp_jax.update.elementwise import ElementwiseOptimizer
from slidedp_jax.update.kernel_form import kernel_form
from slidedp_jax.update.treatments import Treatments
from slidedp_jax.update.update_kernel import UpdateKernels

BLOCK_SIZE = 4096
UPDATE_BYTES = 26
"""AdamW with bf16 gradients, per parameter: high 2, low 2, mu 4, nu 4, read and written, and the
gradient read."""

TRIAD_BYTES = 12
PER_DEVICE = 1 << 23
MOST = 1 << 28
"""Parameters that are updated at once, on each host device and in all."""

COPY_BYTES = {"gpu": 64 * MIB, "cpu": 16 * MIB}


def measure_host(
    watch: Stopwatch, devices: Sequence[jax.Device], host_devices: Sequence[jax.Device]
) -> None:
    """Triad and update on all host devices, then the update beside copies.

    Where the devices compute in host memory (CPUs) a step makes no copies of its own beside, so
    only the rates alone are taken.
    """
    mesh = Mesh(np.array(host_devices), (HOST_AXIS,), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(HOST_AXIS), memory_kind="pinned_host")
    per_device = min(PER_DEVICE, MOST // len(host_devices)) // BLOCK_SIZE * BLOCK_SIZE
    size = per_device * len(host_devices)
    triad, update = _triad(sharding, size), _update(sharding, size)
    works = {"triad": (triad, TRIAD_BYTES * size, "bytes"), "update": (update, size, "parameters")}
    for name, (call, work, unit) in works.items():
        watch.time(name, call, work=float(work), unit=unit, about={"beside": "nothing"})
    if platform_of(devices) == "cpu":
        return
    with locked_slabs(devices, COPY_BYTES["gpu"]) as slabs:
        link = Link(devices, slabs, COPY_BYTES["gpu"])
        kinds = {"uploads": (link.up,), "copies both ways": (link.up, link.down)}
        for beside, copies in kinds.items():
            with running(copies) as counts:
                before, start = sum(counts), watch.elapsed_s
                marks = {"beside": beside}
                watch.time("update", update, work=float(size), unit="parameters", about=marks)
                took, copied = watch.elapsed_s - start, sum(counts) - before
            moved = float(copied * COPY_BYTES["gpu"] * len(devices))
            watch.keep(
                Measurement(
                    name="copies beside update",
                    seconds=(took,),
                    work=moved,
                    about={"which": beside},
                )
            )


@contextmanager
def running(copies: Sequence[Callable[[], None]]) -> Iterator[list[int]]:
    """Copies that follow one another in a thread each; yields how many each has made so far."""
    counts, stop = [0] * len(copies), threading.Event()

    def work(index: int) -> None:
        while not stop.is_set():
            copies[index]()
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(copies))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _triad(sharding: NamedSharding, size: int) -> Callable[[], None]:
    """In place a = a * s + b, of about as many bytes as the update moves."""
    size *= 2
    ones = jax.jit(lambda: jnp.ones(size, jnp.float32), out_shardings=sharding)
    arrays = {"a": ones(), "b": ones()}

    def piece(a: Any, b: Any) -> Any:
        a, b = (jax.device_put(x, jax.memory.Space.Device) for x in (a, b))
        return a * jnp.float32(1.0001) + b

    mapped = jax.shard_map(
        piece,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )
    triad = jax.jit(mapped, donate_argnums=(0,), out_shardings=sharding)

    def step() -> None:
        arrays["a"] = jax.block_until_ready(triad(arrays["a"], arrays["b"]))

    return step


def _update(sharding: NamedSharding, size: int) -> Callable[[], None]:
    """One AdamW update of a chunk of so many parameters, as training does it."""

    def decayed(params: Mapping[str, Any]) -> dict[str, bool]:
        return {name: leaf.ndim > 1 for name, leaf in params.items()}

    transformation = optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    shapes = {"matrix": (1024, 1024), "vector": (1024,)}
    optimizer = Treatments(transformation, shapes).optimizers[0]
    assert isinstance(optimizer, ElementwiseOptimizer)
    kernels = UpdateKernels(
        optimizer,
        sharding,
        block_size=BLOCK_SIZE,
        form=kernel_form(jax.__version__),
        rounding=WeightRounding.of(DEFAULT_ROUNDING, seed=0),
    )
    num_blocks = size // BLOCK_SIZE
    vectors = max(1, num_blocks // 64)  # some of a second group, as in models
    first = (num_blocks - vectors) * BLOCK_SIZE
    layout = FlatLayout(
        name="measured",
        slots=(
            Slot(name="matrix", shape=(first,), group=0, offset=0),
            Slot(name="vector", shape=(size - first,), group=1, offset=first),
        ),
        block_size=BLOCK_SIZE,
        num_pieces=sharding.mesh.size,
        block_groups=(0,) * (num_blocks - vectors) + (1,) * vectors,
    )

    def full(value: float, dtype: Any) -> jax.Array:
        make = jax.jit(partial(jnp.full, size, value, dtype), out_shardings=sharding)
        array: jax.Array = jax.block_until_ready(make())
        return array

    values = (0.02, 77, *(1e-4 for _ in optimizer.state_dtypes))
    dtypes = (jnp.bfloat16, jnp.int16, *optimizer.state_dtypes)
    state = {"arrays": tuple(map(full, values, dtypes))}
    gradient = full(1e-3, jnp.bfloat16)
    started = [np.asarray(leaf + 7, leaf.dtype) for leaf in optimizer.initial_shared()]
    shared = kernels.place_shared(started)

    def step() -> None:
        state["arrays"] = jax.block_until_ready(
            kernels.start_update(layout, state["arrays"], [gradient], shared, 2.0, 1.0)
        )

    return step
