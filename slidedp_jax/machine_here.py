"""The machine in words: what a profile belongs to, and what would make it another machine's."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.machine_profile import Machine

_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


def machine_here(devices: Sequence[jax.Device]) -> Machine:
    """What this process runs on and with."""
    memory = available_host_memory()
    on_gpu = devices[0].platform != "cpu"
    return Machine(
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        driver=_driver() if on_gpu else None,
        versions=_versions(),
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_limits={bound.name: bound.limit_bytes for bound in memory.bounds},
        numa_nodes=numa_nodes(),
    )


def more_facts(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """What else may explain figures: not compared."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "host_memory_available_bytes": available_host_memory().available_bytes,
        "transparent_hugepages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
    }
    if devices[0].platform != "cpu":
        query = "index,name,memory.total,memory.used,power.limit,pcie.link.gen.max,"
        query += "pcie.link.width.max,clocks.max.sm"
        facts["gpus"] = _nvidia_smi(f"--query-gpu={query}", "--format=csv").splitlines()
        facts["topology"] = _nvidia_smi("topo", "-m").splitlines()
    return facts


def peer_access(num_devices: int) -> bool | None:
    """Whether every GPU reads every other's memory, by the driver; None: it does not say."""
    if num_devices < 2:
        return None
    rows = [line.split() for line in _nvidia_smi("topo", "-p2p", "r").splitlines() if line.strip()]
    marks = [row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1]
    words = {word for row in marks for word in row if not word.startswith("GPU")} - {"X"}
    return words == {"OK"} if words else None


def numa_nodes(root: Path | str = "/") -> dict[str, str]:
    """Node -> its cores as the kernel lists them, such as `0-15,32-47`."""
    nodes = {}
    for path in sorted(Path(root).glob("sys/devices/system/node/node[0-9]*")):
        cores = _text(path / "cpulist")
        if cores:
            nodes[path.name] = cores
    return nodes


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str | None:
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")
    return lines[0].strip() or None


def _nvidia_smi(*words: str) -> str:
    """What it prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _processor() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _text(path: Path | str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
