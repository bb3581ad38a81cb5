"""What a run that ran out of a GPU's memory says."""

from __future__ import annotations

import jax

from slidedp_jax.errors import UserError
from slidedp_jax.planner.search import Plan

_SIGN = "RESOURCE_EXHAUSTED"
_NEXT_BUDGET = 0.85
"""Of the present one."""


def explained(error: BaseException, plan: Plan) -> UserError | None:
    """What to do about it, where an allocation is among the causes of `error`; None otherwise.

    Args:
      error: as it came out of a step, perhaps by way of another thread.
      plan: what the run was given.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    # Full disks and quotas are RESOURCE_EXHAUSTED too, but of other types.
    found = [c for c in causes if isinstance(c, jax.errors.JaxRuntimeError) and _SIGN in str(c)]
    if not found:
        return None
    cause = found[0]
    gib = 2**30
    planned, budget = plan.chosen.memory.device_bytes / gib, plan.job.device_budget_bytes / gib
    return UserError(
        f"out of memory: {str(cause).splitlines()[0][:300]}\nThe plan was {planned:.1f} of "
        f"{budget:.1f} GiB of each device. With --device_memory_budget {_NEXT_BUDGET * budget:.3g} "
        "less is kept there; the same command with it goes on from the last checkpoint. Other "
        "programs on the GPU take memory too: see nvidia-smi"
    )
