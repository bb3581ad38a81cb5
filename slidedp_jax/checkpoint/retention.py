"""Which checkpoints of a run stay when a new one is there."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slidedp_jax.checkpoint.record import RECORD
from slidedp_jax.whole_files import UNFINISHED, remove_whole

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What stays.

    Attributes:
      last: so many of the newest.
      every: those of its multiples, for good; None: none.
    """

    last: int
    every: int | None = None

    def kept(self, steps: Iterable[int], best: Collection[int] = ()) -> set[int]:
        """Of these steps, those whose checkpoints stay; `best`: steps that must."""
        ordered = sorted(steps)
        kept = set(ordered[-self.last :]) | set(best)
        if self.every is not None:
            kept |= {step for step in ordered if step % self.every == 0}
        return kept & set(ordered)

    def apply(self, folder: pathlib.Path, best: Collection[int] = ()) -> list[OSError]:
        """Delete the other complete checkpoints of a run, and leftovers of saves.

        No save may be under way.

        Returns:
          Why some are still there; the next call tries again.
        """
        steps = {step_of(path): path for path in list_steps(folder)}
        kept = self.kept(steps, best)
        errors = []
        for step, path in steps.items():
            if step not in kept:
                try:
                    remove_whole(path)
                except OSError as error:
                    errors.append(error)
        for path in list(folder.glob(f".step_*{UNFINISHED}")):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                errors.append(error)
        return errors


def list_steps(folder: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints of a run, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / RECORD).is_file()]


def step_of(checkpoint: pathlib.Path) -> int:
    """The step in the name of a checkpoint's folder."""
    found = _STEP.fullmatch(checkpoint.name)
    assert found is not None, checkpoint
    return int(found[1])


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Whether a folder is a checkpoint, whole or not, rather than one that holds some."""
    return (folder / RECORD).is_file() or _STEP.fullmatch(folder.name) is not None
