"""Why nothing fits."""

from __future__ import annotations

from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.limits import Limit, LimitName
from slidedp_jax.planner.memory import MemoryUse
from slidedp_jax.wording import counted


def limits_of_leanest(job: Job, tried: list[MemoryUse]) -> list[Limit]:
    """The limits exceeded by the candidates that need least of each."""
    limits = [
        *_limit_of_leanest(job, tried, "device memory"),
        *_limit_of_leanest(job, tried, "host memory"),
    ]
    if limits:
        return limits
    # Each can be met alone but not both together: the closest.
    closest = min(
        (job.limits(memory) for memory in tried),
        key=lambda exceeded: sum(limit.need_bytes / limit.have_bytes for limit in exceeded),
    )
    return list(closest)


def nothing_fits(job: Job, limits: list[Limit], num_tried: int, choices: Choices) -> str:
    """One line per limit."""
    decided = {
        name: getattr(choices, name)
        for name in Choices.__dataclass_fields__
        if getattr(choices, name) is not None and name != "num_host_devices"  # often the process's
    }
    lines = [
        f"{job.workload.name} with {counted(job.batch.num_rows, 'row')} of {job.batch.seq_length} "
        f"tokens per step does not fit {job.hardware.num_devices} x {job.hardware.name}, even with "
        f"the leanest of {num_tried} strategies tried:",
        *(f"- {limit.describe()}." for limit in limits),
    ]
    if decided:
        fixed = ", ".join(f"{name}={value}" for name, value in decided.items())
        lines.append(f"Leaving these to the planner widens the search: {fixed}.")
    return "\n".join(lines)


def _limit_of_leanest(job: Job, tried: list[MemoryUse], name: LimitName) -> list[Limit]:
    """The limit `name` of the candidate that needs least of it, none if that one meets it."""
    leanest = min(
        tried, key=lambda use: use.device_bytes if name == "device memory" else use.host_bytes
    )
    return [limit for limit in job.limits(leanest) if limit.name == name]
