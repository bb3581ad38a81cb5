"""Memory of one host, all its devices together, under a strategy, by named category."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.chunking import Chunks
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.pinned_pool import pool_regions, resident_copy_bytes
from slidedp_jax.planner.strategy import GradientRoute, Strategy
from slidedp_jax.planner.training_state import MASTER_BYTES, state_bytes
from slidedp_jax.planner.workload import Workload

SEVERAL_GPUS_BYTES = 0.87 * 2**15
"""Times the root of the bytes of state on the host: what two GPUs took of host memory beside all
that is listed here, by an upper bound of four jobs with 10 to 85 GiB of state; its cause is not
known."""


def largest_neighbours(sizes: Sequence[float]) -> float:
    """The largest sum of two consecutive sizes."""
    if len(sizes) == 1:
        return sizes[0]
    return max(one + other for one, other in itertools.pairwise(sizes))


def host_use(
    workload: Workload,
    chunks: Chunks,
    strategy: Strategy,
    hardware: HardwareProfile,
    optimizer_state_bytes: float,
) -> tuple[dict[str, float], float]:
    """Host categories and the size of the page-locked pool.

    What is loaded, saved or restored passes through host memory. Room for two neighbouring stages
    is kept for that, which a save beside steps has for its buffer whatever else is free; what stays
    on the devices is gathered when it is read.
    """
    gradients, boundaries, copies, pool = _pool(
        chunks,
        strategy.gradient_bytes,
        strategy.gradient_route,
        strategy.resident_chunks,
        strategy.vocab_slices,
        workload.tied,
        float(strategy.host_boundary_bytes),
        strategy.host_boundaries * strategy.num_microbatches * hardware.num_devices,
        hardware.num_devices,
        hardware.num_hosts,
    )
    if hardware.unified_memory:  # the CPU backend has no page-locked pool, and copies nothing
        copies, pool = 0.0, gradients + boundaries
    passing, own = (
        chunks.all[: strategy.resident_chunks],
        chunks.all[strategy.resident_chunks :],
    )
    masters = MASTER_BYTES * sum(chunk.padded_parameters for chunk in own) / hardware.num_hosts
    state = optimizer_state_bytes * sum(chunk.trained_padded for chunk in own) / hardware.num_hosts
    largest, saved = _largest_stages(workload, optimizer_state_bytes)
    read = 0.0
    if passing:  # a chunk is gathered from its stages and sent, while the next one begins
        gathered = [state_bytes([chunk], optimizer_state_bytes) for chunk in passing]
        several = strategy.layers_per_chunk > 1
        read = largest + (largest_neighbours(gathered) if several else max(gathered))
    return {
        "master_weights": float(masters),
        "optimizer_state": float(state),
        "state_in_passing": float(max(saved, read)),
        "waiting_gradients": gradients,
        **({"host_boundaries": boundaries} if boundaries else {}),
        **({"resident_copies": copies} if copies else {}),
        "pinned_pool_overhead": pool - gradients - boundaries - copies,
        **_several_gpus(hardware, masters + state),
        "runtime_reserve": hardware.host_reserve_bytes
        * (1 if hardware.unified_memory else hardware.num_devices),
    }, pool


@lru_cache(maxsize=16)
def _largest_stages(workload: Workload, optimizer_state_bytes: float) -> tuple[float, float]:
    """Bytes of the state of the largest stage, and of the largest two neighbours."""
    stages = [
        MASTER_BYTES * stage.num_parameters + optimizer_state_bytes * stage.trained_parameters
        for stage in workload.stages
    ]
    return max(stages), largest_neighbours(stages)


@lru_cache(maxsize=4096)
def _pool(
    chunks: Chunks,
    gradient_bytes: int,
    gradient_route: GradientRoute,
    resident_chunks: int,
    vocab_slices: int,
    tied: bool,
    boundary_bytes: float,
    num_boundaries: int,
    num_devices: int,
    num_hosts: int,
) -> tuple[float, float, float, float]:
    """Bytes of all waiting gradients, of all boundaries, of a save's copies, and of their pool."""
    projection = sliced_head.projection_chunk(chunks, tied=tied)
    shards = num_devices if gradient_route == "reduce_scatter" else 1
    requests = [
        gradient_bytes * chunk.trained_padded / num_hosts / shards / slices
        for chunk in reversed(chunks.all[resident_chunks:])  # as backward sends them
        if chunk.trained_padded
        for slices in [vocab_slices if chunk is projection else 1]
        for _ in range(num_devices * slices)  # each device's share of the sum, or all of its own
    ]
    boundaries = [boundary_bytes] * num_boundaries
    copies = resident_copy_bytes(
        [chunk.padded_parameters / num_hosts for chunk in chunks.all[:resident_chunks]]
    )
    pool = float(sum(pool_regions([*boundaries, copies, *requests])))
    return float(sum(requests)), sum(boundaries), copies, pool


def _several_gpus(hardware: HardwareProfile, state_bytes: float) -> dict[str, float]:
    """Host memory that several GPUs take beyond what each does."""
    if hardware.unified_memory or hardware.num_devices == 1:
        return {}
    return {"several_gpus": SEVERAL_GPUS_BYTES * math.sqrt(state_bytes)}
