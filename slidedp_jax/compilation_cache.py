"""Where compiled programs are kept between runs."""

from __future__ import annotations

import hashlib
import os
import pathlib

AUTO = "auto"


def cache_folder(setting: str | None, platform: str) -> str | None:
    """Folder of JAX's persistent compilation cache, or None to leave JAX's own setting.

    `auto` is a folder in the user's cache (`$XDG_CACHE_HOME` or `~/.cache`) on GPUs, whose programs
    take long to compile, unless `JAX_COMPILATION_CACHE_DIR` names another. Programs of the host's
    CPU are kept there too, so each kind of CPU has a folder of its own: home folders may be shared.
    """
    if setting != AUTO:
        return setting
    if platform == "cpu" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return str(pathlib.Path(root) / "slidedp_jax" / f"compiled-{_kind_of_cpu()}")


def _kind_of_cpu() -> str:
    """Short name of what the CPU can do."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]
