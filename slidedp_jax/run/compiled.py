"""The programs of a run compiled before its weights are loaded, and its plan checked by them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import optax

from slidedp_jax.assembly import StepPrograms, compile_step
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import StreamedModel
from slidedp_jax.planner.compiled_check import CompiledCheck, compiled_check
from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.optimizers import make_optimizer
from slidedp_jax.run.ways_out import plan_or_ways_out
from slidedp_jax.trainer import make_step_programs

MOST_PLANS = 4
"""Plans that are compiled before it is given up; mostly the second one holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a trainer is made of, of one plan.

    Attributes:
      plan: the plan.
      model: the decoder.
      optimizer: the optimizer.
      programs: what its steps run; None: the trainer makes its own.
      check: the plan's memory with compiled programs; None where none was made.
      held_back_bytes: device memory that the plan leaves free for them.
    """

    plan: Plan
    model: StreamedModel
    optimizer: optax.GradientTransformation
    programs: StepPrograms | None = None
    check: CompiledCheck | None = None
    held_back_bytes: float = 0.0


def make_parts(args: TrainArguments, inputs: RunInputs, plan: Plan) -> Parts:
    """Model and optimizer, nothing compiled."""
    model = inputs.pretrained.model(
        args.attention,
        router_aux_loss_coef=args.router_aux_loss_coef,
        router_z_loss_coef=args.router_z_loss_coef,
        expert_products=args.expert_products,
        label_smoothing=args.label_smoothing_factor,
        z_loss_coef=args.z_loss_coef,
    )
    return Parts(plan=plan, model=model, optimizer=make_optimizer(args, inputs.num_steps))


def is_checked(args: TrainArguments, inputs: RunInputs, plan: Plan) -> bool:
    """Whether there are steps to come, on devices whose memory is the planner's.

    On the CPU backend other programs are made of the same operations, and memory is the host's.
    """
    steps_left = inputs.first_step < inputs.num_steps
    return args.hardware is None and steps_left and not plan.job.hardware.unified_memory


def checked_parts(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    plan: Plan,
    decided: Strategy | None,
) -> tuple[Parts, list[str]]:
    """What to train with, compiled, by a plan that holds for it; and notes.

    Where programs take more than planned and the plan does not hold, it is made anew with that
    memory held back. A strategy that is decided (by the run so far or by `plan_from`) stays, with a
    note: another one would change bits.

    Args:
      args: the run's settings.
      inputs: model and data.
      num_devices: compute devices.
      plan: the plan.
      decided: its strategy, where it was not searched for.

    Raises:
      UserError: no plan holds; what was found, and what would fit.
    """
    parts = make_parts(args, inputs, plan)
    notes: list[str] = []
    held_back = 0.0
    for left in reversed(range(MOST_PLANS)):
        start = time.perf_counter()
        programs = make_step_programs(
            parts.model,
            parts.optimizer,
            strategy=plan.strategy,
            frozen=args.freeze,
            ema_decay=args.ema_decay,
        )
        compiled = compile_step(
            programs,
            tokens_per_row=inputs.source.widths[-1],
            packed=args.packing,
            documents_per_row=inputs.source.documents_per_row,
        )
        check = compiled_check(plan.job, plan.strategy, compiled, held_back=held_back)
        seconds = time.perf_counter() - start
        found = Parts(
            plan=plan,
            model=parts.model,
            optimizer=parts.optimizer,
            programs=programs,
            check=check,
            held_back_bytes=held_back,
        )
        if check.fits:
            text = check.describe()
            return found, [*notes, f"{text} (compiled in {seconds:.0f} s, before any weights)"]
        if decided is not None:
            return found, [
                f"{check.exceeded()}. The strategy is kept, since it was decided before; if memory "
                "runs out, --device_memory_budget with less plans anew"
            ]
        if left:
            held_back, plan, note = _planned_anew(args, inputs, num_devices, plan, check, held_back)
            notes.append(note)
    tried = "\n".join([*notes, check.exceeded()])
    raise UserError(f"{tried}. {MOST_PLANS} plans were tried; {_TO_CHANGE}")


_TO_CHANGE = (
    "use fewer rows per device (--per_device_train_batch_size), shorter ones (--max_seq_length), "
    "or devices with more memory"
)


def _planned_anew(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    plan: Plan,
    check: CompiledCheck,
    held_back: float,
) -> tuple[float, Plan, str]:
    """Memory that is held back, the plan that leaves it free, and what the user is told."""
    more = max(check.beyond_bytes, held_back + check.need_bytes - check.budget_bytes)
    try:
        other = plan_or_ways_out(args, inputs, num_devices, held_back_bytes=more)
    except UserError as error:
        raise UserError(
            f"{check.exceeded()}. With {size_text(more)} held back for them:\n{error}"
        ) from error
    before, after = plan.chosen, other.chosen
    note = (
        f"{check.exceeded()}. So it was planned anew with {size_text(more)} held back for them: "
        f"{_changes(before.strategy, after.strategy)}; a step of {after.time.step_s:.3g} s instead "
        f"of {before.time.step_s:.3g} s"
    )
    return more, other, note


def _changes(before: Strategy, after: Strategy) -> str:
    """What of a strategy is another."""
    changed = {
        name: (was, value)
        for name, was in vars(before).items()
        if (value := getattr(after, name)) != was
    }
    return ", ".join(f"{name} {new} (was {old})" for name, (old, new) in changed.items())


def check_record(check: CompiledCheck | None) -> dict[str, Any] | None:
    """For `run.json`."""
    return None if check is None else check.record()
