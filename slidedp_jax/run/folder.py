"""The output folder of a run: who owns it, what it was started with, whether to resume."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from slidedp_jax.checkpoint.save_restore import list_steps
from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.lock import RunLock
from slidedp_jax.run.record import NAME, read_run, write_run
from slidedp_jax.run.replaced import ReplacedRun
from slidedp_jax.whole_files import UNFINISHED, write_whole

_MAY_CHANGE = frozenset(
    {
        "output_dir",
        "overwrite_output_dir",
        "max_steps",
        "num_train_epochs",
        "num_devices",
        "devices",
        "platform",
        "num_host_devices",
        "device_memory_budget",
        "keep_activations",
        "resident_state",
        "host_memory_budget",
        "compilation_cache",
        "layers_per_chunk",
        "rows_per_microbatch",
        "loss_chunk_tokens",
        "weight_route",
        "gradient_route",
        "hardware",
        "dry_run",
        "attention",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "save_steps",
        "save_at_end",
        "save_total_limit",
        "eval_steps",
        "validation_file",
        "logging_steps",
        "disable_tqdm",
        "verbose",
        "export",
        "export_dtype",
        "export_rounding",
        "weight_rounding",
        "sample_prompts",
        "sample_max_new_tokens",
        "on_nonfinite",
        "max_loss",
        "max_consecutive_skips",
        "plan_from",
    }
)
"""Settings that a resumed run may have otherwise than the run that it continues."""


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
    """

    root: pathlib.Path
    resume_from: pathlib.Path | None
    lock: RunLock
    previous: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    replaces: bool = False

    @property
    def checkpoints(self) -> pathlib.Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> pathlib.Path:
        """One JSON object per step."""
        return self.root / "metrics.jsonl"

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
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock.acquire()
        if self.replaces:
            ReplacedRun(self.root).set_aside()
        write_run(self.root, record)

    def succeeded(self) -> None:
        """The run has left something that lasts; one that it replaces is deleted."""
        ReplacedRun(self.root).drop()

    def failed(self) -> bool:
        """The run ends by an error; whether one that it was to replace had to be brought back."""
        old = ReplacedRun(self.root)
        was_aside = old.is_aside
        old.bring_back()
        return was_aside

    def drop_metrics_after(self, step: int) -> None:
        """Forget logged steps that the resumed run will take again."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_bytes().decode(errors="replace").splitlines()
        steps = [(_step_of(line), line) for line in lines]
        kept = [line + "\n" for of_line, line in steps if of_line is not None and of_line <= step]
        write_whole(self.metrics, "".join(kept))


def open_run_folder(args: TrainArguments) -> RunFolder:
    """Decide between a fresh run and resuming; deletes nothing but leftovers of runs cut short.

    The folder stays locked until the lock is released; a dry run takes no lock.

    Raises:
      UserError: the folder holds something else, a run with other settings or a running one.
    """
    root = pathlib.Path(args.output_dir)
    lock = RunLock(root)
    if not args.dry_run:
        lock.acquire()
    try:
        if not args.dry_run:
            _tidy(root)
        return _opened(args, root, lock)
    except BaseException:
        lock.release()
        raise


def _tidy(root: pathlib.Path) -> None:
    """Bring a folder in order whose last run was killed in the middle of something."""
    begun = (root / NAME).is_file() and bool(list_steps(root / "checkpoints"))
    ReplacedRun(root).settle(replaced=begun)
    for path in root.glob(f".*{UNFINISHED}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _opened(args: TrainArguments, root: pathlib.Path, lock: RunLock) -> RunFolder:
    if root.exists() and not root.is_dir():
        raise UserError(f"output_dir {root} is a file; give a folder")
    steps = list_steps(root / "checkpoints")
    newest = steps[-1] if steps else None
    used = root.is_dir() and any(root.iterdir())
    if not used:
        return RunFolder(root=root, resume_from=None, lock=lock)
    if args.overwrite_output_dir and ((root / NAME).is_file() or newest is not None):
        return RunFolder(root=root, resume_from=None, lock=lock, replaces=True)
    previous, notes = read_run(root, newest)
    if previous is not None:
        _check_same_settings(args, previous["arguments"], root)
    return RunFolder(
        root=root, resume_from=newest, lock=lock, previous=previous, notes=tuple(notes)
    )


def _check_same_settings(
    args: TrainArguments, before: Mapping[str, Any], root: pathlib.Path
) -> None:
    now = dataclasses.asdict(args)
    differing = [
        f"{name} was {before[name]!r}, now {now[name]!r}"
        for name in now
        if name not in _MAY_CHANGE and name in before and before[name] != now[name]
    ]
    if differing:
        raise UserError(
            f"output_dir {root} holds a run with other settings: {'; '.join(differing)}. Use the "
            "same settings to resume it, another output_dir, or --overwrite_output_dir"
        )


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
