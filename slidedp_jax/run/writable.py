"""Whether an output folder can be written, found by writing to it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Sequence

from slidedp_jax.errors import UserError
from slidedp_jax.whole_files import UNFINISHED


def make_writable(root: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Make an output folder if it is not there, and write to it.

    Returns:
      The folders that were made, innermost first.

    Raises:
      UserError: it cannot be made or written; nothing is left.
    """
    if root.exists() and not root.is_dir():
        raise UserError(f"output_dir {root} is a file; give a folder")
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".written.", suffix=UNFINISHED, dir=root)
        try:
            os.write(descriptor, b"x" * 512)
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        remove_if_empty(missing)
        raise UserError(
            f"output_dir {root} cannot be written: {error.strerror}; give a folder on a disk with "
            "room, in which this user may write"
        ) from None
    return tuple(missing)


def remove_if_empty(folders: Sequence[pathlib.Path]) -> None:
    """Remove those of these folders, innermost first, in which there is nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
