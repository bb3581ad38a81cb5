"""How much host memory this process may still take, and what sets the limit.

The machine's memory is one bound; every control group between the process and the root is another
(kernel documentation, admin-guide/cgroup-v2 "Memory Interface Files" and cgroup-v1/memory). A
process that takes more than the tightest is killed without a message, so the smallest remainder
counts: per bound, limit minus current use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slidedp_jax.planner.hardware import GIB

NO_LIMIT_BYTES = 2**60
"""Limits from here on mean "none": v1 says 2**63 rounded down to a page, containers vary."""


@dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """One limit on host memory.

    Attributes:
      name: `physical memory`, or the control group's directory.
      limit_bytes: what may be used in total.
      used_bytes: what is used already and cannot be reclaimed.
    """

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """What is left."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory left for the job.

    Attributes:
      bounds: every limit found, the tightest first.
    """

    bounds: tuple[MemoryBound, ...]

    @property
    def binding(self) -> MemoryBound:
        """The bound that leaves least."""
        return self.bounds[0]

    @property
    def available_bytes(self) -> int:
        """What the tightest bound leaves."""
        return self.binding.available_bytes

    def describe(self) -> str:
        """One line: what is left and which bound says so."""
        bound = self.binding
        return (
            f"{bound.available_bytes / GIB:.1f} GiB available, bound by {bound.name} "
            f"({bound.limit_bytes / GIB:.1f} GiB, {bound.used_bytes / GIB:.1f} GiB in use)"
        )


def available_host_memory(
    root: Path | str = "/", *, stated_bytes: float | None = None
) -> HostMemory:
    """Reads the machine's memory and all control-group limits above this process.

    Args:
      root: where the file system that describes this process is mounted; tests pass a fake tree.
      stated_bytes: what can be had of the machine's memory, where the kernel reports less (some
        virtual machines report little and grow as it is used). Control groups still apply.

    Raises:
      RuntimeError: `proc/meminfo` is missing or unreadable and nothing was stated.
    """
    root = Path(root)
    bounds = [_physical(root, stated_bytes), *_cgroup_v2(root), *_cgroup_v1(root)]
    return HostMemory(bounds=tuple(sorted(bounds, key=lambda bound: bound.available_bytes)))


def _physical(root: Path, stated_bytes: float | None) -> MemoryBound:
    path = root / "proc/meminfo"
    stated = int(stated_bytes or 0)
    as_stated = MemoryBound(name="physical memory as stated", limit_bytes=stated, used_bytes=0)
    try:
        lines = path.read_text().splitlines()
        fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in _partitioned(lines)}
        total, used = fields["MemTotal"], fields["MemTotal"] - fields["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError) as error:
        if stated:
            return as_stated
        raise RuntimeError(
            f"cannot read MemTotal and MemAvailable from {path}: {error!r}; state the host "
            "memory explicitly."
        ) from error
    found = MemoryBound(name="physical memory", limit_bytes=total, used_bytes=used)
    return as_stated if stated > found.available_bytes else found


def _partitioned(lines: list[str]) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in lines if ":" in line]


def _process_groups(root: Path) -> dict[str, str]:
    """Controller list (`""` for v2) -> path of this process's group in that hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split(":", 2) for line in lines]
    return {part[1]: part[2] for part in parts if len(part) == 3}


def _ancestors(mount: Path, group: str) -> list[Path]:
    """Directories of `group` and its ancestors under `mount`, as far as they can be seen.

    Inside a container the path may name a group outside the visible tree; what is visible is then
    the container's own group, mounted at `mount`.
    """
    pure = PurePosixPath("/") / group.lstrip("/")
    relative = [path.relative_to("/") for path in (pure, *pure.parents)]
    return [mount / path for path in relative if (mount / path).is_dir()]


def _cgroup_v2(root: Path) -> list[MemoryBound]:
    group = _process_groups(root).get("", "/")
    base = root / "sys/fs/cgroup"
    # Hybrid set-ups mount v2 beside v1.
    mount = base / "unified" if (base / "unified").is_dir() else base
    return [
        bound
        for directory in _ancestors(mount, group)
        if (bound := _group_bound(root, directory, "memory.max", "memory.current", "inactive_file"))
    ]


def _cgroup_v1(root: Path) -> list[MemoryBound]:
    groups = _process_groups(root)
    group = next((path for names, path in groups.items() if "memory" in names.split(",")), "/")
    return [
        bound
        for directory in _ancestors(root / "sys/fs/cgroup/memory", group)
        if (
            bound := _group_bound(
                root,
                directory,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        )
    ]


def _group_bound(
    root: Path, directory: Path, limit_file: str, usage_file: str, reclaimable: str
) -> MemoryBound | None:
    """The limit of one group, or None where it has none."""
    limit_path = directory / limit_file
    if not limit_path.is_file():
        return None
    text = limit_path.read_text().strip()
    if text == "max" or int(text) >= NO_LIMIT_BYTES:
        return None
    usage = int((directory / usage_file).read_text())
    return MemoryBound(
        name=f"control group /{directory.relative_to(root)}",
        limit_bytes=int(text),
        used_bytes=max(0, usage - _stat(directory / "memory.stat", reclaimable)),
    )


def _stat(path: Path, key: str) -> int:
    """One counter of a `memory.stat`; 0 where the file or the key is missing."""
    if not path.is_file():
        return 0
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
