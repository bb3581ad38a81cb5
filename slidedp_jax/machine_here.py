"""The machine in words: what a profile belongs to, and what would make it another machine's."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from typing import Any

import jax

from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.machine_facts import machine_of, nvidia_smi, text_of
from slidedp_jax.planner.machine_profile import Machine


def machine_here(devices: Sequence[jax.Device]) -> Machine:
    """What this process runs on and with."""
    on_gpu = devices[0].platform != "cpu"
    return machine_of(devices[0].device_kind, len(devices), on_gpu=on_gpu)


def more_facts(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """What else may explain figures: not compared."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "host_memory_available_bytes": available_host_memory().available_bytes,
        "transparent_hugepages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
    }
    if devices[0].platform != "cpu":
        query = "index,name,memory.total,memory.used,power.limit,pcie.link.gen.max,"
        query += "pcie.link.width.max,clocks.max.sm"
        facts["gpus"] = nvidia_smi(f"--query-gpu={query}", "--format=csv").splitlines()
        facts["topology"] = nvidia_smi("topo", "-m").splitlines()
    return facts


def peer_access(num_devices: int) -> bool | None:
    """Whether every GPU reads every other's memory, by the driver; None: it does not say."""
    if num_devices < 2:
        return None
    rows = [line.split() for line in nvidia_smi("topo", "-p2p", "r").splitlines() if line.strip()]
    marks = [row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1]
    words = {word for row in marks for word in row if not word.startswith("GPU")} - {"X"}
    return words == {"OK"} if words else None
