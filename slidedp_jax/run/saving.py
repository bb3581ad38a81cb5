"""When a run saves, what becomes of it, and which checkpoints stay."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slidedp_jax.checkpoint.retention import Retention, list_steps, step_of
from slidedp_jax.checkpoint.save_beside import SaveBeside, default_buffer_bytes
from slidedp_jax.planner.disk import DISK_BYTES_PER_S, stall_s
from slidedp_jax.planner.hardware import GIB, size_text
from slidedp_jax.planner.search import Plan
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.evaluations import Measure, begins_anew, best_before, best_evaluated
from slidedp_jax.run.progress import Progress
from slidedp_jax.run.time_text import duration
from slidedp_jax.trainer import Trainer

WORTH_A_NOTE_S = 5.0
"""Of steps held up by a save."""

_MADE_BYTES_PER_S = 1e9
_MADE_AT_LEAST_S = 5.0
"""Seconds before a save in which its memory is made: so many, and those of so many bytes."""


class Saves:
    """The saves of one run, which are its caller's thread's alone.

    Args:
      args: its settings.
      plan: of its memory and steps.
      folder: of its checkpoints.
      metrics: its metrics.jsonl.
      measure: what its evaluations are of.
      saved: called after each checkpoint that has been written.
      is_owner: whether checkpoints that need not stay are this process's to delete.

    Attributes:
      not_saved: why the last checkpoint of the run could not be written, if it could not.
      step: of the newest checkpoint that this run has written.
    """

    def __init__(
        self,
        args: TrainArguments,
        plan: Plan,
        folder: pathlib.Path,
        *,
        metrics: pathlib.Path,
        measure: Measure,
        saved: Callable[[], None],
        is_owner: bool = True,
    ):
        self.not_saved: OSError | None = None
        self.step: int | None = None
        self._args = args
        self._plan = plan
        self._folder = folder
        self._metrics = metrics
        self._measure = measure
        self._saved = saved
        self._is_owner = is_owner
        self._retention = Retention(last=args.save_total_limit, every=args.save_keep_every)
        self._last = time.monotonic()
        self._under_way: tuple[SaveBeside, float] | None = None
        self._disk_bytes_per_s = DISK_BYTES_PER_S
        self._made_ahead: int | None = None
        self._looked: float | None = None
        self._step_s = 0.0

    def due(self, step: int) -> bool:
        """Whether a checkpoint of this step is due, by steps or by the clock."""
        args = self._args
        by_steps = args.save_steps is not None and step % args.save_steps == 0
        minutes = (time.monotonic() - self._last) / 60
        return by_steps or (args.save_minutes is not None and minutes >= args.save_minutes)

    def save(
        self, trainer: Trainer, extra: Mapping[str, Any], progress: Progress, *, waits: bool
    ) -> None:
        """Write a checkpoint, or begin to; one that is under way is waited for first.

        Args:
          trainer: its state.
          extra: to be kept beside the state.
          progress: told what happens.
          waits: whether steps wait until it is written; then it is tried though the one before
            has failed.

        Raises:
          OSError: this one cannot be written, or without `waits` the one before.
        """
        self._last = time.monotonic()
        with progress.doing("saving a checkpoint"):
            try:
                self.finish(progress)
            except OSError as error:
                if not waits:
                    raise
                progress.say(f"a checkpoint was not written: {error}")
            if waits or not self._args.save_beside or trainer.together is not None:
                path = trainer.save(self._folder, extra)
                self._done(trainer.step_count, progress)
                progress.say(f"saved {path}")
                return
            size = _state_bytes(trainer)
            buffer_bytes, self._made_ahead = self._made_ahead, None
            if buffer_bytes is None:
                buffer_bytes = self._buffer_bytes(size)
            predicted = stall_s(
                size, buffer_bytes, self._disk_bytes_per_s, self._plan.chosen.time.step_s
            )
            saving = trainer.save_beside(self._folder, extra, buffer_bytes=buffer_bytes)
        self._under_way = saving, predicted

    def look(self, progress: Progress) -> None:
        """Between steps: say what has been written since, and delete what need not stay."""
        if self._under_way is not None and self._under_way[0].done:
            self.finish(progress)

    def prepare(self, trainer: Trainer, step: int, num_steps: int) -> None:
        """If a save beside the steps is near, make its memory.

        Args:
          trainer: its state.
          step: that has ended; called after each.
          num_steps: of the run.
        """
        trainer.gate.check_open()
        now = time.monotonic()
        if self._looked is not None:
            between = now - self._looked
            self._step_s = between
        self._looked = now
        if (
            self._args.save_beside
            and trainer.together is None
            and self._under_way is None
            and self._made_ahead is None
            and not self.due(step)
            and self._is_near(step, num_steps, _state_bytes(trainer))
        ):
            self._made_ahead = self._buffer_bytes(_state_bytes(trainer))
            trainer.prepare_save(buffer_bytes=self._made_ahead)

    def _is_near(self, step: int, num_steps: int, state_bytes: int) -> bool:
        """Whether a save beside the steps begins in about as long as its memory takes."""
        args, near_s = self._args, _MADE_AT_LEAST_S + state_bytes / _MADE_BYTES_PER_S
        step_s = self._step_s or self._plan.chosen.time.step_s
        if args.save_minutes is not None:
            left_s = 60 * args.save_minutes - (time.monotonic() - self._last)
            if left_s < near_s and (num_steps - step) * step_s > left_s:
                return True
        if args.save_steps is None:
            return False
        next_step = (step // args.save_steps + 1) * args.save_steps
        return next_step < num_steps and (next_step - step) * step_s < near_s

    def finish(self, progress: Progress) -> None:
        """Wait for what is under way.

        Raises:
          OSError: it cannot be written.
        """
        if self._under_way is None:
            return
        (saving, predicted), self._under_way = self._under_way, None
        times = saving.result()
        self._done(step_of(saving.path), progress)
        if times.num_bytes:
            self._disk_bytes_per_s = times.num_bytes / times.seconds
        progress.say(
            f"saved {saving.path} beside steps in {times.seconds:.1f} s "
            f"({times.num_bytes / times.seconds / 1e9:.2f} GB/s); "
            f"updates waited {times.held_s:.1f} s for it, {predicted:.1f} s predicted"
        )

    def settle(self, progress: Progress, error: BaseException) -> None:
        """The steps end by an error: what is under way still counts if it is written whole.

        Args:
          progress: told if it is not.
          error: what ends the steps, which is not told twice.
        """
        if self._under_way is None:
            return
        (saving, _), self._under_way = self._under_way, None
        try:
            saving.result()
        except Exception as failure:  # any: the error that ends the run is to be seen, too
            if failure is not error:
                progress.say(f"a checkpoint was not written: {failure}")
            return
        self._done(step_of(saving.path), progress)

    def _done(self, step: int, progress: Progress) -> None:
        """It is whole, so that what cannot be deleted for it is no failure of the run."""
        self.step = step
        if not self._is_owner:
            return
        try:
            self._saved()
            errors = self._retention.apply(self._folder, self._stays())
        except OSError as error:
            errors = [error]
        for why in errors:
            progress.say(f"what need not stay cannot be deleted: {why}")

    @property
    def best(self) -> pathlib.Path | None:
        """The best checkpoint there is, of those whose weights were evaluated."""
        if not self._args.save_best:
            return None
        paths = {step_of(path): path for path in list_steps(self._folder)}
        best = best_evaluated(self._metrics, list(paths), self._measure, self._args.best_metric)
        return None if best is None else paths[best]

    @property
    def best_before(self) -> list[pathlib.Path]:
        """The best by rows or a loss that were others, where nothing is known to be better."""
        if not self._args.save_best:
            return []
        paths = {step_of(path): path for path in list_steps(self._folder)}
        found = best_before(self._metrics, list(paths), self._measure, self._args.best_metric)
        return [paths[step] for step in found]

    def resumed(self, before: Mapping[str, Any]) -> list[str]:
        """What a run that goes on compares and keeps otherwise than it did.

        Args:
          before: its settings so far.
        """
        metric, notes = self._args.best_metric, []
        compares = self._args.save_best or self._args.early_stopping_patience is not None
        if compares and begins_anew(self._metrics, self._measure, metric):
            kept = "".join(f"; {path}, the best so far, stays" for path in self.best_before)
            notes.append(
                "the evaluations so far were of other held-out rows or with another loss: "
                f"{metric} is compared anew from here{kept}"
            )
        if before.get("save_best") and not self._args.save_best:
            notes.append("save_best is off: the best checkpoint so far is no longer kept")
        return notes

    def _stays(self) -> Collection[int]:
        best = [] if self.best is None else [self.best]
        return [step_of(path) for path in (*best, *self.best_before)]

    def _buffer_bytes(self, state_bytes: int) -> int:
        """What was stated, or what the plan leaves and is free; what a save takes is planned."""
        if self._args.save_buffer is not None:
            return int(self._args.save_buffer * GIB)
        return min(default_buffer_bytes(state_bytes), planned_buffer_bytes(self._plan))


def save_notes(
    args: TrainArguments, plan: Plan, checkpoint_bytes: float, disk_bytes_per_s: float | None
) -> list[str]:
    """A note where saves will hold steps up for long, though they are written beside them.

    Args:
      args: the run's settings.
      plan: of its memory and steps.
      checkpoint_bytes: of one checkpoint.
      disk_bytes_per_s: what the disk was seen to take; None: the usual.
    """
    rate = disk_bytes_per_s or DISK_BYTES_PER_S
    if not args.save_beside or (args.save_steps is None and args.save_minutes is None):
        return []
    if (hosts := plan.chosen.strategy.num_hosts) > 1:
        return [f"steps wait for each save: {hosts} hosts write it together"]
    stated = None if args.save_buffer is None else args.save_buffer * GIB
    buffer_bytes = planned_buffer_bytes(plan) if stated is None else stated
    seconds = stall_s(checkpoint_bytes, buffer_bytes, rate, plan.chosen.time.step_s)
    if seconds < WORTH_A_NOTE_S:
        return []
    return [
        f"each save holds steps up for about {duration(seconds)}: {size_text(checkpoint_bytes)} of "
        f"state pass through {size_text(buffer_bytes)} of host memory to a disk that is taken to "
        f"write {rate / 1e9:.2g} GB/s"
    ]


def planned_buffer_bytes(plan: Plan) -> int:
    """Host memory that a plan leaves for what has been copied and is not written yet."""
    memory = plan.chosen.memory
    others = memory.host_bytes - memory.host["state_in_passing"]
    return int(max(memory.host["state_in_passing"], plan.job.host_budget_bytes - others))


def _state_bytes(trainer: Trainer) -> int:
    return trainer.store.owned_bytes
