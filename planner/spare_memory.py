"""What device memory that a strategy leaves over is used for.

Either results of layers are kept instead of being computed again, or training state stays on the
devices, which spares the host update its time and the host its memory. Both take the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.job import Alternative, Job
from slidedp_jax.planner.kept_attention import attention_pays_first
from slidedp_jax.planner.memory import MemoryUse
from slidedp_jax.planner.strategy import Strategy

RESIDENT_STEPS = 8
"""Numbers of resident chunks that are tried first, evenly from one to all; then those between the
neighbours of the best."""


def keeping_most(job: Job, strategy: Strategy, memory: MemoryUse) -> tuple[Strategy, MemoryUse]:
    """The strategy that recomputes the fewest chunks, and its memory, within the budgets.

    Where rows are long, it first keeps attention's results of as many as possible.

    Args:
      job: with the budgets.
      strategy: one that fits.
      memory: what it takes.
    """
    num_chunks = -(-len(job.workload.layers) // strategy.layers_per_chunk)

    def most(found: Strategy, memory: MemoryUse, option: Callable[[int], Strategy]) -> Any:
        least, most = 0, num_chunks
        while least < most:
            middle = (least + most + 1) // 2
            tried = option(middle)
            use = job.memory(tried)
            if not job.limits(use):
                least, found, memory = middle, tried, use
            else:
                most = middle - 1
        return found, memory

    attention = 0
    if attention_pays_first(job, strategy):
        strategy, memory = most(strategy, memory, lambda n: replace(strategy, attention_chunks=n))
        attention = strategy.attention_chunks
    if strategy.layer_block_tokens:  # what is computed in blocks is not kept
        return strategy, memory
    base = strategy
    strategy, memory = most(
        base,
        memory,
        lambda n: replace(base, kept_chunks=n, attention_chunks=min(attention, num_chunks - n)),
    )
    return strategy, memory


def relieving_host(job: Job, strategy: Strategy) -> tuple[Strategy, bool]:
    """The strategy with as few resident chunks as make it fit the host, and whether it then fits.

    Where none do, with as many as the device has room for.

    Args:
      job: with the budgets.
      strategy: one that exceeds the host's budget alone.
    """

    def first(fits: Callable[[MemoryUse], bool]) -> int:
        """The smallest number of resident chunks for which it holds; one more than all if none."""
        least, most = 0, _most_resident(job, strategy) + 1
        while least < most:
            middle = (least + most) // 2
            if fits(job.memory(replace(strategy, resident_chunks=middle))):
                most = middle
            else:
                least = middle + 1
        return least

    enough = first(lambda use: use.host_bytes <= job.host_budget_bytes)
    too_many = first(lambda use: use.device_bytes > job.device_budget_bytes)
    resident = min(enough, too_many - 1)
    return replace(strategy, resident_chunks=resident), enough < too_many


def with_state_on_devices(job: Job, found: Alternative, *, keep_activations: bool) -> Alternative:
    """The fastest of the same strategy with more or fewer of the lowest chunks resident.

    Args:
      job: with the budgets.
      found: a strategy that fits, whose gradients the devices sum.
      keep_activations: let results of layers have what state leaves.
    """
    num_chunks = _most_resident(job, found.strategy)
    best, tried = found, {found.strategy.resident_chunks}

    def search(counts: Iterable[int]) -> None:
        nonlocal best
        for resident in counts:
            option = _with_resident(job, found.strategy, resident, keep_activations)
            tried.add(resident)
            if option is not None:
                other = job.alternative(option)
                best = min(best, other, key=lambda one: one.time.step_s)

    search(range(1, num_chunks + 1, max(1, num_chunks // RESIDENT_STEPS)))
    near = best.strategy.resident_chunks
    below = max((count for count in tried if count < near), default=0)
    above = min((count for count in tried if count > near), default=num_chunks + 1)
    search(count for count in range(below + 1, above) if count != near)
    return best


def _with_resident(
    job: Job, strategy: Strategy, resident: int, keep_activations: bool
) -> Strategy | None:
    """With that many resident chunks and what then fits of kept ones; None if it does not fit."""
    option = replace(strategy, resident_chunks=resident, kept_chunks=0, attention_chunks=0)
    memory = job.memory(option)
    if job.limits(memory):
        return None
    return keeping_most(job, option, memory)[0] if keep_activations else option


def _most_resident(job: Job, strategy: Strategy) -> int:
    """All chunks, with embedding and head, or what slices of the vocabulary leave."""
    num_chunks = -(-len(job.workload.layers) // strategy.layers_per_chunk) + 2
    return sliced_head.most_resident(job.workload, strategy, num_chunks)
