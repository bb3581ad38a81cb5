"""What a run tells: metrics.jsonl always; lines that stay, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from slidedp_jax.run.metrics_file import MetricsFile
from slidedp_jax.run.spikes import Spikes, spike_text
from slidedp_jax.run.step_text import step_line
from slidedp_jax.run.trackers import Tool, Trackers

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
      tools: TensorBoard and the like, by name.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        first_step: int,
        num_steps: int,
        logging_steps: int,
        bar: bool,
        tools: Mapping[str, Tool] | None = None,
    ):
        self._file = MetricsFile(path)
        self._num_steps = num_steps
        self._logging_steps = logging_steps
        self._first = first_step
        self._start = self._last_end = time.perf_counter()
        self._durations = Durations()
        self._spikes = Spikes()
        self._clipped = 0
        self._widths: set[int] = set()
        self._compiles = False
        self._trackers = Trackers(tools or {}, self.say)
        self._process = psutil.Process()
        self._bar: StepBar | None = None
        if bar and sys.stdout.isatty():
            from slidedp_jax.run.bar import StepBar

            self._bar = StepBar(first_step=first_step, num_steps=num_steps)
            self._bar.start()

    def begin_step(self, width: int) -> None:
        """A step of rows of `width` tokens begins; programs for new widths are compiled first."""
        self._compiles = width not in self._widths
        if not self._compiles:
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
        """Log a step; adds host memory, what is left, the share of clipped steps, and spikes."""
        step, now = record["step"], time.perf_counter()
        left = self._durations.left_s(
            now - self._last_end, compiles=self._compiles, steps=self._num_steps - step
        )
        self._last_end = now
        found = self._spikes.look(record)
        record = record | {
            "host_rss_gib": round(self._process.memory_info().rss / 2**30, 3),
            "elapsed_s": round(now - self._start, 3),
            "eta_s": left,
            **({"spikes": found} if found else {}),
        }
        if "clipped" in record:
            self._clipped += record["clipped"]
            record["clipped_share"] = round(self._clipped / (step - self._first), 4)
        self.write(record)
        if self._bar is not None:
            self._bar.step(record)
        if found or record.get("skipped"):
            self.say(spike_text(record, found or ["loss"], self._spikes))
        if step % self._logging_steps == 0 or step == self._num_steps:
            self.say(step_line(record, self._num_steps))

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, of a step or an evaluation."""
        self._file.write(record)
        self._trackers.write(record)

    def track(self, records: Iterable[dict[str, Any]]) -> None:
        """Hand on to the trackers what is in the file already."""
        for record in records:
            self._trackers.write(record)

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.say(text)
        else:
            print(text, flush=True)

    def close(self, *, complete: bool) -> None:
        """End the bar, the trackers and the file.

        Args:
          complete: whether the run has reached its end, be it an early one.
        """
        if self._bar is not None:
            self._bar.stop()
        self._trackers.close(complete=complete)
        self._file.close()


class Durations:
    """How long steps took, evaluations and saves between them included.

    Steps that compile are left out: what is left of a run rarely does.
    """

    def __init__(self) -> None:
        self._total_s, self._count = 0.0, 0

    def left_s(self, seconds: float, *, compiles: bool, steps: int) -> float | None:
        """Seconds that the steps left will take.

        Args:
          seconds: from the end of the step before to that of this one.
          compiles: this one had programs to compile.
          steps: that are left.

        Returns:
          None while every step has compiled.
        """
        if not compiles:
            self._total_s, self._count = self._total_s + seconds, self._count + 1
        if not steps:
            return 0.0
        return round(self._total_s / self._count * steps, 1) if self._count else None


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
