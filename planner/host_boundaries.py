"""Boundary activations that wait in host memory (`slidedp_jax/transfer/boundary_store.py`).

They cost host memory and the link, and no compute: an input is copied off the devices beside the
chunk's own forward and back beside the backward of the chunk above. So they go to the host where
the devices lack the room, or have better use for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from slidedp_jax.planner.bisection import smallest
from slidedp_jax.planner.chunking import backward_chunks
from slidedp_jax.planner.device_phases import FRAGMENTATION
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.strategy import BOUNDARIES_IN_FLIGHT, Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

SHARES_TRIED = (0.25, 0.5, 1.0)
"""Of the layer chunks, how many send their inputs to the host where the devices could hold them."""

LARGE_BOUNDARIES = 0.1
"""Share of a device's memory from which on that is tried."""


def boundary_bytes(workload: Workload, batch: BatchShape, strategy: Strategy) -> int:
    """One device's input of a chunk for one microbatch."""
    tokens = strategy.rows_per_microbatch * batch.seq_length
    return tokens * workload.hidden_size * strategy.compute_bytes


def with_host_boundaries(
    workload: Workload, batch: BatchShape, strategy: Strategy, count: int
) -> Strategy:
    """The strategy with the inputs of so many of the lowest layer chunks in host memory."""
    size = boundary_bytes(workload, batch, strategy) if count else 0
    return replace(strategy, host_boundaries=count, host_boundary_bytes=size)


def with_all_on_host(job: Job, strategy: Strategy) -> Strategy:
    """The strategy with all inputs in host memory, where that is another than the devices'."""
    if job.hardware.unified_memory:
        return strategy
    count = backward_chunks(job.workload, strategy.layers_per_chunk)
    return with_host_boundaries(job.workload, job.batch, strategy, count)


def fewest_on_host(job: Job, strategy: Strategy) -> Strategy | None:
    """The strategy with as few inputs on the host as make it fit the devices.

    None if even all do not.

    Args:
      job: with the budgets.
      strategy: one that exceeds the devices' budget, and perhaps the host's.
    """
    if job.hardware.unified_memory:
        return None
    most = backward_chunks(job.workload, strategy.layers_per_chunk)

    def option(count: int) -> Strategy:
        return with_host_boundaries(job.workload, job.batch, strategy, count)

    # More than all inputs cannot leave: cheaper to see than what a strategy takes.
    input_bytes = (1 + FRAGMENTATION) * strategy.num_microbatches * option(1).host_boundary_bytes
    excess = job.device_bytes(strategy) - job.device_budget_bytes
    if excess > (most + 2) * input_bytes or not job.fits_devices(option(most)):
        return None
    guess = math.ceil(excess / input_bytes) + BOUNDARIES_IN_FLIGHT
    return option(smallest(lambda count: job.fits_devices(option(count)), most, guess))


def with_more_on_host(job: Job, strategy: Strategy) -> Iterator[Strategy]:
    """The same strategy with more of the inputs on the host, where those take much of a device.

    Only what fits.
    """
    memory = job.memory(strategy)
    taken = memory.device.get("boundary_activations", 0.0) / memory.device_bytes
    if job.hardware.unified_memory or taken < LARGE_BOUNDARIES:
        return
    num_chunks = backward_chunks(job.workload, strategy.layers_per_chunk)
    for share in SHARES_TRIED:
        count = round(share * num_chunks)
        option = with_host_boundaries(job.workload, job.batch, strategy, count)
        if count > strategy.host_boundaries and job.fits(option):
            yield replace(option, kept_chunks=0, attention_chunks=0)  # they may grow
