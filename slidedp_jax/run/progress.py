"""What a run tells: metrics.jsonl always; a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from slidedp_jax.run.metrics_file import MetricsFile

if TYPE_CHECKING:
    import rich.progress

_COLUMNS = ("loss", "grad_norm", "learning_rate", "tokens_per_second")


class Progress:
    """Takes one record per step.

    Args:
      path: metrics.jsonl, appended to.
      first_step: steps done before this run.
      num_steps: steps in all.
      logging_steps: steps between console lines.
      bar: whether a bar may be drawn.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        first_step: int,
        num_steps: int,
        logging_steps: int,
        bar: bool,
    ):
        self._file = MetricsFile(path)
        self._num_steps = num_steps
        self._logging_steps = logging_steps
        self._first = first_step
        self._start = time.perf_counter()
        self._process = psutil.Process()
        self._bar: rich.progress.Progress | None = None
        if bar and sys.stdout.isatty():
            self._open_bar(first_step, num_steps)

    def _open_bar(self, first_step: int, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar.add_task("", total=num_steps, completed=first_step)
        self._bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """Log a step; adds host memory and the time that is left."""
        done = record["step"] - self._first
        elapsed = time.perf_counter() - self._start
        record = record | {
            "host_rss_gib": round(self._process.memory_info().rss / 2**30, 3),
            "eta_s": round(elapsed / done * (self._num_steps - record["step"]), 1),
        }
        self._file.write(record)
        text = "  ".join(
            f"{name} {record[name]:.4g}" for name in _COLUMNS if record.get(name) is not None
        )
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=record["step"], description=text)
        elif record["step"] % self._logging_steps == 0 or record["step"] == self._num_steps:
            eta = record["eta_s"]
            self.say(f"step {record['step']}/{self._num_steps}  {text}  eta {eta:.0f} s")

    def write(self, record: dict[str, Any]) -> None:
        """Write a record that is not a step (an evaluation)."""
        self._file.write(record)

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the bar and the file."""
        if self._bar is not None:
            self._bar.stop()
        self._file.close()


class LoadProgress:
    """Says how far the loading of a large model is, every few seconds.

    Args:
      write: what a parameter is handed on to, from any thread.
      num_parameters: of all arrays together.
      every_s: seconds between lines.
    """

    def __init__(
        self,
        write: Callable[[str, np.ndarray], None],
        num_parameters: int,
        *,
        every_s: float = 5.0,
    ):
        self._write = write
        self._total = num_parameters
        self._every_s = every_s
        self._lock = threading.Lock()
        self._done = 0
        self._start = self._last = time.perf_counter()

    def __call__(self, name: str, values: np.ndarray) -> None:
        """Hand on one parameter."""
        self._write(name, values)
        with self._lock:
            self._done += values.size
            now = time.perf_counter()
            if now - self._last < self._every_s:
                return
            self._last = now
            share = self._done / self._total
            text = f"weights: {share:.0%} of {self._total / 1e9:.1f} G parameters"
            print(f"{text}, {now - self._start:.0f} s", flush=True)
