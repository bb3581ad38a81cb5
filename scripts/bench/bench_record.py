"""What every benchmark writes down beside its numbers: command, commit, date, machine, memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def record(packages: Sequence[str] = ("jax",), **more: Any) -> dict[str, Any]:
    """The head of a result file; `packages` are named with their versions."""
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(packages),
        **more,
    }


def command() -> str:
    """The command line; of the output only the name, since its folder belongs to one machine."""
    words = ["python", *sys.argv]
    for flag in {"--out", "--json"} & {*words[:-1]}:
        out = words.index(flag) + 1
        words[out] = pathlib.Path(words[out]).name
    return " ".join(words)


def save(out: pathlib.Path | None, record: dict[str, Any]) -> None:
    """Write OUT.json as a whole or not at all; called after each result of a run."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    target = out.with_name(out.name.removesuffix(".json") + ".json")
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(target)


def commit() -> str:
    """The checkout's commit; BENCH_COMMIT names it where the files are there without history."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip()


def machine(packages: Sequence[str] = ("jax",)) -> dict[str, Any]:
    """Cores, processor, GPUs and versions, asked without starting any framework."""
    return {
        "gpus": gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def gpus() -> list[str]:
    """Names of the GPUs that the driver lists."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def processor() -> str:
    """The processor's name as the kernel gives it."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def rss_gib() -> float:
    """Resident memory of this process."""
    import psutil

    return float(psutil.Process().memory_info().rss / 2**30)
