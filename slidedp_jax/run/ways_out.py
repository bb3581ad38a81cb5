"""A plan for a run; where nothing fits, the message says which settings would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slidedp_jax.errors import UserError
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.nearest_fits import MemoryFlags, larger_memories
from slidedp_jax.planner.optimizers import OptimizerName
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.ways_out import fewer_rows, halves, leaner_optimizers, shorter_rows
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.checks import RunInputs, make_plan


def plan_or_ways_out(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    strategy: Strategy | None = None,
    *,
    rows_per_step: int | None = None,
    held_back_bytes: float = 0.0,
) -> Plan:
    """`checks.make_plan`.

    Raises:
      UserError: nothing fits; every limit is listed, and what was tried beside.
    """
    try:
        return make_plan(
            args,
            inputs,
            num_devices,
            strategy,
            rows_per_step=rows_per_step,
            held_back_bytes=held_back_bytes,
        )
    except UserError as error:
        refused = error.__cause__ if isinstance(error.__cause__, PlanError) else None
        if refused is None or refused.request is None:
            raise
        ways = _ways_out(args, inputs, num_devices, refused, refused.request, held_back_bytes)
        also = ["Also tried:", *(f"- {way}." for way in ways)] if ways else []
        raise UserError("\n".join([str(error), *also])) from error


def _ways_out(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    error: PlanError,
    request: Request,
    held_back_bytes: float,
) -> list[str]:
    def with_optimizer(name: OptimizerName) -> Plan:
        try:
            other = replace(args, optim=name)
            return make_plan(other, inputs, num_devices, held_back_bytes=held_back_bytes)
        except UserError as error:
            if isinstance(error.__cause__, PlanError):
                raise error.__cause__ from None
            raise PlanError(str(error)) from None  # a setting that does not go with the change

    ways = []
    if "host memory" in {limit.name for limit in error.limits}:
        ways += leaner_optimizers(args.optim, with_optimizer)
    ways += fewer_rows(request, list(_smaller_steps(args, num_devices)))
    ways += shorter_rows(request, lambda length: f"--max_seq_length {length}")
    other = args.hardware is not None
    flags = MemoryFlags(
        host="--host_memory_gib" if other else None,
        device="--device_memory_gib" if other else None,
        host_budget="--host_memory_budget",
        device_budget="--device_memory_budget",
        host_budget_is_stated=args.host_memory_budget is not None,
        device_budget_is_stated=args.device_memory_budget is not None,
    )
    return ways + larger_memories(request, error.limits, flags)


def _smaller_steps(args: TrainArguments, num_devices: int) -> Iterator[tuple[int, str]]:
    """Rows of smaller steps, and the flags that ask for them: fewer at once, then fewer times."""
    size, times = args.per_device_train_batch_size, args.gradient_accumulation_steps
    for fewer in halves(size) if isinstance(size, int) else []:
        yield fewer * times * num_devices, f"--per_device_train_batch_size {fewer}"
    one = "" if size == 1 else "--per_device_train_batch_size 1 "
    for fewer in halves(times):
        yield fewer * num_devices, f"{one}--gradient_accumulation_steps {fewer}"
