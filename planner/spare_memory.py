"""What device memory that a strategy leaves over is used for.

Either results of layers are kept instead of being computed again, or training state stays on the
devices, which spares the host update its time and the host its memory. Both take the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.bisection import smallest
from slidedp_jax.planner.chunking import backward_chunks
from slidedp_jax.planner.job import Job, Timed
from slidedp_jax.planner.kept_attention import attention_pays_first
from slidedp_jax.planner.strategy import Strategy

RESIDENT_STEPS = 8
"""Numbers of resident chunks that are tried first, evenly from one to all; then those between the
neighbours of the best."""

SURELY_SLOW = 1.05
"""Times what is fast: where even the best bound of these is above that, none between is tried."""


def keeping_most(job: Job, strategy: Strategy) -> Strategy:
    """The strategy that recomputes the fewest chunks within the budgets.

    Where rows are long, it first keeps attention's results of as many as possible.

    Args:
      job: with the budgets.
      strategy: one that fits.
    """
    num_chunks = backward_chunks(job.workload, strategy.layers_per_chunk)
    attention = 0
    if attention_pays_first(job, strategy):
        attention = _most(
            job, strategy, num_chunks, lambda count: replace(strategy, attention_chunks=count)
        )
    if strategy.layer_block_tokens:  # what is computed in blocks is not kept
        return replace(strategy, attention_chunks=attention)

    def keeping(count: int) -> Strategy:
        below = min(attention, num_chunks - count)
        return replace(strategy, kept_chunks=count, attention_chunks=below)

    return keeping(_most(job, keeping(0), num_chunks, keeping))


def _most(job: Job, none: Strategy, most: int, option: Callable[[int], Strategy]) -> int:
    """The largest number from 0, for which it fits, to `most` for which `option` fits."""
    if not most or job.fits(option(most)):
        return most
    base = job.device_bytes(none)
    each = (job.device_bytes(option(most)) - base) / most
    room = int((job.device_budget_bytes - base) / each) if each > 0 else 0
    return smallest(lambda count: not job.fits(option(count + 1)), most - 1, room)


def relieving_host(job: Job, strategy: Strategy) -> tuple[Strategy, bool]:
    """The strategy with as few resident chunks as make it fit the host, and whether it then fits.

    Where none do, with as many as the device has room for.

    Args:
      job: with the budgets.
      strategy: one that exceeds the host's budget alone.
    """
    most = _most_resident(job, strategy)

    def option(count: int) -> Strategy:
        return replace(strategy, resident_chunks=count)

    def between(bytes_of: Callable[[Strategy], float], budget: float) -> int | None:
        """Where a budget is met if each chunk weighs the same."""
        none, each = bytes_of(option(0)), bytes_of(option(most)) - bytes_of(option(0))
        return int(most * (budget - none) / each) if each else None

    enough = most + 1
    if job.fits_host(option(most)):
        guess = between(job.host_bytes, job.host_budget_bytes)
        enough = smallest(
            lambda count: job.fits_host(option(count)), most, None if guess is None else guess + 1
        )
        if job.fits_devices(option(enough)):
            return option(enough), True
    room = smallest(
        lambda count: not job.fits_devices(option(count + 1)),
        most,
        between(job.device_bytes, job.device_budget_bytes),
    )
    return option(min(enough, room)), False


def with_state_on_devices(
    job: Job, strategy: Strategy, *, keep_activations: bool, fast_s: float
) -> Timed | None:
    """The fastest of the same strategy with some of the lowest chunks resident, or with none.

    None if none of them is fast.

    Args:
      job: with the budgets.
      strategy: one that fits, whose gradients the devices sum.
      keep_activations: let results of layers have what state leaves.
      fast_s: seconds of a step; of slower ones it does not matter which is the fastest.
    """
    num_chunks = _most_resident(job, strategy)
    best: Timed | None = None
    bounds: dict[int, float] = {}

    def search(counts: Iterable[int]) -> None:
        nonlocal best
        options = {}
        for count in counts:
            option = _with_resident(job, strategy, count, keep_activations)
            bounds[count] = math.inf if option is None else job.lower_bound_s(option)
            if option is not None:
                options[count] = option
        for count in sorted(options, key=lambda count: bounds[count]):
            if bounds[count] >= (fast_s if best is None else min(best.step_s, fast_s)):
                break
            other = job.timed(options[count])
            if best is None or other.step_s < best.step_s:
                best = other

    search(
        [strategy.resident_chunks, *range(1, num_chunks + 1, max(1, num_chunks // RESIDENT_STEPS))]
    )
    near = best.strategy.resident_chunks if best else min(bounds, key=lambda count: bounds[count])
    if math.inf > bounds[near] > SURELY_SLOW * fast_s:  # its neighbours are not that much faster
        return best
    below = max((count for count in bounds if count < near), default=0)
    above = min((count for count in bounds if count > near), default=num_chunks + 1)
    search(count for count in range(below + 1, above) if count != near)
    return best


def holds_all_state(job: Job, strategy: Strategy) -> bool:
    """Whether all state fits on the devices, with nothing kept beside it."""
    most = _most_resident(job, strategy)
    return job.fits(replace(strategy, resident_chunks=most, kept_chunks=0, attention_chunks=0))


def _with_resident(
    job: Job, strategy: Strategy, resident: int, keep_activations: bool
) -> Strategy | None:
    """With that many resident chunks and what then fits of kept ones; None if it does not fit."""
    option = replace(strategy, resident_chunks=resident, kept_chunks=0, attention_chunks=0)
    if not job.fits(option):
        return None
    return keeping_most(job, option) if keep_activations else option


def _most_resident(job: Job, strategy: Strategy) -> int:
    """All chunks, with embedding and head, or what slices of the vocabulary leave."""
    num_chunks = -(-len(job.workload.layers) // strategy.layers_per_chunk) + 2
    return sliced_head.most_resident(job.workload, strategy, num_chunks)
