"""Why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence

from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.host_boundaries import with_all_on_host
from slidedp_jax.planner.limits import Limit
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.wording import counted


def refusal(request: Request, tried: Sequence[Strategy]) -> PlanError:
    """The error that says what the leanest strategy lacks.

    That is the one that exceeds fewest limits, and of those the one whose needs are nearest to what
    there is. So what is asked for is enough: with it, that strategy fits.

    Args:
      request: of which nothing fits.
      tried: the leanest strategies, none of which fits.
    """
    job = request.job
    leaner = [
        with_all_on_host(job, strategy)
        for strategy in tried
        if not strategy.host_boundaries and not job.fits_devices(strategy)
    ]

    def excess(strategy: Strategy) -> tuple[int, float]:
        ratios = (
            job.device_bytes(strategy) / job.device_budget_bytes,
            job.host_bytes(strategy) / job.host_budget_bytes,
        )
        exceeded = [ratio for ratio in ratios if ratio > 1]
        return len(exceeded), sum(exceeded)

    limits = job.limits(job.memory(min([*tried, *leaner], key=excess)))
    return PlanError(_message(request, limits, len(tried)), limits, request)


def _message(request: Request, limits: Sequence[Limit], num_tried: int) -> str:
    """One line per limit."""
    job, choices = request.job, request.choices
    decided = {
        name: getattr(choices, name)
        for name in Choices.__dataclass_fields__
        if getattr(choices, name) is not None and name != "num_host_devices"  # often the process's
    }
    lines = [
        f"{job.workload.name} with {counted(job.batch.num_rows, 'row')} of {job.batch.seq_length} "
        f"tokens per step does not fit {job.hardware.devices_text}, even with "
        f"the leanest of {num_tried} strategies tried"
        f"{' (both limits are of one and the same)' if len(limits) > 1 else ''}:",
        *(f"- {limit.describe()}." for limit in limits),
    ]
    if decided:
        fixed = ", ".join(f"{name}={value}" for name, value in decided.items())
        lines.append(f"Leaving these to the planner widens the search: {fixed}.")
    return "\n".join(lines)
