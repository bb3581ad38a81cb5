"""The machine at hand as kernel, driver and packages tell it: no JAX, no device is started."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.machine_profile import Machine, MachineProfile, differences

_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)

CPU_KIND = "cpu"
"""What JAX calls a CPU device."""


def machine_facts() -> Machine:
    """This machine with all its GPUs by the driver's names, which are JAX's; or as a CPU device."""
    gpus = nvidia_smi("--query-gpu=name", "--format=csv,noheader").split("\n")
    gpus = [name.strip() for name in gpus if name.strip()]
    return machine_of(gpus[0] if gpus else CPU_KIND, len(gpus) or 1, on_gpu=bool(gpus))


def machine_of(device_kind: str, num_devices: int, *, on_gpu: bool) -> Machine:
    """This machine with devices that are known.

    Args:
      device_kind: as JAX spells it.
      num_devices: that are used.
      on_gpu: whether they are GPUs, which have a driver.
    """
    memory = available_host_memory()
    return Machine(
        device_kind=device_kind,
        num_devices=num_devices,
        driver=_driver() if on_gpu else None,
        versions=_versions(),
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_limits={bound.name: bound.limit_bytes for bound in memory.bounds},
        numa_nodes=numa_nodes(),
    )


def of_this_machine(profile: MachineProfile, here: Machine) -> str:
    """One line: whether a profile that nobody has named is of this machine, and in what it differs.

    The number of devices aside, which a plan states.
    """
    differing = differences(profile.machine, here, but={"num_devices"})
    if not differing:
        return f"auto: {profile.source} was measured on this machine"
    return (
        f"auto took {profile.source}, which was not measured on this machine as it is now: "
        f"{'; '.join(differing)}"
    )


def numa_nodes(root: Path | str = "/") -> dict[str, str]:
    """Node -> its cores as the kernel lists them, such as `0-15,32-47`."""
    nodes = {}
    for path in sorted(Path(root).glob("sys/devices/system/node/node[0-9]*")):
        cores = text_of(path / "cpulist")
        if cores:
            nodes[path.name] = cores
    return nodes


def nvidia_smi(*words: str) -> str:
    """What it prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def text_of(path: Path | str) -> str:
    """A file's text; empty where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str | None:
    lines = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")
    return lines[0].strip() or None


def _processor() -> str:
    for line in text_of("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
