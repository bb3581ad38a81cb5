"""Measurements in processes of their own, under a time limit, with results kept as they come.

A child appends one JSON line per result to the file whose name is its last argument (`Report`), so
that what it measured survives when it fails or is ended.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OUT_OF_MEMORY = 17
"""Exit status of a child whose GPU memory did not suffice."""

OUT_OF_MEMORY_TEXT = "out of GPU memory"


class Report:
    """The child's end: where its results go."""

    def __init__(self, path: str):
        self._path = pathlib.Path(path)

    def __call__(self, result: Mapping[str, Any]) -> None:
        """Append a result."""
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def end_out_of_memory(error: BaseException) -> None:
    """End this process at once, whatever its threads and peers wait for."""
    print(f"{OUT_OF_MEMORY_TEXT}: {str(error)[:300]}", file=sys.stderr, flush=True)
    os._exit(OUT_OF_MEMORY)


def run(
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    on_result: Callable[[dict[str, Any]], None],
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """Run commands side by side until all have ended, one has failed, or the time is up.

    Args:
      commands: arguments of Python, one child each; the results file is appended to them.
      timeout_s: after this the children are killed.
      on_result: called with each result soon after it was reported.
      environment: variables beside the present ones, where those do not set them.

    Returns:
      Why the children did not all end well, or None.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        results = folder / "results.jsonl"
        results.touch()
        logs = [(folder / f"log{number}").open("w+") for number in range(len(commands))]
        children = [
            subprocess.Popen(
                [sys.executable, *command, str(results)],
                env={**(environment or {}), **os.environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for command, log in zip(commands, logs, strict=True)
        ]
        end = time.perf_counter() + timeout_s
        try:
            rest = ""
            with results.open() as lines:
                while True:
                    statuses = [child.poll() for child in children]
                    *whole, rest = (rest + lines.read()).split("\n")
                    for line in whole:
                        on_result(json.loads(line))
                    if None not in statuses or any(statuses) or time.perf_counter() > end:
                        break
                    time.sleep(0.2)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        return _failure(statuses, logs, timeout_s)


def _failure(statuses: Sequence[int | None], logs: Sequence[Any], timeout_s: float) -> str | None:
    if not any(statuses) and None not in statuses:
        return None
    for number, status in enumerate(statuses):
        if status:
            logs[number].seek(0)
            text: str = logs[number].read().strip()[-1500:]
            if status == OUT_OF_MEMORY:
                return text[text.rfind(OUT_OF_MEMORY_TEXT) :]
            if status < 0:
                text = f"ended by {signal.Signals(-status).name}\n{text}"
            return f"process {number}: {text}"
    return f"still running after {timeout_s:.0f} s"
