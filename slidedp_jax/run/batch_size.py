"""Rows of a step: the planner's choice, and what other sizes or packing would give."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slidedp_jax.data import pack
from slidedp_jax.errors import UserError
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.run.arguments import AUTO_BATCH_SIZE, TrainArguments
from slidedp_jax.run.checks import RunInputs, make_plan, with_rows_per_step
from slidedp_jax.run.overview import step_seconds
from slidedp_jax.run.time_text import duration
from slidedp_jax.run.ways_out import plan_or_ways_out
from slidedp_jax.wording import counted

GAIN = 1.05
"""How much faster per token a larger batch must be, as it makes fewer updates of the same data."""

PATIENCE = 2
"""Sizes in a row that gain nothing, after which larger ones are not tried."""

_ALIKE = ("layers_per_chunk", "weight_route", "gradient_route", "prefetch_depth")

WORTH_A_NOTE = 1.25
"""From which gain on the user is told of another size, or of packing."""


def with_batch_size(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    previous: Mapping[str, Any] | None,
) -> tuple[TrainArguments, RunInputs, list[str]]:
    """The settings with a number in place of `auto`, inputs of that size, and notes.

    The number is recorded with the settings and decides from then on: a run that is resumed, or
    that follows `plan_from`, takes it from there.

    Args:
      args: settings as given.
      inputs: made with one row per device.
      num_devices: compute devices.
      previous: what is recorded of the run so far, if any.

    Raises:
      UserError: not even one row per device fits.
    """
    if args.per_device_train_batch_size != AUTO_BATCH_SIZE:
        return args, inputs, []
    size = _recorded(args, previous)
    if size is not None:
        why = "as it was"
    else:
        found = _fastest(args, inputs, num_devices)
        size, why = found.size, f"{found.tokens_per_s:,.0f} tokens/s predicted, padding included"
    args = replace(args, per_device_train_batch_size=size)
    note = f"per_device_train_batch_size auto is {size} ({why})"
    return args, with_rows_per_step(args, inputs, num_devices), [note]


def _recorded(args: TrainArguments, previous: Mapping[str, Any] | None) -> int | None:
    """What the run so far, or the one whose plan is taken, was done with."""
    arguments = {} if previous is None else previous.get("arguments", {})
    if args.plan_from is not None:
        try:
            record = json.loads(pathlib.Path(args.plan_from).read_bytes().decode())
            arguments = record["arguments"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"plan_from {args.plan_from} holds no settings ({error}); give a run.json"
            ) from None
    size = arguments.get("per_device_train_batch_size")
    return size if isinstance(size, int) else None


@dataclass(frozen=True, kw_only=True)
class _Found:
    size: int
    tokens_per_s: float


def _fastest(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    plan: Plan | None = None,
    *,
    held_back_bytes: float = 0.0,
) -> _Found:
    """The smallest size that is nearly as fast per token as any that fits and the data fills.

    Args:
      args: settings; a number in them is where the search begins.
      inputs: the data.
      num_devices: compute devices.
      plan: of that first size, if it has been made: then the search is a quick one, which ends at
        the first size that gains nothing.
      held_back_bytes: device memory that plans leave free.

    Raises:
      UserError: the first size does not fit.
    """
    given = args.per_device_train_batch_size
    others = args.gradient_accumulation_steps * num_devices
    sizes = _sizes(given if isinstance(given, int) else 1, inputs.source.num_rows // others)
    first = next(sizes)
    quick = plan is not None
    if plan is None:
        plan = plan_or_ways_out(args, inputs, num_devices, rows_per_step=first * others)
    best = _Found(size=first, tokens_per_s=plan.chosen.time.tokens_per_s)
    without_gain = 0
    for size in sizes:
        larger = _plan_alike(
            args,
            inputs,
            num_devices,
            size * others,
            plan.strategy,
            quick=quick,
            held_back_bytes=held_back_bytes,
        )
        if larger is None:
            break
        plan, rate = larger, larger.chosen.time.tokens_per_s
        if rate > GAIN * best.tokens_per_s:
            best, without_gain = _Found(size=size, tokens_per_s=rate), 0
            continue
        without_gain += 1
        if quick or without_gain == PATIENCE:
            break
    return best


def _plan_alike(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    rows: int,
    strategy: Strategy,
    *,
    quick: bool,
    held_back_bytes: float,
) -> Plan | None:
    """A plan for more rows, cut and sent as those of `strategy` if that fits; None: nothing does.

    Planning large models on several devices from nothing takes many seconds; `quick` does without.
    """
    decided = {name: getattr(strategy, name) for name in _ALIKE}
    for choices in (decided,) if quick else (decided, {}):
        with contextlib.suppress(UserError):
            return make_plan(
                args,
                inputs,
                num_devices,
                rows_per_step=rows,
                decided=choices,
                held_back_bytes=held_back_bytes,
            )
    return None


def _sizes(first: int, most: int) -> Iterator[int]:
    """Doubled as long as the data fills a step; the first in any case."""
    size = first
    while size == first or size <= most:
        yield size
        size *= 2


def batch_notes(
    args: TrainArguments,
    inputs: RunInputs,
    plan: Plan,
    num_devices: int,
    *,
    held_back_bytes: float = 0.0,
) -> list[str]:
    """What packing and a larger batch would give, where that is much.

    `held_back_bytes`: device memory that plans leave free.
    """
    notes = [*_packing_note(args, inputs, plan, num_devices)]
    if inputs.first_step or args.plan_from is not None:
        return notes
    found = _fastest(args, inputs, num_devices, plan, held_back_bytes=held_back_bytes)
    gain = found.tokens_per_s / plan.chosen.time.tokens_per_s
    if found.size != args.per_device_train_batch_size and gain >= WORTH_A_NOTE:
        notes.append(
            f"--per_device_train_batch_size {found.size} would be {gain:.1f} times as fast and "
            "fits; steps are fewer then, and learning rates often larger"
        )
    return notes


def _packing_note(
    args: TrainArguments, inputs: RunInputs, plan: Plan, num_devices: int
) -> Iterator[str]:
    source = inputs.source
    if args.packing:
        return
    packed = len(pack(source.examples.lengths, args.max_seq_length))
    others = args.gradient_accumulation_steps * num_devices
    if packed * WORTH_A_NOTE > source.num_rows or packed < others:
        return
    rows = min(source.rows_per_step, packed // others * others)
    smaller = rows < source.rows_per_step
    size = f" --per_device_train_batch_size {rows // others}" if smaller else ""
    steps = -(-packed // rows)
    now_s = source.steps_per_epoch * step_seconds(plan, inputs)
    packed_s = packed / source.rows_per_step * plan.chosen.time.step_s
    if now_s < WORTH_A_NOTE * packed_s:
        return
    yield (
        f"rows fill {100 * source.density:.2g} % of {args.max_seq_length:,} tokens: "
        f"--packing{size} would need {counted(steps, 'step')} per epoch instead of "
        f"{source.steps_per_epoch:,}, about {duration(packed_s)} instead of {duration(now_s)}"
    )
