"""A plan as text for people and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slidedp_jax.jax_internals import PINNED_LIMIT_GIB
from slidedp_jax.planner.chunking import chunk_stages
from slidedp_jax.planner.disk import DISK_BYTES_PER_S, DiskUse
from slidedp_jax.planner.hardware import ASSUMED_GROUPED_MATMUL_SHARE, GIB, size_text
from slidedp_jax.planner.job import Alternative
from slidedp_jax.planner.limits import Limit
from slidedp_jax.planner.search import Plan, Rejected
from slidedp_jax.planner.stated_choices import difference, why_not
from slidedp_jax.planner.stated_machine import host_line
from slidedp_jax.planner.step_time import StepTime
from slidedp_jax.planner.timeline import LANES
from slidedp_jax.planner.words import CATEGORY_WORDS, LANE_WORDS, PHASE_WORDS
from slidedp_jax.wording import counted, short_count


@dataclass(frozen=True, kw_only=True)
class Completion:
    """How much work the whole job is.

    Attributes:
      total_tokens: tokens of the whole job, all epochs.
      price_per_device_hour: in any currency; None leaves the cost out.
    """

    total_tokens: int
    price_per_device_hour: float | None = None

    def hours(self, plan: Plan) -> float:
        """Hours of training, without start-up, evaluation and saving."""
        return self.total_tokens / plan.chosen.time.tokens_per_s / 3600

    def cost(self, plan: Plan) -> float | None:
        """Price of those hours on all devices."""
        if self.price_per_device_hour is None:
            return None
        return self.hours(plan) * plan.job.hardware.total_devices * self.price_per_device_hour


def plan_as_dict(
    plan: Plan,
    completion: Completion | None = None,
    *,
    disk: DiskUse | None = None,
    more_notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything in a plan as dicts, lists, numbers and strings; SI units, named in the keys."""
    job = plan.job
    result: dict[str, Any] = {
        "model": {
            "name": job.workload.name,
            "num_parameters": job.workload.num_parameters,
            "num_trained_parameters": job.workload.num_trained,
            "num_active_parameters": job.workload.num_active_parameters,
        },
        "batch": asdict(job.batch) | {"num_tokens": job.batch.num_tokens},
        "hardware": asdict(job.hardware)
        | {"pinned_pool_limit_bytes": job.hardware.pinned_pool_limit_bytes},
        "optimizer_state_bytes": job.optimizer_state_bytes,
        "device_budget_bytes": job.device_budget_bytes,
        "host_budget_bytes": job.host_budget_bytes,
        "chosen": _alternative_as_dict(plan.chosen),
        "runners_up": [
            _alternative_as_dict(other) | {"why_not": why_not(other, plan.chosen)}
            for other in plan.runners_up
        ],
        "rejected": [_rejected_as_dict(other) for other in plan.rejected],
        "notes": [*notes(plan), *more_notes],
    }
    if disk is not None:
        result["disk"] = asdict(disk) | {"total_bytes": disk.total_bytes}
    if completion is not None:
        result["completion"] = asdict(completion) | {
            "hours": completion.hours(plan),
            "cost": completion.cost(plan),
        }
    return result


def _alternative_as_dict(alternative: Alternative) -> dict[str, Any]:
    memory, time = alternative.memory, alternative.time
    return {
        "strategy": asdict(alternative.strategy),
        "memory": {
            "device_bytes": memory.device_bytes,
            "device": dict(memory.device),
            "device_phase": memory.device_phase,
            "host_bytes": memory.host_bytes,
            "host": dict(memory.host),
            "pinned_pool_bytes": memory.pinned_pool_bytes,
        },
        "time": asdict(time) | {"busy_fraction": time.busy_fraction, "bottleneck": time.bottleneck},
    }


def _rejected_as_dict(rejected: Rejected) -> dict[str, Any]:
    return {
        "strategy": asdict(rejected.strategy),
        "lower_bound_s": rejected.lower_bound_s,
        "limits": [limit_as_dict(limit) for limit in rejected.limits],
    }


def limit_as_dict(limit: Limit) -> dict[str, Any]:
    """A limit that is exceeded, with what to change."""
    return asdict(limit) | {"advice": limit.advice}


def plan_as_text(
    plan: Plan,
    completion: Completion | None = None,
    *,
    disk: DiskUse | None = None,
    assumed: Collection[str] = (),
    more_notes: Sequence[str] = (),
) -> str:
    """A page for the terminal; no trailing newline.

    Args:
      plan: what to tell of.
      completion: the whole job, for hours and cost.
      disk: the room that the run takes there.
      assumed: what nobody has stated of the machine (attributes of `stated_machine.Stated`).
      more_notes: beside those of the plan itself.
    """
    sections = [
        _heading(plan, assumed),
        _strategy_lines(plan),
        _memory_lines(plan, disk),
        _time_lines(plan.chosen.time),
        _other_lines(plan),
        [f"note: {note}" for note in [*notes(plan), *more_notes]],
    ]
    if completion is not None:
        cost = completion.cost(plan)
        price = "" if cost is None else f", cost {cost:,.2f}"
        hours = completion.hours(plan)
        sections.append([f"{completion.total_tokens:,} tokens: {hours:.2f} h{price}"])
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def notes(plan: Plan) -> list[str]:
    """What the user should know beside the figures."""
    found = []
    job, hardware = plan.job, plan.job.hardware
    strategy, memory = plan.strategy, plan.chosen.memory
    if not hardware.provenance.startswith("measured"):
        found.append(
            f"the figures of {hardware.name} are not measured: expect larger errors than on "
            "hardware that was, or measure it with `slidedp measure`"
        )
    if (
        any(stage.grouped_parameters for stage in job.workload.layers)
        and hardware.grouped_matmul_share == ASSUMED_GROUPED_MATMUL_SHARE
    ):
        found.append(
            f"how fast experts' products are was not measured on {hardware.name}: assumed is "
            f"{hardware.grouped_matmul_share:.0%} of the rate of plain ones"
        )
    pool = 0.0 if hardware.unified_memory else memory.pinned_pool_bytes
    if pool > hardware.pinned_pool_limit_bytes:
        need = -(-pool // GIB)
        found.append(
            f"page-locked gradients need a pool of {need:.0f} GiB, above its limit of "
            f"{hardware.pinned_pool_limit_bytes / GIB:.0f} GiB: set "
            f"{PINNED_LIMIT_GIB}={need:.0f} or more before JAX starts"
        )
    found += [
        f"{limit.name}: the plan needs {size_text(limit.need_bytes)}, "
        f"{size_text(limit.have_bytes)} can be had now: it must not become less"
        for limit in job.limits(memory)
    ]
    rows = hardware.total_devices * strategy.num_microbatches * strategy.rows_per_microbatch
    if rows != job.batch.num_rows:
        found.append(
            f"of {rows} places for rows in a step {rows - job.batch.num_rows} are left to filler "
            f"rows, which cost time: it has {counted(job.batch.num_rows, 'row')}"
        )
    return found


def _heading(plan: Plan, assumed: Collection[str]) -> list[str]:
    batch, hardware = plan.job.batch, plan.job.hardware
    workload = plan.job.workload
    name, active = workload.name, workload.num_active_parameters
    if active < workload.num_parameters:
        name += f", {short_count(active)} active"
    return [
        f"{name}, {counted(batch.num_rows, 'row')} x {batch.seq_length} = "
        f"{batch.num_tokens:,} tokens per step",
        f"on {hardware.devices_text} ({hardware.provenance})",
        host_line(hardware, assumed),
    ]


def _strategy_lines(plan: Plan) -> list[str]:
    strategy = plan.strategy
    chunks = chunk_stages(
        plan.job.workload,
        strategy.layers_per_chunk,
        strategy.block_size,
        strategy.num_host_devices * strategy.num_hosts,
    )
    values = asdict(strategy)
    lines = [f"strategy ({len(chunks.layers)} layer chunks)"]
    return lines + [f"  {name:<22} {value}" for name, value in values.items()]


def _memory_lines(plan: Plan, disk: DiskUse | None) -> list[str]:
    memory = plan.chosen.memory
    per_parameter = memory.host_bytes / plan.job.workload.num_parameters
    return [
        f"memory of each device: {size_text(memory.device_bytes)} of "
        f"{size_text(plan.job.device_budget_bytes)}, most {PHASE_WORDS[memory.device_phase]}",
        *_parts(memory.device),
        f"host memory: {size_text(memory.host_bytes)} of {size_text(plan.job.host_budget_bytes)}, "
        f"{per_parameter:.1f} bytes per parameter",
        *_parts(memory.host),
        *([] if disk is None else [f"disk: {disk.describe()}", _save_line(disk)]),
    ]


def _save_line(disk: DiskUse) -> str:
    rate = DISK_BYTES_PER_S / 1e9
    return f"  a save takes the disk about {disk.save_s:,.3g} s at {rate:g} GB/s (assumed)"


def _parts(parts: Mapping[str, float]) -> list[str]:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [
        f"  {name:<24} {size_text(size):>12}  {CATEGORY_WORDS[name]}"
        for name, size in ordered
        if size > 0
    ]


def _time_lines(time: StepTime) -> list[str]:
    lines = [
        f"step: {time.step_s:.3f} s predicted, {time.tokens_per_s:,.0f} tokens/s, "
        f"MFU {time.mfu:.1%}, HFU {time.hfu:.1%} (of peak; without and with recomputation)",
        f"  ten million tokens: {1e7 / time.tokens_per_s / 3600:.2f} h",
        f"  {time.lower_bound_s:.3f} s if everything overlapped, {time.upper_bound_s:.3f} s if "
        f"nothing did; a single step alone {time.single_step_s:.3f} s",
        f"  {'lane':<14}{'busy s':>10}{'share':>9}{'compute waits s':>18}",
    ]
    for lane in LANES:
        waits = "" if lane == "compute" else f"{time.exposed_s[lane]:.3f}"
        lines.append(
            f"  {lane:<14}{time.busy_s[lane]:>10.3f}{time.busy_fraction[lane]:>9.1%}{waits:>18}"
            f"  {LANE_WORDS[lane]}"
        )
    return lines


def _other_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.runners_up:
        lines.append("next best")
        lines += [
            f"  {other.time.step_s:.3f} s, device {size_text(other.memory.device_bytes)}: "
            f"{difference(other, plan.chosen)}{_reason(other, plan.chosen)}"
            for other in plan.runners_up
        ]
    if plan.rejected:
        lines.append("perhaps faster, but does not fit")
        lines += [
            f"  from {other.lower_bound_s:.3f} s: {_short(other)}; {other.limits[0].describe()}"
            for other in plan.rejected
        ]
    return lines


def _reason(other: Alternative, chosen: Alternative) -> str:
    reason = why_not(other, chosen)
    return "" if reason is None else f" ({reason})"


def _short(rejected: Rejected) -> str:
    strategy = rejected.strategy
    return (
        f"layers_per_chunk {strategy.layers_per_chunk}, rows_per_microbatch "
        f"{strategy.rows_per_microbatch}, weight_route {strategy.weight_route}, gradient_route "
        f"{strategy.gradient_route}"
    )
