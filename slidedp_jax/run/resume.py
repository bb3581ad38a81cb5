"""Going on with a run: how much of it is left, what has changed, and by which plan.

A run's length is a position in its data, not a number of steps counted anew: with other rows per
step, as many steps are left as the remaining rows fill. A plan decides the last bits of results, so
the recorded one is taken again unless something that decides plans has been changed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from slidedp_jax.checkpoint.record import ROUNDING, check_configuration, read_record
from slidedp_jax.errors import UserError
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.process import current_setup
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.changes import SCHEDULE, changed, data_may_change, with_defaults
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.learning_rate import learning_rate
from slidedp_jax.run.record import IN_CHECKPOINT, understood
from slidedp_jax.run.same_inputs import counts_before
from slidedp_jax.state.weight_rounding import Rounding, WeightRounding
from slidedp_jax.wording import counted

DECIDE_PLANS = (
    "device_memory_budget",
    "host_memory_budget",
    "keep_activations",
    "resident_state",
    "layers_per_chunk",
    "rows_per_microbatch",
    "loss_chunk_tokens",
    "weight_route",
    "gradient_route",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "on_nonfinite",
    "max_loss",
    "max_seq_length",
    "packing",
)
"""Settings that may change on resume and decide the plan; devices are compared as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumption:
    """A checkpoint to go on from.

    Attributes:
      checkpoint: its folder.
      record: its `trainer.json`.
    """

    checkpoint: pathlib.Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.record["step"])

    @property
    def extra(self) -> dict[str, Any]:
        """What the run has saved beside the state."""
        return dict(self.record["extra"])

    @property
    def run(self) -> dict[str, Any]:
        """What `record.essential` gave of the run; empty where earlier versions did not save it."""
        saved = self.extra.get(IN_CHECKPOINT)
        return understood(saved) if saved else {}

    def other_data(self, inputs: RunInputs) -> bool:
        """Whether the rows or their order are others than those that the checkpoint is of."""
        return bool(inputs.source.differences(self.extra.get("data", {})))

    def continued(self, inputs: RunInputs, args: TrainArguments) -> RunInputs:
        """The inputs at the checkpoint's place in the data, with the steps that are then left.

        Of other data, where that is allowed, at its beginning.

        Raises:
          UserError: the data, its order or the model's configuration are others.
        """
        config = inputs.pretrained.config
        check_configuration(self.checkpoint, self.record, dataclasses.asdict(config))
        if not (self.other_data(inputs) and data_may_change(args)):
            try:
                inputs.source.restore(self.extra.get("data", {}))
            except UserError as error:
                counts = counts_before(self.run.get("data_counts"), inputs)
                raise UserError(
                    f"{error}{counts}. To go on with the new rows, from their beginning: "
                    "--allow_changed train_file"
                ) from None
        left = inputs.source.steps_until(args.num_train_epochs)
        return dataclasses.replace(
            inputs, num_steps=args.max_steps or self.step + left, first_step=self.step
        )

    def notes(self, args: TrainArguments, inputs: RunInputs) -> list[str]:
        """What differs from the run that saved the checkpoint, and matters."""
        notes, before = [], self.extra
        rows, now = before.get("rows_per_step"), inputs.source.rows_per_step
        if rows not in (None, now):
            notes.append(
                f"steps have {counted(now, 'row')} now, {rows:,} before: devices, batch size or "
                "accumulation have changed"
            )
        if self.other_data(inputs):
            notes.append("the training rows or their order are others: they begin anew here")
        notes += self._rate_notes(args, inputs.num_steps)
        return notes + _compiler_notes(before.get(IN_CHECKPOINT, {}))

    def _rate_notes(self, args: TrainArguments, num_steps: int) -> list[str]:
        updates = self.step - self.extra.get("skipped_steps", 0)
        settings = self.run.get("arguments", {})
        # Versions that did not keep them in checkpoints cannot say what they were.
        former = {name: with_defaults(settings)[name] for name in SCHEDULE} if settings else {}
        why = [name for name in changed(args, settings) if name in former]
        then = dataclasses.replace(args, **former)
        steps = self.extra.get("num_steps", num_steps)
        before = float(learning_rate(then, steps)(updates))
        now = float(learning_rate(args, num_steps)(updates))
        if before == now:
            if "learning_rate_by_name" not in why:
                return []
            return ["learning rates of some weights jump here: learning_rate_by_name changed"]
        text = f"{', '.join(why)} changed" if why else ""
        if steps != num_steps:
            text += f"{' and ' if text else ''}the run has {num_steps} steps now, {steps} before"
        return [f"the learning rate jumps here from {before:.4g} to {now:.4g}: {text}"]


def resumption(checkpoint: pathlib.Path | None) -> Resumption | None:
    """What a checkpoint says of the run so far; None without one.

    Raises:
      UserError: it is damaged.
    """
    if checkpoint is None:
        return None
    return Resumption(checkpoint=checkpoint, record=read_record(checkpoint))


def planned_for() -> dict[str, Any]:
    """The devices of this process, as far as they decide a plan."""
    setup = current_setup()
    devices, _ = setup.devices()
    return {
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_host_devices": setup.num_host_devices,
        **({"num_hosts": setup.hosts.num_hosts} if setup.hosts.num_hosts > 1 else {}),
    }


def recorded_strategy(
    previous: Mapping[str, Any] | None, args: TrainArguments
) -> tuple[Strategy | None, list[str]]:
    """The strategy of the run so far, and notes; None where a plan has to be made.

    Args:
      previous: what `record.read_run` or a checkpoint holds of it.
      args: settings of this run.
    """
    if args.plan_from is not None:
        return _strategy_of_file(pathlib.Path(args.plan_from)), []
    if previous is None or previous.get("strategy") is None or args.hardware is not None:
        return None, []
    differing = [
        f"{name} was {was!r}, now {now!r}"
        for name, (was, now) in changed(args, previous["arguments"]).items()
        if name in DECIDE_PLANS or (name == "max_grad_norm" and bool(was) != bool(now))
    ]
    differing += _other_devices(previous.get("planned_for"))
    if differing:
        return None, [f"planned anew, which may change the last bits: {'; '.join(differing)}"]
    try:
        return Strategy.recorded(previous["strategy"]), []
    except ValueError as error:
        return None, [f"planned anew, which may change the last bits: {error}"]


def rounding_to_begin_with(
    previous: Mapping[str, Any] | None, args: TrainArguments
) -> Rounding | None:
    """How a run without checkpoints rounds its weights; None for the usual way.

    What is asked for, else what decided the bits of the run that this one repeats: that of
    `plan_from`, or one in its folder that ended before its first checkpoint.

    Raises:
      UserError: `plan_from` holds none.
    """
    if args.weight_rounding is not None:
        return args.weight_rounding
    if args.plan_from is not None:
        return _of_file(pathlib.Path(args.plan_from))[1]
    return None if previous is None else WeightRounding.recorded(previous[ROUNDING]).rounding


def _strategy_of_file(path: pathlib.Path) -> Strategy:
    """The strategy in another run's `run.json`.

    Raises:
      UserError: it has none, or one for other devices.
    """
    return _of_file(path)[0]


def _of_file(path: pathlib.Path) -> tuple[Strategy, Rounding]:
    """What of a `run.json` decides bits in another run."""
    try:
        record = json.loads(path.read_bytes().decode())
        strategy = Strategy.recorded(record["plan"]["chosen"]["strategy"])
        rounding = WeightRounding.recorded(record.get(ROUNDING)).rounding
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"plan_from {path} holds no plan ({error}); give the run.json of a run"
        ) from None
    if others := _other_devices(record.get("planned_for")):
        raise UserError(f"plan_from {path} was made for other devices: {'; '.join(others)}")
    return strategy, rounding


def _other_devices(before: Mapping[str, Any] | None) -> list[str]:
    now = planned_for()
    return [
        f"{name} was {before[name]!r}, now {now[name]!r}"
        for name in now
        if before is not None and name in before and before[name] != now[name]
    ]


def xla_flags() -> list[str]:
    """Flags of the compiler, which may decide the last bits."""
    return sorted(os.environ.get("XLA_FLAGS", "").split())


def _compiler_notes(before: Mapping[str, Any]) -> list[str]:
    versions, flags = before.get("versions", {}), before.get("xla_flags")
    differing = [
        f"{name} {versions[name]} -> {now}"
        for name in ("jax", "jaxlib", "optax")
        if name in versions and versions[name] != (now := importlib.metadata.version(name))
    ]
    if flags is not None and flags != xla_flags():
        differing.append(f"XLA_FLAGS {' '.join(flags)} -> {' '.join(xla_flags())}")
    return [f"results may differ in the last bits: {', '.join(differing)}"] if differing else []
