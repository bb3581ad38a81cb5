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
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[SpanLane, str], float] = {}
        self._spans: list[Span] | None = None
        self._origin_s = 0.0

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
                if self._spans is not None:
                    at = start - self._origin_s
                    self._spans.append(
                        Span(lane=lane, name=name, start_s=at, end_s=end - self._origin_s)
                    )

    def take(self) -> dict[tuple[SpanLane, str], float]:
        """Seconds by lane and, of waits, by reason: `norm`, `leave` or `update`."""
        with self._lock:
            sums, self._sums = self._sums, {}
            return sums

    def keep_spans(self) -> None:
        """From now on, as seconds since now."""
        with self._lock:
            self._spans, self._origin_s = [], time.perf_counter()

    @property
    def kept_s(self) -> float:
        """Seconds since `keep_spans`, by the clock of the spans."""
        return time.perf_counter() - self._origin_s

    def kept_spans(self) -> list[Span]:
        """Those since `keep_spans`, which ends here."""
        with self._lock:
            spans, self._spans = self._spans or [], None
            return spans


def _key(lane: SpanLane, name: str) -> tuple[SpanLane, str]:
    return lane, _reason(name) if lane == "wait" else ""


def _reason(name: str) -> str:
    """What a wait is for, by its name."""
    if name == "wait for the norm":
        return "norm"
    return "leave" if name.endswith(" to leave") else "update"


class RecordingTracer(Tracer):
    """Keeps every span; spans of `compute`, `h2d` and `d2h` are dispatch times of the host."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.origin_s = time.perf_counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, lane: SpanLane, name: str) -> Iterator[None]:
        """Record start and end."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            origin = self.origin_s
            with self._lock:
                self.spans.append(
                    Span(lane=lane, name=name, start_s=start - origin, end_s=end - origin)
                )

    def busy_s(self, lane: SpanLane) -> float:
        """Seconds that the spans of one lane cover in sum."""
        return sum(span.end_s - span.start_s for span in self.spans if span.lane == lane)
