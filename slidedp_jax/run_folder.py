"""The output folder of a run: who owns it, what it was started with, whether to resume."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

from slidedp_jax.arguments import TrainArguments
from slidedp_jax.checkpoint import list_steps
from slidedp_jax.errors import UserError
from slidedp_jax.run_lock import RunLock

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
        "export",
        "export_dtype",
        "sample_prompts",
        "sample_max_new_tokens",
        "on_nonfinite",
        "max_loss",
        "max_consecutive_skips",
    }
)
"""Settings that a resumed run may have otherwise than the run that it continues."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths of a run and the checkpoint to go on from."""

    root: pathlib.Path
    resume_from: pathlib.Path | None
    lock: RunLock

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

    def write_record(self, record: dict[str, Any]) -> None:
        """Store resolved settings, plan and versions."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock.acquire()
        (self.root / "run.json").write_text(json.dumps(record, indent=1, default=str))

    def drop_metrics_after(self, step: int) -> None:
        """Forget logged steps that the resumed run will take again."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text().splitlines()
        kept = [line for line in lines if _step_of(line) is not None and _step_of(line) <= step]
        self.metrics.write_text("".join(line + "\n" for line in kept))


def open_run_folder(args: TrainArguments) -> RunFolder:
    """Decide between a fresh run and resuming; touches nothing unless told to overwrite.

    The folder stays locked until the lock is released; a dry run takes no lock.

    Raises:
      UserError: the folder holds something else, a run with other settings or a running one.
    """
    root = pathlib.Path(args.output_dir)
    lock = RunLock(root)
    if not args.dry_run:
        lock.acquire()
    try:
        return RunFolder(root=root, resume_from=_newest_to_resume(args, root), lock=lock)
    except BaseException:
        lock.release()
        raise


def _newest_to_resume(args: TrainArguments, root: pathlib.Path) -> pathlib.Path | None:
    if root.exists() and not root.is_dir():
        raise UserError(f"output_dir {root} is a file; give a folder")
    used = root.is_dir() and any(root.iterdir())
    record = root / "run.json"
    if used and not record.is_file():
        raise UserError(
            f"output_dir {root} holds files but no run of slidedp_jax; give an empty or new folder"
        )
    if used and args.overwrite_output_dir and not args.dry_run:
        for name in ("checkpoints", "export", "export_ema"):
            shutil.rmtree(root / name, ignore_errors=True)
        for name in ("metrics.jsonl", "run.json"):
            (root / name).unlink(missing_ok=True)
        used = False
    if not used or args.overwrite_output_dir:
        return None
    _check_same_settings(args, json.loads(record.read_text()), root)
    steps = list_steps(root / "checkpoints")
    return steps[-1] if steps else None


def _check_same_settings(args: TrainArguments, record: dict[str, Any], root: pathlib.Path) -> None:
    before, now = record["arguments"], dataclasses.asdict(args)
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
