"""The bar of a run on a terminal: step, loss and remaining time at any width.

21/60 ━━━━━━━━━╺━━━━━━━━━━━━━━━━ loss 3.653 | norm 2.9 | 3.71k tok/s | 0:07 left

Where there is less room, figures go and the bar shrinks; step, loss and time stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slidedp_jax.run.step_text import figures, fitting, left
from slidedp_jax.run.time_text import clock

_BAR, _LEAST_BAR = 24, 8
"""Columns of the bar proper: at the most, and what figures have to leave to it."""


class StepBar:
    """One line at the bottom of a terminal; what is printed goes above it.

    Args:
      first_step: steps done before this run.
      num_steps: steps in all.
      console: the terminal; None: that of stdout.
      now: a clock in seconds.
    """

    def __init__(
        self,
        *,
        first_step: int,
        num_steps: int,
        console: Console | None = None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._step, self._num_steps = first_step, num_steps
        self._texts: dict[str, str] = {}
        self._left_s: float | None = None
        self._doing: str | None = None
        self._now = now
        self._since = now()
        self._live = Live(self, console=console, refresh_per_second=4)

    def start(self) -> None:
        """Draw it."""
        self._live.start()

    def stop(self) -> None:
        """Leave it as it is."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above it."""
        self._live.console.print(text, highlight=False, markup=False)

    def doing(self, what: str | None) -> None:
        """What takes longer than steps do; None: steps again."""
        self._doing, self._since = what, self._now()

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done."""
        self._step, self._texts = record["step"], figures(record)
        self._left_s = record["eta_s"]
        self.doing(None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count, gone = f"{self._step}/{self._num_steps}", self._now() - self._since
        room = options.max_width - len(count) - 1
        if self._doing is not None:
            texts = {name: text for name, text in self._texts.items() if name == "loss"}
            end = f"{self._doing} {clock(gone)}"
        else:
            texts = self._texts
            end = left(None if self._left_s is None else self._left_s - gone)
        shown = fitting(texts, room - _LEAST_BAR - 1 - len(end) - 3)
        words = f"{shown} | {end}" if shown else end
        width = min(_BAR, room - len(words) - 1)
        cells: list[RenderableType] = [Text(count), Text(words, no_wrap=True, overflow="crop")]
        if width > 0:
            bar = ProgressBar(total=self._num_steps, completed=self._step, width=width)
            cells.insert(1, bar)
        line = Table.grid(padding=(0, 1))
        line.add_row(*cells)
        yield line
