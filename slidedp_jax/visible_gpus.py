"""How many GPUs CUDA will show this process, told without starting CUDA.

Starting it would fix what `CUDA_VISIBLE_DEVICES` says for good, and break processes that fork.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def num_gpus(root: Path | str = "/") -> int:
    """GPUs of the machine or container, by their device files; 0 also where those are unknown."""
    return sum(1 for _ in Path(root).glob("dev/nvidia[0-9]*"))


def num_visible(root: Path | str = "/") -> int | None:
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves; None: it is not set, and no GPU is to be seen.

    Without device files (as under WSL) every index and name is taken to exist.
    """
    setting, count = os.environ.get(VARIABLE), num_gpus(root)
    if setting is None:
        return count or None
    return count_visible(setting, count or None, _uuids(Path(root)))


def count_visible(setting: str, num_gpus: int | None, uuids: Sequence[str]) -> int:
    """Entries of `CUDA_VISIBLE_DEVICES` that CUDA heeds.

    The rules are those of CUDA's programming guide and of its driver: the list ends at the first
    entry that is no GPU (an index out of range, -1, an unknown name, nothing at all), and a GPU
    that is named twice leaves none. Names are the beginnings of UUIDs, if only one GPU's begins so.
    The first entry decides whether the list is one of indices, of GPUs' names or of MIG instances,
    of which CUDA shows a process only one.

    Args:
      setting: the variable's value.
      num_gpus: GPUs that there are; None: unknown, all that is named exists.
      uuids: of those, `GPU-...`; none: unknown.
    """
    entries = [entry.strip() for entry in setting.split(",")]
    if entries[0].startswith("MIG-"):
        return 1
    found: list[object] = []
    for entry in entries:
        named = entries[0].startswith("GPU-")
        gpu = _by_name(entry, uuids) if named else _by_index(entry, num_gpus)
        if gpu is None:
            break
        if gpu in found:
            return 0
        found.append(gpu)
    return len(found)


def _by_index(entry: str, num_gpus: int | None) -> int | None:
    """As C reads numbers: what follows the digits is not looked at."""
    digits = re.match(r"\+?(\d+)", entry)
    if digits is None:
        return None
    index = int(digits[1])
    return index if num_gpus is None or index < num_gpus else None


def _by_name(entry: str, uuids: Sequence[str]) -> str | None:
    if not entry.startswith("GPU-"):
        return None
    if not uuids:
        return entry
    fitting = [uuid for uuid in uuids if uuid.lower().startswith(entry.lower())]
    return fitting[0] if len(fitting) == 1 else None


def _uuids(root: Path) -> list[str]:
    """Of all GPUs that the driver lists here; none where it lists none."""
    found = []
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        try:
            found += re.findall(r"GPU UUID:\s*(GPU-\S+)", path.read_text())
        except OSError:
            return []
    return found
