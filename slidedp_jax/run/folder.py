"""The output folder of a run: who owns it, what it was started with, whether to resume."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import pathlib
from typing import Any

from slidedp_jax.checkpoint.retention import list_steps
from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.changes import check_allowed, check_settings
from slidedp_jax.run.lock import RunLock
from slidedp_jax.run.metrics_file import drop_after
from slidedp_jax.run.record import NAME, read_run, write_run
from slidedp_jax.run.replaced import ReplacedRun
from slidedp_jax.run.writable import make_writable, remove_if_empty
from slidedp_jax.whole_files import UNFINISHED, remove_whole

BEGINS_ANEW = "the run in output_dir left no checkpoint: it begins anew"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths of a run and the checkpoint to go on from.

    Attributes:
      root: the output folder.
      resume_from: checkpoint to go on from, if any.
      lock: holds the folder for this run.
      previous: what `record.read_run` gave of the run in the folder that this one continues.
      notes: for the user.
      replaces: the run in the folder is to be replaced.
      made: folders that were made for it, innermost first.
      is_owner: whether this process writes into it; of several hosts, the first one does.
      found_nothing: what the owner has found of `left_nothing`; None: to be looked up.
      begun_at: what the owner takes for `started`; None: to be looked up.
    """

    root: pathlib.Path
    resume_from: pathlib.Path | None
    lock: RunLock
    previous: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    replaces: bool = False
    made: tuple[pathlib.Path, ...] = ()
    is_owner: bool = True
    found_nothing: bool | None = None
    begun_at: datetime.datetime | None = None

    def begun(self, at: datetime.datetime) -> RunFolder:
        """The same, with that for `started`."""
        return dataclasses.replace(self, begun_at=at)

    @property
    def started(self) -> datetime.datetime:
        """When the run was started first, in local time without a zone; now, if this is that."""
        if self.begun_at is not None:
            return self.begun_at
        before = None if self.previous is None else self.previous.get("started")
        return datetime.datetime.fromisoformat(before) if before else datetime.datetime.now()

    @property
    def left_nothing(self) -> bool:
        """The run in the folder ended before it left a checkpoint or an export."""
        if self.found_nothing is not None:
            return self.found_nothing
        return self.resume_from is None and not _exported(self.root)

    @property
    def checkpoints(self) -> pathlib.Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> pathlib.Path:
        """One JSON object per step; who does not own the folder keeps none."""
        return self.root / "metrics.jsonl" if self.is_owner else pathlib.Path(os.devnull)

    @property
    def samples(self) -> pathlib.Path:
        """One JSON object per sample."""
        return self.root / "samples.jsonl"

    @property
    def export(self) -> pathlib.Path:
        """The trained model as a Hugging Face folder."""
        return self.root / "export"

    @property
    def export_ema(self) -> pathlib.Path:
        """The same of the moving average of the weights."""
        return self.root / "export_ema"

    def begin(self, record: dict[str, Any]) -> None:
        """Everything is checked and loaded: store resolved settings, plan and versions.

        A run that is to be replaced is set aside, until `succeeded`.
        """
        if not self.is_owner:
            return
        if self.replaces:
            ReplacedRun(self.root).set_aside()
        write_run(self.root, record)

    def succeeded(self) -> None:
        """The run has left something that lasts; one that it replaces is deleted."""
        if not self.is_owner:
            return
        ReplacedRun(self.root).drop()

    def failed(self) -> bool:
        """The run ends by an error; whether one that it was to replace had to be brought back."""
        if not self.is_owner:
            return False
        old = ReplacedRun(self.root)
        was_aside = old.is_aside
        old.bring_back()
        return was_aside

    def last_checkpoint(self) -> str:
        """Which checkpoint there is to go on from, in words."""
        steps = list_steps(self.checkpoints)
        return f"last checkpoint: {steps[-1] if steps else 'none'}"

    def abandon(self) -> None:
        """The process ends at once: leave what the next start would find."""
        if not self.is_owner:
            return
        self.failed()
        _remove_leftovers(self.root)
        self.close()

    def close(self) -> None:
        """Let others have the folder; one that was made and holds nothing goes."""
        remove_if_empty(self.made)
        self.lock.release()

    def drop_metrics_after(self, step: int) -> None:
        """Forget logged steps that the resumed run will take again, and their samples."""
        if self.is_owner:
            drop_after(self.metrics, step)
            drop_after(self.samples, step)


def open_run_folder(args: TrainArguments) -> RunFolder:
    """Decide between a fresh run and resuming; deletes nothing but leftovers of runs cut short.

    The folder is made and stays locked until it is closed; a dry run only tries that, and leaves
    nothing.

    Raises:
      UserError: the folder cannot be written, or holds something else, a run with other settings
        or a running one.
    """
    check_allowed(args)
    root = pathlib.Path(args.output_dir)
    # With `hardware` it is another machine's.
    made = make_writable(root) if args.hardware is None else ()
    lock = RunLock(root)
    try:
        if args.dry_run:
            remove_if_empty(made)
            return _opened(args, root, lock)
        lock.acquire()
        _tidy(root)
        return dataclasses.replace(_opened(args, root, lock), made=made)
    except BaseException:
        remove_if_empty(made)
        lock.release()
        raise


def _tidy(root: pathlib.Path) -> None:
    """Bring a folder in order whose last run was killed in the middle of something."""
    begun = (root / NAME).is_file() and bool(list_steps(root / "checkpoints"))
    ReplacedRun(root).settle(replaced=begun)
    _remove_leftovers(root)


def _exported(root: pathlib.Path) -> bool:
    return any((root / name).is_dir() for name in ("export", "export_ema"))


def _remove_leftovers(root: pathlib.Path) -> None:
    """What was being written or removed when a process ended, or is written until it ends."""
    leftovers = [folder.glob(f".*{UNFINISHED}") for folder in (root, root / "checkpoints")]
    for path in list(itertools.chain(*leftovers)):
        if path.is_dir():
            remove_whole(path)  # a save that goes on must not give it a name when half is gone
        else:
            path.unlink(missing_ok=True)


def _opened(args: TrainArguments, root: pathlib.Path, lock: RunLock) -> RunFolder:
    steps = list_steps(root / "checkpoints")
    newest = steps[-1] if steps else None
    used = root.is_dir() and any(root.iterdir())
    if not used:
        return RunFolder(root=root, resume_from=None, lock=lock)
    if args.overwrite_output_dir and ((root / NAME).is_file() or newest is not None):
        return RunFolder(root=root, resume_from=None, lock=lock, replaces=True)
    previous, notes = read_run(root, newest)
    if previous is not None:
        by_content = newest is not None or previous["fingerprints"] is not None
        try:
            notes += check_settings(args, previous["arguments"], root, by_content=by_content)
        except UserError:
            if newest is not None or _exported(root):
                raise
            previous = None
            notes.append(f"{BEGINS_ANEW}, with other settings than before")
    return RunFolder(
        root=root, resume_from=newest, lock=lock, previous=previous, notes=tuple(notes)
    )
