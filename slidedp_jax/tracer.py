"""Spans of work on the lanes, for measurements and for tests that delay a lane.

Lanes are the planner's, `h2d`, `compute`, `d2h` and `host_update`, and `wait` where the schedule
stands still for an update or for gradients to leave, and `save` of checkpoints beside it. The
runtime brackets what it does with `tracer.span(lane, name)`; with the default tracer that costs
nothing, with others a microsecond or two.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slidedp_jax.planner.timeline import Lane

SpanLane = Lane | Literal["wait", "save"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work: seconds since the tracer's start."""

    lane: SpanLane
    name: str
    start_s: float
    end_s: float

    @property
    def key(self) -> tuple[SpanLane, str]:
        """Its lane and, of waits, the reason: `norm`, `leave` or `update`."""
        return _key(self.lane, self.name)


class Tracer:
    """Takes no notes."""

    @contextlib.contextmanager
    def span(self, lane: SpanLane, name: str) -> Iterator[None]:
        """Bracket a piece of work of `lane`."""
        yield


class StepTracer(Tracer):
    """Sums what each lane took since it was asked last; keeps spans while it is told to.

    Of `compute`, `h2d` and `d2h` that is the host's time to hand the work over.

    Args:
      keep: whether spans are kept from the start on.

    Attributes:
      spans: those that are kept.
      origin_s: when they began, by `time.perf_counter`.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[SpanLane, str], float] = {}
        self._keeps = keep
        self.spans: list[Span] = []
        self.origin_s = time.perf_counter()

    @contextlib.contextmanager
    def span(self, lane: SpanLane, name: str) -> Iterator[None]:
        """Add to the sum of the lane, and of a wait's reason."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            key = _key(lane, name)
            with self._lock:
                self._sums[key] = self._sums.get(key, 0.0) + end - start
                if self._keeps:
                    at, until = start - self.origin_s, end - self.origin_s
                    self.spans.append(Span(lane=lane, name=name, start_s=at, end_s=until))

    def take(self) -> dict[tuple[SpanLane, str], float]:
        """Seconds by lane and, of waits, by reason: `norm`, `leave` or `update`."""
        with self._lock:
            sums, self._sums = self._sums, {}
            return sums

    def keep_spans(self) -> None:
        """From now on, as seconds since now."""
        with self._lock:
            self._keeps, self.spans, self.origin_s = True, [], time.perf_counter()

    @property
    def kept_s(self) -> float:
        """Seconds since `keep_spans`, by the clock of the spans."""
        return time.perf_counter() - self.origin_s

    def kept_spans(self) -> list[Span]:
        """Those since `keep_spans`, which ends here."""
        with self._lock:
            spans, self.spans, self._keeps = self.spans, [], False
            return spans


def _key(lane: SpanLane, name: str) -> tuple[SpanLane, str]:
    return lane, _reason(name) if lane == "wait" else ""


def _reason(name: str) -> str:
    """What a wait is for, by its name."""
    if name == "wait for the norm":
        return "norm"
    return "leave" if name.endswith(" to leave") else "update"
