"""A plan for a run; where nothing fits, the message says which settings would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slidedp_jax.errors import UserError
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.ways_out import fewer_rows, halves, leaner_optimizers
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.checks import RunInputs, make_plan


def plan_or_ways_out(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    strategy: Strategy | None = None,
    *,
    rows_per_step: int | None = None,
) -> Plan:
    """`checks.make_plan`.

    Raises:
      UserError: nothing fits; every limit is listed, and what was tried beside.
    """
    try:
        return make_plan(args, inputs, num_devices, strategy, rows_per_step=rows_per_step)
    except UserError as error:
        limits = error.__cause__.limits if isinstance(error.__cause__, PlanError) else ()
        if not limits:
            raise
        ways = _ways_out(args, inputs, num_devices, {limit.name for limit in limits})
        also = ["Also tried:", *(f"- {way}." for way in ways)] if ways else []
        raise UserError("\n".join([str(error), *also])) from error


def _ways_out(
    args: TrainArguments, inputs: RunInputs, num_devices: int, limits: set[str]
) -> list[str]:
    def attempt(rows: int | None = None, **changes: Any) -> Plan:
        try:
            return make_plan(replace(args, **changes), inputs, num_devices, rows_per_step=rows)
        except UserError as error:
            if isinstance(error.__cause__, PlanError):
                raise error.__cause__ from None
            raise PlanError(str(error)) from None  # a setting that does not go with the change

    ways = []
    if "host memory" in limits:
        ways += leaner_optimizers(args.optim, lambda name: attempt(optim=name))
    steps = list(_smaller_steps(args, num_devices))
    return ways + fewer_rows(steps, inputs.source.widths[-1], attempt)


def _smaller_steps(args: TrainArguments, num_devices: int) -> Iterator[tuple[int, str]]:
    """Rows of smaller steps, and the flags that ask for them: fewer at once, then fewer times."""
    size, times = args.per_device_train_batch_size, args.gradient_accumulation_steps
    for fewer in halves(size) if isinstance(size, int) else []:
        yield fewer * times * num_devices, f"--per_device_train_batch_size {fewer}"
    one = "" if size == 1 else "--per_device_train_batch_size 1 "
    for fewer in halves(times):
        yield fewer * num_devices, f"{one}--gradient_accumulation_steps {fewer}"
