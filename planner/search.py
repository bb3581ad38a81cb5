"""The fastest strategy that fits.

Every candidate's memory is computed; those that fit are sorted by a lower bound of their step time
and simulated in that order until the bound of the next is no better than the best time found. So
far the result is the best of all candidates, and a larger budget can only add candidates. What
device memory is left over is then put to use (`spare_memory`), for one strategy of each kind: that
is a good guess and no proof, and a larger budget may cost a few hundredths of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from slidedp_jax.planner.candidates import Choices, leaner, neighbours
from slidedp_jax.planner.chunking import backward_chunks
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.fitting import sort_by_fit
from slidedp_jax.planner.hardware import ComputeDtype, HardwareProfile, size_text
from slidedp_jax.planner.host_boundaries import (
    boundary_bytes,
    with_all_on_host,
    with_host_boundaries,
    with_more_on_host,
)
from slidedp_jax.planner.job import Alternative, Job, Timed
from slidedp_jax.planner.limits import Limit
from slidedp_jax.planner.memory import MemoryUse
from slidedp_jax.planner.refusal import refusal
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.request_check import check_request
from slidedp_jax.planner.spare_memory import (
    holds_all_state,
    keeping_most,
    with_state_on_devices,
)
from slidedp_jax.planner.strategy import Strategy, UpdatePolicy
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.wording import counted

_T = TypeVar("_T")

NUM_RUNNERS_UP = 3
NUM_REJECTED = 4

NEARLY = 1.01
"""Times that are as good as the best, where another reason decides."""

ALL_HOST_MEMORY = 0.1
"""Share of a step that all of the host's memory is worth. Memory that nothing else needs should
become speed, but is page-locked first, 0.6 s per GiB; a tenth of it for 1 % is a fair price."""

SMALL_LOSS_CHUNKS_TOKENS, LARGE_LOGITS = (1024, 256), 0.03
"""Loss chunks that are small, and from which share of a device's memory on logits are large."""

TOLERATED = 1.05
"""What a strategy that has run before may need of what is free now: that differs from start to
start. Beyond, something else has taken it."""

NUM_ROUNDS = 2
"""How often neighbours of the best are tried; seldom more than once are any better."""

NUM_REFINED = 2
"""Best strategies for which state on the devices is tried in any case."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A strategy that might be faster but does not fit.

    Attributes:
      strategy: the strategy.
      lower_bound_s: seconds that its step takes at least.
      limits: what it exceeds; the first binds.
    """

    strategy: Strategy
    lower_bound_s: float
    limits: tuple[Limit, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What to run and what to expect.

    Attributes:
      job: what it was found for.
      chosen: the strategy to run.
      runners_up: the next best that fit, best first.
      rejected: potentially faster ones that do not fit, the most promising first.
    """

    job: Job
    chosen: Alternative
    runners_up: tuple[Alternative, ...]
    rejected: tuple[Rejected, ...]

    @property
    def strategy(self) -> Strategy:
        """The strategy to run."""
        return self.chosen.strategy

    def __repr__(self) -> str:
        """One line; `planner.report.plan_as_text` has all of it."""
        job, memory, time = self.job, self.chosen.memory, self.chosen.time
        hardware, batch = job.hardware, job.batch
        devices = (
            "" if hardware.unified_memory else f"{size_text(memory.device_bytes)} per device, "
        )
        return (
            f"<Plan: {job.workload.name}, {counted(batch.num_rows, 'row')} x {batch.seq_length:,} "
            f"tokens per step on {hardware.devices_text}: {time.step_s:.3g} s, "
            f"{time.tokens_per_s:,.0f} tokens/s, {devices}{size_text(memory.host_bytes)} of host "
            f"memory>"
        )


def plan(
    workload: Workload,
    batch: BatchShape,
    hardware: HardwareProfile,
    *,
    update_policy: UpdatePolicy = "deferred",
    compute_dtype: ComputeDtype = "bfloat16",
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
    device_budget_bytes: float | None = None,
    host_budget_bytes: float | None = None,
    choices: Choices | None = None,
    keep_activations: bool | None = None,
    resident_state: bool | None = None,
    strategy: Strategy | None = None,
) -> Plan:
    """Pick the strategy with the shortest predicted step within the budgets.

    Args:
      workload: the model.
      batch: rows of a step over all devices.
      hardware: the hosts and their devices.
      update_policy: `deferred` with clipping by global norm, `eager` without.
      compute_dtype: dtype of forward and backward.
      optimizer_state_bytes: optimizer state per trained parameter in bytes, AdamW's 8 by default.
      device_budget_bytes: memory of each device that may be used; all of it by default.
      host_budget_bytes: host memory that may be used; all of it by default.
      choices: what the user has decided already.
      keep_activations: instead of recomputing, keep weights and intermediate results of as many
        layer chunks as fit; None: on devices with memory of their own.
      resident_state: let the training state of the lowest chunks stay on the devices where that
        makes a step faster, or is needed for the rest to fit the host, if the devices sum the
        gradients. None: on devices with memory of their own.
      strategy: what has been decided, for example by an earlier run: it is costed, nothing else is
        tried, and `choices` and the policies above are not looked at.

    Raises:
      PlanError: the request is contradictory, or nothing fits. All limits are listed.
    """
    choices = choices or Choices()
    job = Job(
        workload=workload,
        batch=batch,
        hardware=hardware,
        optimizer_state_bytes=optimizer_state_bytes,
        device_budget_bytes=_or(device_budget_bytes, hardware.device_memory_bytes),
        host_budget_bytes=_or(host_budget_bytes, hardware.host_memory_bytes),
    )
    if strategy is not None:
        return _decided(job, strategy)
    check_request(job, choices, update_policy, compute_dtype, resident_state or False)
    request = Request(
        job=job,
        choices=choices,
        update_policy=update_policy,
        compute_dtype=compute_dtype,
        keep_activations=_or(keep_activations, not hardware.unified_memory),
        resident_state=_or(resident_state, not hardware.unified_memory),
    )
    return fastest(request)


def fastest(request: Request) -> Plan:
    """The plan with the shortest predicted step.

    Raises:
      PlanError: nothing fits.
    """
    job = request.job
    if (leanest := request.leanest_misfits()) is not None:
        raise refusal(request, leanest)
    fitting, misfits = sort_by_fit(
        job, request.families(), request.keep_activations, request.resident_state
    )
    ranked = _with_inputs_on_host(request, _simulate_best(job, fitting))
    if request.resident_state:
        ranked = _with_spare_memory(request, ranked, _bases(request, ranked, fitting))
    shown = [job.alternative(one.strategy) for one in ranked[: 1 + NUM_RUNNERS_UP]]
    return _as_plan(job, shown, [family[0] for family in misfits if family])


def _with_inputs_on_host(request: Request, ranked: list[Timed]) -> list[Timed]:
    """With what is clearly faster than the best, since more results are kept in others' place.

    Only of strategies whose gradients the host sums: what state on the devices makes of the others
    is tried with inputs on the host as well.
    """
    job, best = request.job, ranked[0]
    if not request.keep_activations or best.strategy.gradient_route == "reduce_scatter":
        return ranked
    found = []
    chunks = backward_chunks(job.workload, best.strategy.layers_per_chunk)
    counts = {0} if job.hardware.unified_memory else {0, 1, 2, chunks // 2, chunks}
    lean = leaner(request.choices, job.workload, best.strategy)
    same_loss = replace(lean, loss_chunk_tokens=best.strategy.loss_chunk_tokens)
    for base in dict.fromkeys((best.strategy, same_loss, lean)):
        none_kept = replace(base, kept_chunks=0, attention_chunks=0)
        for count in sorted(count for count in counts if count <= chunks):
            option = with_host_boundaries(job.workload, job.batch, none_kept, count)
            if job.fits(option):
                found.append(job.timed(keeping_most(job, option)))
    faster = [one for one in found if NEARLY * one.step_s < best.step_s]
    return sorted([*faster, *ranked], key=partial(_by_time, job))


def _decided(job: Job, strategy: Strategy) -> Plan:
    """A plan without a search."""
    devices = job.hardware.total_devices
    if strategy.num_hosts != job.hardware.num_hosts:
        raise PlanError(
            f"the strategy that the run is to go on with is for "
            f"{counted(strategy.num_hosts, 'host')}, and there are {job.hardware.num_hosts}; it "
            "has to be planned anew."
        )
    places = devices * strategy.num_microbatches * strategy.rows_per_microbatch
    if job.batch.num_rows > places:
        raise PlanError(
            f"the strategy that the run is to go on with takes {counted(places, 'row')} per step "
            f"({counted(strategy.num_microbatches, 'microbatch', 'microbatches')} of "
            f"{counted(strategy.rows_per_microbatch, 'row')} on {counted(devices, 'device')}); "
            f"steps of {counted(job.batch.num_rows, 'row')} have to be planned anew."
        )
    if strategy.host_boundaries:  # where inputs wait changes no bit
        need = boundary_bytes(job.workload, job.batch, strategy)
        if need > strategy.host_boundary_bytes:
            strategy = replace(strategy, host_boundary_bytes=need)
    alternative = job.alternative(strategy)
    limits = job.limits(alternative.memory)
    if any(limit.need_bytes > TOLERATED * limit.have_bytes for limit in limits):
        lines = [f"- {limit.describe()}." for limit in limits]
        raise PlanError(
            "\n".join(
                [
                    f"{job.workload.name}: the strategy that the run is to go on with does not fit "
                    f"{job.hardware.devices_text} as it is now:",
                    *lines,
                    "Free that memory, or state a budget (device_memory_budget, "
                    "host_memory_budget): then it is planned anew.",
                ]
            )
        )
    return _as_plan(job, [alternative], [])


def _as_plan(job: Job, ranked: list[Alternative], misfits: list[Strategy]) -> Plan:
    return Plan(
        job=job,
        chosen=ranked[0],
        runners_up=tuple(ranked[1:]),
        rejected=_most_promising(job, misfits, ranked[0].time.step_s),
    )


def _bases(
    request: Request, ranked: list[Timed], fitting: list[tuple[float, Strategy]]
) -> list[Strategy]:
    """Strategies of which it is tried how much state is best on the devices.

    How fast one is with all state on the host says little about that. So for each chunk size and
    weight route, whose copies it spares, the one with the lowest bound is tried, and the one of
    those that take all rows at a time; where logits take much of the memory, also with small loss
    chunks, which leave more for state.
    """
    job = request.job
    kinds: dict[object, Strategy] = {}
    for _, strategy in fitting:
        if strategy.gradient_route == "reduce_scatter":
            whole = strategy.num_microbatches == 1  # which needs no sums in fp32
            kinds.setdefault((strategy.layers_per_chunk, strategy.weight_route, whole), strategy)
    for one in ranked[:NUM_REFINED]:
        if one.strategy.gradient_route == "reduce_scatter":
            kinds[one.strategy] = one.strategy
    tried = list(dict.fromkeys(kinds.values()))
    bases = [one.strategy for one in ranked[:NUM_REFINED] if one.strategy in kinds]
    bases += sorted(tried, key=lambda strategy: strategy.layers_per_chunk)[:1]
    for strategy in dict.fromkeys(bases):
        tried += with_more_on_host(job, strategy)
    # What little a leaner one of a kind saves may be what the last state needs to fit.
    lean = [leaner(request.choices, job.workload, strategy) for strategy in kinds.values()]
    tried += [one for one in lean if holds_all_state(job, one)]
    tried += [
        replace(one, vocab_slices=1, slice_head_weights=False)
        for one in lean
        if one.vocab_slices > 1
    ]
    if request.choices.loss_chunk_tokens is None and job.workload.own_loss_tokens is None:
        for tokens in SMALL_LOSS_CHUNKS_TOKENS:
            tried += [
                replace(strategy, loss_chunk_tokens=tokens)
                for strategy in tried
                if strategy.loss_chunk_tokens > tokens
                and _share_of_logits(job.memory(strategy)) > LARGE_LOGITS
            ]
    return list(dict.fromkeys(tried))


def _with_spare_memory(request: Request, ranked: list[Timed], bases: list[Strategy]) -> list[Timed]:
    """With the best that state on the devices makes of the bases, and of neighbours of the best."""
    job, found = request.job, {one.strategy: one for one in ranked}

    def improve(strategies: Iterable[Strategy]) -> None:
        for strategy in strategies:
            times = sorted(one.step_s for one in found.values())
            fast_s = max([NEARLY * times[0], *times[NUM_RUNNERS_UP : NUM_RUNNERS_UP + 1]])
            better = with_state_on_devices(
                job, strategy, keep_activations=request.keep_activations, fast_s=fast_s
            )
            if better is not None:
                found[better.strategy] = better

    improve(bases)
    seen = {_without_spare(base) for base in bases}
    for _ in range(NUM_ROUNDS):
        best = min(found.values(), key=lambda one: one.step_s).strategy
        if best.gradient_route != "reduce_scatter":
            break
        near = neighbours(
            job.workload,
            job.batch,
            job.hardware.total_devices,
            request.choices,
            with_host_boundaries(
                job.workload, job.batch, replace(best, kept_chunks=0, attention_chunks=0), 0
            ),
        )
        on_devices = list(near)
        on_host = [
            with_all_on_host(job, strategy)
            for strategy in on_devices
            if strategy.weight_route == best.weight_route
            and strategy.rows_per_microbatch == best.rows_per_microbatch
        ]
        fresh = {_without_spare(one): one for one in (*on_devices, *on_host)}
        new = [one for key, one in fresh.items() if key not in seen]
        seen.update(fresh)
        improve(new)
        if min(found.values(), key=lambda one: one.step_s).strategy == best:
            break
    return _preferred(job, sorted(found.values(), key=partial(_by_time, job)))


def _without_spare(strategy: Strategy) -> Strategy:
    """What `with_state_on_devices` makes the same of, however it begins."""
    return replace(strategy, resident_chunks=0, kept_chunks=0, attention_chunks=0)


def _preferred(job: Job, ranked: list[Timed]) -> list[Timed]:
    """With the one to take in front: the fastest, or one that is nearly as fast and asks less.

    Programs of many layers take long to compile; and host memory has its price.
    """
    good = [one for one in ranked if one.step_s <= NEARLY * ranked[0].step_s]
    fewest = min(one.strategy.layers_per_chunk for one in good)
    good = [one for one in good if one.strategy.layers_per_chunk == fewest]

    def price(one: Timed) -> tuple[float, ...]:
        share = job.host_bytes(one.strategy) / job.host_budget_bytes
        return one.step_s * (1 + ALL_HOST_MEMORY * share), *_by_time(job, one)

    best = min(good, key=price)
    return [best, *(one for one in ranked if one is not best)]


def _share_of_logits(memory: MemoryUse) -> float:
    return memory.device.get("logits", 0.0) / memory.device_bytes


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _simulate_best(job: Job, fitting: list[tuple[float, Strategy]]) -> list[Timed]:
    """The best candidate and what else was simulated on the way, fastest first."""
    done: list[Timed] = []
    best_s = math.inf
    for lower_s, strategy in fitting:
        if lower_s >= best_s and len(done) > NUM_RUNNERS_UP:
            break
        done.append(job.timed(strategy))
        best_s = min(best_s, done[-1].step_s)
    return sorted(done, key=partial(_by_time, job))


def _by_time(job: Job, one: Timed) -> tuple[float, float]:
    return one.step_s, job.device_bytes(one.strategy)


def _most_promising(job: Job, misfits: Iterable[Strategy], best_s: float) -> tuple[Rejected, ...]:
    """Misfits that could beat `best_s`; one for each binding limit and what dominates it."""
    bounds = sorted(
        ((job.lower_bound_s(strategy), strategy) for strategy in misfits), key=lambda item: item[0]
    )
    rejected: dict[tuple[str, str], Rejected] = {}
    for lower_s, strategy in bounds:
        if lower_s >= best_s or len(rejected) == NUM_REJECTED:
            break
        limits = job.limits(job.memory(strategy))
        key = (limits[0].name, limits[0].dominant)
        rejected.setdefault(key, Rejected(strategy=strategy, lower_bound_s=lower_s, limits=limits))
    return tuple(rejected.values())
