"""The update with weights rounded by dither beside the same to nearest, in turns in one process."""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
from typing import Any

import bench_record
from update_variant import UPDATE_BYTES, UpdateVariant

from slidedp_jax import jax_internals
from slidedp_jax.state.weight_rounding import Rounding
from slidedp_jax.update.kernel_form import RESIDENT_FORM, kernel_form

ROUNDINGS: tuple[Rounding, Rounding] = ("nearest", "dither")
WARM_UP = 2
DEVICE_ELEMENTS = 1 << 28
"""On a GPU: 3 GB of state."""


def jobs(counts: list[int]) -> list[dict[str, Any]]:
    """What each process measures: the host's update per number of devices, then the GPU's."""
    version = importlib.metadata.version("jax")
    fusion = jax_internals.gains_from_multi_output_fusion(jax_internals.jax_version())
    host = [
        {
            "what": "roundings",
            "where": "host",
            "host_devices": count,
            "fusion": fusion,
            "form": kernel_form(version),
        }
        for count in counts
    ]
    if not bench_record.gpus():
        return host
    return [*host, {"what": "roundings", "where": "device", "form": RESIDENT_FORM}]


def label(job: dict[str, Any]) -> str:
    """One line of progress."""
    where = f"{job['host_devices']} host devices" if job["where"] == "host" else "the GPU"
    return f"dither beside nearest on {where}, form {job['form']}"


def measure(job: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and processor seconds of each update, first one rounding, then the other, and so on.

    Processor seconds are those of all threads: what a machine shared with others still tells.
    """
    import slidedp_jax

    on_host = job["where"] == "host"
    slidedp_jax.configure(
        platform="cpu" if on_host else "auto",
        num_devices=1,
        num_host_devices=job["host_devices"] if on_host else None,
    )
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from slidedp_jax.process import current_setup

    devices = current_setup().devices()[1 if on_host else 0]
    mesh = Mesh(np.array(devices), ("piece",), axis_types=(AxisType.Auto,))
    kind = "pinned_host" if on_host else None
    sharding = NamedSharding(mesh, PartitionSpec("piece"), memory_kind=kind)
    size, steps = args.elements_per_device if on_host else DEVICE_ELEMENTS, {}
    in_place = {}
    for rounding in ROUNDINGS:
        variant = UpdateVariant(job["form"], args.block_sizes[0], sharding, rounding)
        steps[rounding], elements, in_place[rounding] = variant.prepare(size)
    seconds: dict[str, list[float]] = {name: [] for name in ROUNDINGS}
    processor: dict[str, list[float]] = {name: [] for name in ROUNDINGS}
    for turn in range(WARM_UP + args.repeats):
        for name in ROUNDINGS if turn % 2 else ROUNDINGS[::-1]:
            start, used = time.perf_counter(), time.process_time()
            steps[name]()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - used)
    return {
        **job,
        "device": jax.devices()[0].device_kind,
        "block_size": args.block_sizes[0],
        "elements": elements,
        "bytes_per_element": UPDATE_BYTES,
        "in_place": {name: check() for name, check in in_place.items()},
        "seconds": seconds,
        "processor_seconds": processor,
    }


def ratio(samples: dict[str, list[float]]) -> float:
    """Rate of dither over that of nearest, from the medians."""
    return statistics.median(samples["nearest"]) / statistics.median(samples["dither"])


def table(record: dict[str, Any]) -> str:
    """Medians, and how they compare."""
    lines = []
    for result in record["results"]:
        rates = {
            name: result["elements"] / statistics.median(result["seconds"][name]) / 1e9
            for name in ROUNDINGS
        }
        lines.append(
            f"{label(result)}: nearest {rates['nearest']:.3f}, dither {rates['dither']:.3f} "
            f"Gparam/s, ratio {ratio(result['seconds']):.3f}; by processor seconds "
            f"{ratio(result['processor_seconds']):.3f}; in place {result['in_place']}"
        )
    lines.extend(f"not run: {label(job)}: {job['reason']}" for job in record["not_run"])
    return "\n".join(lines)
