"""Room on the disk under a folder, and the error of one that is full."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

from slidedp_jax.planner.hardware import size_text

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_BLOCK_BYTES, _MOST_BYTES, _LONG_ENOUGH_S = 2**25, 2**29, 0.5
"""How a disk's rate is looked at: block by block, until either is reached."""


class DiskFull(OSError):
    """Something did not fit: one line says what, how much it needs and how much is free."""

    def __str__(self) -> str:
        return str(self.strerror)


def nearest_folder(path: pathlib.Path) -> pathlib.Path:
    """The folder itself, or where it does not exist yet the nearest one above that does."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_bytes(path: pathlib.Path) -> int:
    """What this user can still write on the file system of a folder; quotas are not seen."""
    return shutil.disk_usage(nearest_folder(path)).free


def bytes_within(folder: pathlib.Path) -> int:
    """Size of all files in a folder, 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_rate(path: pathlib.Path) -> float | None:
    """Bytes per second that a folder's file system writes, seen for a moment; None: not to be seen.

    What is written is on the disk before the time is taken, and removed.
    """
    block = os.urandom(_BLOCK_BYTES)
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(path), buffering=0) as file:
            start, written, seconds = time.perf_counter(), 0, 0.0
            while written < _MOST_BYTES and seconds < _LONG_ENOUGH_S:
                written += file.write(block)
                os.fdatasync(file.fileno())
                seconds = time.perf_counter() - start
            return written / seconds
    except OSError:  # full, or not for this user
        return None


@contextlib.contextmanager
def writing(path: pathlib.Path, need_bytes: float | None = None) -> Iterator[None]:
    """Within it, errors of the file system name what is written; a full disk says the sizes.

    Args:
      path: what is written; nothing of it may be left when an error comes here.
      need_bytes: what it takes, if that is much.

    Raises:
      DiskFull: there was no room, or a quota was used up.
      OSError: another error, with a path.
    """
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _full(path, need_bytes, error) from None
        if error.errno is not None and path.name not in str(error):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _full(path: pathlib.Path, need_bytes: float | None, error: OSError) -> DiskFull:
    assert error.errno is not None
    needs = "" if need_bytes is None else f"it needs {size_text(need_bytes)}, "
    why = "No space left on device" if error.errno == errno.ENOSPC else "Disk quota exceeded"
    return DiskFull(
        error.errno,
        f"{path} cannot be written: {why}: {needs}{size_text(free_bytes(path.parent))} are free "
        f"in {nearest_folder(path.parent)}",
    )
