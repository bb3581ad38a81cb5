"""Limits are read from fake /proc and /sys trees."""

from pathlib import Path

import pytest

from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.host_memory import available_host_memory


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _meminfo(total_gib: int, available_gib: int) -> str:
    kib = GIB // 1024
    return (
        f"MemTotal: {total_gib * kib} kB\nMemFree: 1 kB\nMemAvailable: {available_gib * kib} kB\n"
    )


def test_no_groups(tmp_path):
    memory = available_host_memory(_tree(tmp_path, {"proc/meminfo": _meminfo(64, 60)}))
    assert memory.available_bytes == 60 * GIB
    assert memory.binding.name == "physical memory"
    assert "60.0 GiB available, bound by physical memory (64.0 GiB, 4.0 GiB in use)" in (
        memory.describe()
    )


def test_v2_limit_in_a_parent_less_its_use(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/meminfo": _meminfo(64, 60),
            "proc/self/cgroup": "0::/pod/job/step\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/pod/job/memory.max": "max\n",
            "sys/fs/cgroup/pod/job/memory.current": "0\n",
            "sys/fs/cgroup/pod/job/step/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/pod/job/step/memory.current": "0\n",
        },
    )
    memory = available_host_memory(root)
    assert memory.available_bytes == 7 * GIB  # 8 - (3 - 2 reclaimable)
    assert memory.binding.name == "control group /sys/fs/cgroup/pod"
    assert len(memory.bounds) == 3


def test_the_bound_that_leaves_least_wins_not_the_smallest_limit(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/meminfo": _meminfo(64, 60),
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": f"{32 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{30 * GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
        },
    )
    assert available_host_memory(root).available_bytes == 2 * GIB


def test_group_outside_the_container_falls_back_to_what_is_mounted(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/meminfo": _meminfo(64, 60),
            "proc/self/cgroup": "0::/kubepods/not/visible/here\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert available_host_memory(root).available_bytes == 4 * GIB


def test_v1_no_limit_constant_is_ignored_and_a_nested_limit_found(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/meminfo": _meminfo(64, 60),
            "proc/self/cgroup": "9:cpu,memory:/box/inner\n3:cpuset:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "123\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{16 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/box/inner/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/inner/memory.usage_in_bytes": "0\n",
        },
    )
    memory = available_host_memory(root)
    assert memory.available_bytes == 16 * GIB
    assert memory.binding.name == "control group /sys/fs/cgroup/memory/box"


def test_stated_memory_replaces_what_the_kernel_reports_but_not_a_group(tmp_path):
    files = {"proc/meminfo": _meminfo(4, 3), "proc/self/cgroup": "0::/\n"}
    root = _tree(tmp_path, files)
    assert available_host_memory(root, stated_bytes=128 * GIB).available_bytes == 128 * GIB
    # Less than there is changes nothing: it is what may be used, not what there is.
    assert available_host_memory(root, stated_bytes=GIB) == available_host_memory(root)
    _tree(
        root,
        {
            "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert available_host_memory(root, stated_bytes=128 * GIB).available_bytes == 16 * GIB


def test_unreadable_machine_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match="state the host memory explicitly"):
        available_host_memory(tmp_path)
    assert available_host_memory(tmp_path, stated_bytes=GIB).available_bytes == GIB


def test_this_machine_has_some():
    assert available_host_memory().available_bytes > 0
