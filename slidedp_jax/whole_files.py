"""Files and folders that are there whole or not at all, whenever a process or a disk ends."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import tempfile

UNFINISHED = ".partial"
"""Ends the names of what is being written or removed; they begin with a dot."""

_REMOVED = f".removed{UNFINISHED}"

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What network file systems say that sync no folders."""


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replace a file in one instant: until then the old one stays, byte for byte.

    Raises:
      OSError: the file system refuses; the message names `path`.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        pathlib.Path(name).chmod(0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    sync_folder(path.parent)


def write_new(path: pathlib.Path, text: str) -> None:
    """Write a file that is not there yet, and wait until it is on the disk.

    Raises:
      OSError: the file system refuses; the message names `path`.
    """
    try:
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def remove_whole(folder: pathlib.Path) -> None:
    """Remove a folder so that what is left of it after a cut has another, hidden name."""
    hidden = folder
    if not folder.name.endswith(_REMOVED):
        hidden = folder.with_name(f".{folder.name}{_REMOVED}")
        shutil.rmtree(hidden, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(folder: pathlib.Path) -> None:
    """Force the names in a folder to disk, where the file system and the folder's mode allow it.

    Raises:
      OSError: the disk fails or is full; the message names the folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written, but not listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
