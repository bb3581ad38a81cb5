"""What would make a job fit that does not: flags of the commands, tried with the planner."""

from __future__ import annotations

from collections.abc import Callable

from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.optimizers import LEANER, WHOLE_PARAMETER_OPTIMIZERS, OptimizerName
from slidedp_jax.planner.search import Plan
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


def fewer_rows(
    num_rows: int, num_devices: int, seq_length: int, attempt: Callable[[int], Plan]
) -> list[str]:
    """The largest step, by halves, for which the devices have room.

    Args:
      num_rows: rows of the step that does not fit.
      num_devices: devices that share them.
      seq_length: tokens of a row.
      attempt: plans the same job with other rows.
    """
    least: float | None = None
    while num_rows > num_devices:
        num_rows = max(num_devices, num_rows // 2)
        try:
            need = attempt(num_rows).chosen.memory.device_bytes
        except PlanError as error:
            needs = [x.need_bytes for x in error.limits if x.name == "device memory"]
            least = needs[0] if needs else None
            continue
        return [f"{_step(num_rows, seq_length)} fits: {size_text(need)} of each device"]
    if least is None:
        return []
    return [f"{_step(num_rows, seq_length)} still needs {size_text(least)} of each device"]


def _step(num_rows: int, seq_length: int) -> str:
    return f"a step of {counted(num_rows, 'row')} of {seq_length:,} tokens"
