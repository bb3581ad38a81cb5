"""One run at a time in an output folder, for as long as its process lives."""

from __future__ import annotations

import fcntl
import os
import pathlib

from slidedp_jax.errors import UserError


class RunLock:
    """An advisory lock of a folder; it leaves no file behind and ends with the process.

    Args:
      folder: the output folder; it need not exist yet.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock where the folder exists, if it is not ours already.

        Raises:
          UserError: another run has it.
        """
        if self._descriptor is not None or not self._folder.is_dir():
            return
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"output_dir {self._folder} is in use by another run; wait for that one to end, or "
                "give another output_dir"
            ) from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            return
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
