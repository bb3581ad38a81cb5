"""What a run will write to its output folder, against what is free there."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from slidedp_jax.checkpoint.retention import Retention, list_steps, step_of
from slidedp_jax.disk_room import bytes_within, free_bytes, nearest_folder, write_rate
from slidedp_jax.errors import UserError
from slidedp_jax.planner.disk import DISK_BYTES_PER_S, DiskUse, disk_use
from slidedp_jax.planner.hardware import GIB, size_text
from slidedp_jax.planner.search import Plan
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.folder import RunFolder
from slidedp_jax.run.replaced import FOLDERS
from slidedp_jax.run.time_text import duration
from slidedp_jax.wording import counted

LARGE_BYTES = GIB
"""What takes long enough to write to be told, and to look at the disk's rate for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDisk:
    """Sizes in bytes, as far as they can be told beforehand: weights and optimizer state.

    Attributes:
      root: the output folder; it may not exist yet.
      use: one checkpoint, the export, and how many checkpoints there are at once.
      saves: steps that end in a save.
      kept: steps of the complete checkpoints that are there now.
      limit: how many of the newest stay after a save.
      every: those of its multiples stay as well; None: none.
      best: one more may stay for its held-out loss.
      replaced_bytes: of a run that is there until the first save.
      free_bytes: on the file system of the output folder; None where it is not this machine's.
      bytes_per_s: that it writes; None where that was not looked at.
    """

    root: pathlib.Path
    use: DiskUse
    saves: tuple[int, ...]
    kept: tuple[int, ...]
    limit: int
    every: int | None
    best: bool
    replaced_bytes: int
    free_bytes: int | None
    bytes_per_s: float | None = None

    @property
    def saving(self) -> str | None:
        """How long the disk takes for all saves and the export; None: not worth a word."""
        use = self.use
        one = use.checkpoint_bytes if self.saves else use.export_bytes
        if one < LARGE_BYTES:
            return None
        rate = self.bytes_per_s or DISK_BYTES_PER_S
        seconds = (len(self.saves) * use.checkpoint_bytes + use.export_bytes) / rate
        saves = f"{counted(len(self.saves), 'save')} of {size_text(use.checkpoint_bytes)}"
        what = [saves] * bool(self.saves) + ["the export"] * bool(use.export_bytes)
        known = "measured just now" if self.bytes_per_s else "assumed"
        return (
            f"the disk takes {duration(seconds)} for {' and '.join(what)} "
            f"({rate / 1e9:.2g} GB/s, {known})"
        )

    def __str__(self) -> str:
        number, use = self.use.num_checkpoints, self.use
        written = ""
        if number > 1 and self.saves:
            written = f" ({number - 1} kept, one being written)"
        checkpoints = "checkpoint" if number == 1 else "checkpoints"
        parts = [f"{number} {checkpoints} of {size_text(use.checkpoint_bytes)}{written}"]
        if not number:
            parts = []
        if use.export_bytes:
            parts.append(f"{size_text(use.export_bytes)} of export")
        if not parts:
            return "disk: nothing is saved or exported"
        free = ""
        if self.free_bytes is not None:
            free = f"; {size_text(self.free_bytes)} free in {nearest_folder(self.root)}"
        return f"disk: {size_text(use.total_bytes)} at most: {' and '.join(parts)}{free}"

    def record(self) -> dict[str, Any]:
        """For `run.json`."""
        return {
            "checkpoint_bytes": self.use.checkpoint_bytes,
            "most_checkpoints": self.use.num_checkpoints,
            "export_bytes": self.use.export_bytes,
            "free_bytes": self.free_bytes,
            "bytes_per_s": self.bytes_per_s,
        }

    def check(self) -> list[str]:
        """Notes for the user.

        Raises:
          UserError: there is no room for one checkpoint and the export.
        """
        if self.free_bytes is None:
            return []
        least = self._peak(self.saves[-1:], limit=1)
        if least > self.free_bytes:
            what = " and ".join(
                [f"a checkpoint of {size_text(self.use.checkpoint_bytes)}"] * bool(self.saves)
                + [f"{size_text(self.use.export_bytes)} of export"] * bool(self.use.export_bytes)
            )
            raise UserError(
                f"output_dir {self.root} has no room for {what}: at least {size_text(least)} more "
                f"are needed, {size_text(self.free_bytes)} are free in "
                f"{nearest_folder(self.root)}. Make room, or give an output_dir on another disk"
            )
        if self._peak(self.saves, limit=self.limit) <= self.free_bytes:
            return []
        _, *peaks = self._peaks(self.saves, limit=self.limit)
        pairs = zip(self.saves, peaks, strict=True)
        first = next(step for step, peak in pairs if peak > self.free_bytes)
        return [
            f"save_total_limit {self.limit} needs "
            f"{size_text(self._peak(self.saves, limit=self.limit))} more on the disk, "
            f"{size_text(self.free_bytes)} are free in {nearest_folder(self.root)}: the run will "
            f"stop at the save of step {first} or soon after, unless there is more by then; "
            f"{self._advice()}"
        ]

    def _advice(self) -> str:
        assert self.free_bytes is not None
        for limit in range(self.limit - 1, 0, -1):
            if self._peak(self.saves, limit=limit) <= self.free_bytes:
                return f"--save_total_limit {limit} fits"
        return "--save_steps null, which saves at the end only, fits"

    def _peak(self, saves: tuple[int, ...], *, limit: int) -> float:
        """Most bytes beside what is there now; a new checkpoint is whole before an old one goes."""
        *_, peak = self._peaks(saves, limit=limit)
        return peak

    def _peaks(self, saves: tuple[int, ...], *, limit: int) -> Iterator[float]:
        """If the run ended after none, the first, the second of these saves."""
        one, before = self.use.checkpoint_bytes, len(self.kept)
        peak, export = 0.0, self.use.export_bytes
        yield export
        retention = Retention(last=limit, every=self.every)
        replaced = 0
        for now, most in numbers(self.kept, saves, retention, best=self.best):
            peak = max(peak, (most - before) * one - replaced)
            replaced = self.replaced_bytes
            yield max(peak, (now - before) * one - replaced + export)


def numbers(
    kept: Iterable[int], saves: Iterable[int], retention: Retention, *, best: bool
) -> Iterator[tuple[int, int]]:
    """Per save, how many checkpoints stay after it and how many are there at most.

    Args:
      kept: steps of those that are there.
      saves: steps at which one is written.
      retention: which stay.
      best: one more may.
    """
    there = set(kept)
    for step in saves:
        there.add(step)
        most = len(there)
        left = retention.kept(there)
        if best and (others := there - left):
            left.add(min(others))
        there = left
        yield len(there), most


def disk_of_run(
    args: TrainArguments, folder: RunFolder, plan: Plan, *, num_steps: int, first_step: int
) -> RunDisk:
    """What is left of a run needs.

    Args:
      args: its settings.
      folder: its output folder.
      plan: of its memory, which knows parameters and optimizer state.
      num_steps: steps in all.
      first_step: steps that are done.
    """
    saves = _saves(args, num_steps=num_steps, first_step=first_step)
    kept = () if folder.replaces else tuple(map(step_of, list_steps(folder.checkpoints)))
    retention = Retention(last=args.save_total_limit, every=args.save_keep_every)
    exported = first_step >= num_steps and folder.export.is_dir()
    workload = plan.job.workload
    use = disk_use(
        workload.num_parameters,
        plan.job.optimizer_state_bytes * workload.num_trained / workload.num_parameters,
        save_total_limit=args.save_total_limit,
        export_dtype=args.export_dtype,
        averaged=args.ema_decay is not None,
    )
    large = max(use.checkpoint_bytes, use.export_bytes) >= LARGE_BYTES
    at_saves = [most for _, most in numbers(kept, saves, retention, best=args.save_best)]
    most = max([len(kept), *at_saves])
    return RunDisk(
        root=folder.root,
        use=dataclasses.replace(
            use,
            num_checkpoints=most,
            export_bytes=use.export_bytes if args.export and not exported else 0.0,
        ),
        saves=saves,
        kept=kept,
        limit=args.save_total_limit,
        every=args.save_keep_every,
        best=args.save_best,
        replaced_bytes=sum(bytes_within(folder.root / name) for name in FOLDERS)
        if folder.replaces
        else 0,
        free_bytes=None if args.hardware is not None else free_bytes(folder.root),
        bytes_per_s=write_rate(folder.root) if large and args.hardware is None else None,
    )


def _saves(args: TrainArguments, *, num_steps: int, first_step: int) -> tuple[int, ...]:
    """Steps that end in a save; of those by the clock as many as may be there at once."""
    steps: set[int] = set()
    for every in (args.save_steps, args.save_keep_every if args.save_minutes else None):
        if every is not None:
            steps |= set(range((first_step // every + 1) * every, num_steps + 1, every))
    if args.save_minutes is not None:
        steps |= set(range(first_step + 1, num_steps + 1)[: args.save_total_limit + 2])
    if args.save_at_end and num_steps > first_step:
        steps.add(num_steps)
    return tuple(sorted(steps))
