"""How far the reading and tokenising of rows is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from slidedp_jax.run.time_text import clock

_FIRST_S = 2.0
"""What is over before that needs no word."""


class DataProgress:
    """Takes rows read and their share of the files.

    Args:
      what: the files, in words.
      every_s: seconds between lines where there is no terminal.
      now: a clock in seconds.
      print_line: takes a line.
    """

    def __init__(
        self,
        what: str,
        *,
        every_s: float = 10.0,
        now: Callable[[], float] = time.perf_counter,
        print_line: Callable[[str], None] = lambda line: print(line, flush=True),
    ):
        self._what = what
        self._every_s = every_s
        self._now = now
        self._print = print_line
        self._start = now()
        self._last = self._start + _FIRST_S - every_s

    def __call__(self, rows: int, share: float) -> None:
        """So many rows are read, which are that share of the files."""
        now = self._now()
        if share < 1 and now - self._last >= self._every_s:
            self._last = now
            self._print(self.line(rows, share))

    def line(self, rows: int, share: float) -> str:
        """How far it is."""
        seconds = max(1e-9, self._now() - self._start)
        left = clock(seconds * (1 - share) / max(share, 1e-9))
        return (
            f"tokenising {self._what}: {share:.0%}, {rows:,} rows, {rows / seconds:,.0f} rows/s, "
            f"{left} left"
        )


@contextlib.contextmanager
def data_progress(what: str) -> Iterator[Callable[[int, float], None]]:
    """Something to tell; on a terminal a bar that goes when it is done.

    Args:
      what: the files, in words.
    """
    lines = DataProgress(what)
    if not sys.stdout.isatty():
        yield lines
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(f"tokenising {what}", total=1.0)

        def tell(rows: int, share: float) -> None:
            bar.update(task, completed=share, description=lines.line(rows, share))

        yield tell
