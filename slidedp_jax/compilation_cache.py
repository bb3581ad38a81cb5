"""Where compiled programs are kept between runs."""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib

_LOG = logging.getLogger(__name__)

AUTO = "auto"


def cache_folder(setting: str | None, platform: str) -> str | None:
    """Folder of JAX's persistent compilation cache, or None to leave JAX's own setting.

    `auto` is a folder in the user's cache (`$XDG_CACHE_HOME` or `~/.cache`) on GPUs, whose programs
    take long to compile, unless `JAX_COMPILATION_CACHE_DIR` names another. Programs of the host's
    CPU are kept there too, so each kind of CPU has a folder of its own: home folders may be shared.

    Raises:
      ValueError: a named folder cannot be made or written.
    """
    if setting != AUTO:
        return setting if setting is None else _made(pathlib.Path(setting))
    if platform == "cpu" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    try:
        return _made(pathlib.Path(root) / "slidedp_jax" / f"compiled-{_kind_of_cpu()}")
    except ValueError as error:
        _LOG.warning("compiled programs are not kept for the next run: %s", error)
        return None


def _made(folder: pathlib.Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compilation_cache {folder} cannot be used ({error.strerror}); give a folder that can "
            "be written, or null for none"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"compilation_cache {folder} cannot be written; give another, or null")
    return str(folder)


def _kind_of_cpu() -> str:
    """Short name of what the CPU can do."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]
