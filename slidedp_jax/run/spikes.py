"""Steps whose loss or norm stands out, and which rows they had."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 100
"""Steps before that say what is usual."""
LEAST = 20
"""Of them, before anything is said."""
_SIGMAS = 6.0
"""Robust standard deviations (1.4826 times the median deviation) above the median."""
_TIMES = {"loss": 1.3, "grad_norm": 3.0}
"""And so many times the median: figures that hardly vary are left alone."""
_ROWS_NAMED = 8
_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


class Spikes:
    """Looks at each step's record."""

    def __init__(self) -> None:
        self._before: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=WINDOW) for name in _TIMES
        }

    def look(self, record: Mapping[str, Any]) -> list[str]:
        """Names of the figures that stand out; finite ones count for what is usual later."""
        found = []
        for name, before in self._before.items():
            value = record[name]
            if not math.isfinite(value):
                found.append(name)
                continue
            if len(before) >= LEAST and value > self._limit(name):
                found.append(name)
            before.append(value)
        return found

    def usual(self, name: str) -> float | None:
        """Median of the steps before; None: there are none."""
        before = self._before[name]
        return statistics.median(before) if before else None

    def _limit(self, name: str) -> float:
        before = self._before[name]
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in before)
        return max(middle + _SIGMAS * spread, _TIMES[name] * middle)


def spike_text(record: Mapping[str, Any], found: Sequence[str], spikes: Spikes) -> str:
    """One line for people: what stood out, what is usual, which rows the step had.

    Args:
      record: of the step.
      found: what `Spikes.look` gave of it.
      spikes: where it was looked at.
    """
    parts = []
    for name in found:
        usual = spikes.usual(name)
        often = "" if usual is None else f" (usually {usual:.4g})"
        parts.append(f"{_NAMES[name]} {record[name]:.4g}{often}")
    rows = record["row_ids"]
    named = " ".join(map(str, rows[:_ROWS_NAMED]))
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    skipped = ", skipped" if record.get("skipped") else ""
    return (
        f"step {record['step']}{skipped}: {', '.join(parts)}; its rows: {named}{more} (slidedp "
        "preview --rows shows them)"
    )
