"""What would make a job fit that does not: flags of the commands, tried with the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.limits import LimitName
from slidedp_jax.planner.nearest_fits import longest_row, shorter
from slidedp_jax.planner.optimizers import LEANER, WHOLE_PARAMETER_OPTIMIZERS, OptimizerName
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.request_check import may_be_asked
from slidedp_jax.planner.search import Plan, fastest
from slidedp_jax.wording import counted


def leaner_optimizers(
    optimizer: OptimizerName, attempt: Callable[[OptimizerName], Plan]
) -> list[str]:
    """What optimizers with less state need, where the host has no room.

    Args:
      optimizer: the one that does not fit.
      attempt: plans the same job with another.
    """
    lines = []
    for other in LEANER[optimizer]:
        try:
            found = attempt(other)
        except PlanError as error:
            needs = [x.need_bytes for x in error.limits if x.name == "host memory"]
            if needs:
                lines.append(f"--optim {other} still needs {size_text(needs[0])} of host memory")
            continue
        need, step_s = found.chosen.memory.host_bytes, found.chosen.time.step_s
        longer = " or more" if other in WHOLE_PARAMETER_OPTIMIZERS else ""
        lines.append(
            f"--optim {other} fits: it needs {size_text(need)} of host memory, {step_s:.2f} s"
            f"{longer} a step"
        )
    return lines


def fewer_rows(request: Request, steps: Sequence[tuple[int, str]]) -> list[str]:
    """The largest of some smaller steps that fits, or what even the smallest needs.

    Args:
      request: of which nothing fits.
      steps: rows of a step and the flags that ask for it, from large to small.
    """
    batch = request.job.batch
    options = {rows: request.other(batch=replace(batch, num_rows=rows)) for rows, _ in steps}
    steps = [step for step in steps if may_be_asked(options[step[0]])]
    if not steps:
        return []
    rows, flags = next((step for step in steps if options[step[0]].fits()), steps[-1])
    step = f"{_step(rows, batch.seq_length)} ({flags})"
    found = _tried(options[rows])
    if isinstance(found, Plan):
        return [f"{step} fits: {_needs(found)}"]
    needs = " and ".join(
        f"{size_text(limit.need_bytes)} of {_PLACES[limit.name]}" for limit in found.limits
    )
    return [f"{step} still needs {needs}"] if needs else []


def shorter_rows(request: Request, flags: Callable[[int], str]) -> list[str]:
    """The longest rows, as many of them, that fit.

    Args:
      request: of which nothing fits.
      flags: what asks for rows of so many tokens.
    """
    length = longest_row(request)
    if length is None:
        return []
    found = _tried(shorter(request, length))
    if isinstance(found, PlanError):
        return []
    return [f"{_step(request.job.batch.num_rows, length)} ({flags(length)}) fits: {_needs(found)}"]


def _needs(found: Plan) -> str:
    memory, unified = found.chosen.memory, found.job.hardware.unified_memory
    parts = [f"{size_text(memory.host_bytes)} of host memory"]
    parts += [] if unified else [f"{size_text(memory.device_bytes)} of each device"]
    parts.append(f"{found.chosen.time.tokens_per_s:,.0f} tokens/s")
    return ", ".join(parts)


_PLACES: Mapping[LimitName, str] = {"device memory": "each device", "host memory": "host memory"}


def halves(number: int, least: int = 1) -> list[int]:
    """Half of a number, half of that, and so on down to `least`."""
    found = []
    while number > least:
        number = max(least, number // 2)
        found.append(number)
    return found


def _tried(request: Request) -> Plan | PlanError:
    try:
        return fastest(request)
    except PlanError as error:
        return error


def _step(num_rows: int, seq_length: int) -> str:
    return f"a step of {counted(num_rows, 'row')} of {seq_length:,} tokens"
