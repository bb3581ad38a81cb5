"""What a run tells: metrics.jsonl always; lines that stay, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from slidedp_jax.run.metrics_file import MetricsFile
from slidedp_jax.run.step_text import step_line

if TYPE_CHECKING:
    from slidedp_jax.run.bar import StepBar


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
        self._start = self._first_ended = time.perf_counter()
        self._widths: set[int] = set()
        self._process = psutil.Process()
        self._bar: StepBar | None = None
        if bar and sys.stdout.isatty():
            from slidedp_jax.run.bar import StepBar

            self._bar = StepBar(first_step=first_step, num_steps=num_steps)
            self._bar.start()

    def begin_step(self, width: int) -> None:
        """A step of rows of `width` tokens begins; programs for new widths are compiled first."""
        if width in self._widths:
            return
        self._widths.add(width)
        first = len(self._widths) == 1
        what = "compiling (first step)" if first else f"compiling for rows of {width:,} tokens"
        if self._bar is not None:
            self._bar.doing(what)
        elif first:
            self.say(what)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something between steps."""
        if self._bar is not None:
            self._bar.doing(what)
        yield
        if self._bar is not None:
            self._bar.doing(None)

    def step(self, record: dict[str, Any]) -> None:
        """Log a step; adds host memory and the time that is left."""
        record = record | {
            "host_rss_gib": round(self._process.memory_info().rss / 2**30, 3),
            "eta_s": self._left_s(record["step"]),
        }
        self.write(record)
        if self._bar is not None:
            self._bar.step(record)
        if record["step"] % self._logging_steps == 0 or record["step"] == self._num_steps:
            self.say(step_line(record, self._num_steps))

    def _left_s(self, step: int) -> float | None:
        """By the steps so far without the first, which compiles; None after that one alone."""
        now, done = time.perf_counter(), step - self._first
        if done == 1:
            self._first_ended = now
            return None if step < self._num_steps else 0.0
        return round((now - self._first_ended) / (done - 1) * (self._num_steps - step), 1)

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, of a step or an evaluation."""
        self._file.write(record)

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.say(text)
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
