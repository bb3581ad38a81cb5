"""A run that another one is to replace: kept aside until the new one has something to show.

`--overwrite_output_dir` deletes nothing before the new run has saved a checkpoint or ended. If that
never happens, by an error or a kill at any moment, the old run is brought back as it was.
"""

from __future__ import annotations

import pathlib
import shutil

from slidedp_jax.whole_files import remove_whole, sync_folder

FILES = ("run.json", "metrics.jsonl", "samples.jsonl", "report.html")
FOLDERS = ("checkpoints", "export", "export_ema", "profile", "tensorboard")


class ReplacedRun:
    """The old run of an output folder.

    Args:
      root: the output folder.
    """

    def __init__(self, root: pathlib.Path):
        self._root = root
        self._aside = root / ".replaced_run"
        self._complete = self._aside / "set_aside"

    @property
    def is_aside(self) -> bool:
        """Whether there is one."""
        return self._aside.is_dir()

    def set_aside(self) -> None:
        """Move the run that is there out of the way; nothing is copied or deleted."""
        self._aside.mkdir()
        for name in (*FILES, *FOLDERS):
            if (self._root / name).exists():
                (self._root / name).rename(self._aside / name)
        # From here on, what the folder holds is the new run's.
        self._complete.touch()
        sync_folder(self._aside)

    def bring_back(self) -> None:
        """Undo `set_aside`, however far it came; what the new run has left is removed."""
        if not self.is_aside:
            return
        if self._complete.exists():
            for name in FILES:
                (self._root / name).unlink(missing_ok=True)
            for name in FOLDERS:
                shutil.rmtree(self._root / name, ignore_errors=True)
            # Removed before the first one comes back: a second try must not take that for new.
            self._complete.unlink()
        for path in list(self._aside.iterdir()):
            if path.is_dir():  # a save that goes on may have made the new one again
                remove_whole(self._root / path.name)
            path.rename(self._root / path.name)
        self._aside.rmdir()

    def drop(self) -> None:
        """Delete it: the new run has taken its place."""
        if self._complete.exists():
            remove_whole(self._aside)

    def settle(self, *, replaced: bool) -> None:
        """After a process that was killed: end what it had begun.

        Args:
          replaced: whether the new run has left something that lasts.
        """
        if replaced:
            self.drop()
        self.bring_back()
