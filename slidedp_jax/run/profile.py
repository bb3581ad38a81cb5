"""`--profile_steps A:B`: a timeline of some steps, and one paragraph on what bounds them.

The timeline is in Chrome's trace format, which https://ui.perfetto.dev opens: our own lanes, and on
GPUs what ran on each of their streams, as jax.profiler gives it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from slidedp_jax.errors import TrainingStopped
from slidedp_jax.run.device_trace import DeviceSpan, read_device_spans
from slidedp_jax.run.step_lanes import lane_seconds
from slidedp_jax.tracer import Span, SpanLane, StepTracer
from slidedp_jax.whole_files import write_whole
from slidedp_jax.wording import counted

_LANES = {
    "step": "steps",
    "compute": "step's thread: compute, handed over",
    "h2d": "step's thread: copies to the devices, handed over",
    "d2h": "step's thread: copies to the host, handed over",
    "wait": "step's thread: waits",
    "norm": "update thread: waits for the last gradients",
    "host_update": "update thread: the optimizer",
    "save": "checkpoints",
}
"""Rows of the timeline, from the top."""

_OWN = "slidedp_jax"
_MICROSECONDS = 1e6

_BOUNDS = 0.1
"""Share of the time that the step's thread waits for something, from which on that bounds it."""

_BUSY = 0.8
"""Share of the time that a lane of a GPU works, from which on it bounds the step."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step in the range.

    Attributes:
      record: of the step; seconds of lanes in it are of another time, since the step before.
      begin_s: since the trace began.
      end_s: likewise.
    """

    record: Mapping[str, Any]
    begin_s: float
    end_s: float


class Profile:
    """Traces the steps of one range.

    Args:
      steps: first and last; None: none.
      folder: where it goes.
      tracer: of the trainer.
      say: prints a line.
      settle: waits until nothing uses the devices.
      gpus: whether GPUs compute, which jax.profiler can look at.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        folder: pathlib.Path,
        tracer: StepTracer,
        say: Callable[[str], None],
        *,
        settle: Callable[[], None],
        gpus: bool,
    ):
        self._steps, self._folder, self._tracer, self._say = steps, folder, tracer, say
        self._settle, self._gpus = settle, gpus
        self._done: list[TracedStep] = []
        self._begin_s = 0.0
        self._origin_ns = 0
        self._on = False

    def before(self, step: int) -> None:
        """A step begins."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            return
        if not self._on:
            self._start()
        self._begin_s = self._tracer.kept_s

    def _start(self) -> None:
        self._on, self._done = True, []
        if self._gpus:
            shutil.rmtree(self._raw, ignore_errors=True)
            with self._unless_it_fails("jax.profiler cannot start"):
                self._settle()
                jax.profiler.start_trace(str(self._raw), profiler_options=_devices_alone())
        self._tracer.keep_spans()
        self._origin_ns = time.time_ns()

    def after(self, record: Mapping[str, Any]) -> None:
        """A step has ended, and this is its record."""
        if not self._on:
            return
        end = self._tracer.kept_s
        self._done.append(TracedStep(record=record, begin_s=self._begin_s, end_s=end))
        if self._steps is not None and record["step"] >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what has been traced, if anything."""
        if not self._on:
            return
        self._on = False
        spans = self._tracer.kept_spans()
        on_devices: list[DeviceSpan] = []
        if self._gpus:
            with self._unless_it_fails("what the GPUs did is not known"):
                # CUPTI lets go of the process here, which no call of CUDA may be under way for.
                with contextlib.suppress(TrainingStopped):  # then the run is over
                    self._settle()
                jax.profiler.stop_trace()
                on_devices = read_device_spans(self._raw, self._origin_ns)
                shutil.rmtree(self._raw)
        if not self._done:
            return
        first, last = (self._done[place].record["step"] for place in (0, -1))
        path = self._folder / f"steps_{first}_{last}.trace.json"
        with self._unless_it_fails("the profile cannot be written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            events = trace_events(spans, on_devices, self._done)
            write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
            text = what_bounds(self._done, spans, on_devices)
            write_whole(path.with_name(f"steps_{first}_{last}.txt"), text + "\n")
            self._say(f"profile: {text}\n  timeline: {path} (open it at https://ui.perfetto.dev)")

    @property
    def _raw(self) -> pathlib.Path:
        return self._folder / "jax"

    @contextlib.contextmanager
    def _unless_it_fails(self, what: str) -> Any:
        """A profile is not worth a run."""
        try:
            yield
        except Exception as error:  # of a profiler, or a full disk
            self._say(f"warning: {what} ({type(error).__name__}: {error})")


def _devices_alone() -> jax.profiler.ProfileOptions:
    """Nothing of Python, which a trace of every call would slow down by more than it shows."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    return options


def trace_events(
    spans: Iterable[Span], on_devices: Iterable[DeviceSpan], steps: Sequence[TracedStep]
) -> list[dict[str, Any]]:
    """Complete events and names of rows, in Chrome's format.

    Args:
      spans: of our lanes.
      on_devices: of the GPUs.
      steps: that were traced; evaluations and saves may lie between them.
    """
    rows: dict[tuple[str, str], list[_Event]] = {(_OWN, lane): [] for lane in _LANES}
    for step in steps:
        name = f"step {step.record['step']}"
        rows[_OWN, "step"].append(_Event(step.begin_s, step.end_s, name, "step"))
    for span in spans:
        lane = "norm" if span.name == "wait for the norm" else str(span.lane)
        rows[_OWN, lane].append(_Event(span.start_s, span.end_s, span.name, lane))
    for own in on_devices:
        event = _Event(own.start_s, own.end_s, own.name, own.lane)
        rows.setdefault((own.device, own.stream), []).append(event)
    processes = list(dict.fromkeys(process for process, _ in rows))
    names, complete, tid = list[dict[str, Any]](), list[dict[str, Any]](), 1
    for pid, process in enumerate(processes, start=1):
        names.append(_named("process_name", pid, 0, name=process))
        names.append(_named("process_sort_index", pid, 0, sort_index=pid))
        for (of, row), events in rows.items():
            if of != process or not events:
                continue
            for own_row in _apart(events):
                title = _LANES[row] if process == _OWN else row
                names.append(_named("thread_name", pid, tid, name=title))
                names.append(_named("thread_sort_index", pid, tid, sort_index=tid))
                complete += [event.complete(pid, tid) for event in own_row]
                tid += 1
    return [*names, *sorted(complete, key=lambda event: event["ts"])]


class _Event(NamedTuple):
    """Of a row: seconds since the trace began, name, lane."""

    start_s: float
    end_s: float
    name: str
    lane: str

    def complete(self, pid: int, tid: int) -> dict[str, Any]:
        """A complete event; what began before the trace is cut off at its beginning."""
        begin, end = max(0.0, self.start_s), max(0.0, self.end_s)
        return {
            "ph": "X",
            "name": self.name,
            "cat": self.lane,
            "pid": pid,
            "tid": tid,
            "ts": round(begin * _MICROSECONDS, 3),
            "dur": round(max(0.0, end - begin) * _MICROSECONDS, 3),
        }


def _apart(events: list[_Event]) -> list[list[_Event]]:
    """Events of a lane in as many rows as overlap, as those of checkpoints' writers do."""
    rows: list[list[_Event]] = []
    for event in sorted(events):
        row = next((row for row in rows if row[-1].end_s <= event.start_s), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def _named(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    """What a process or thread is called, or where it stands."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _within(
    spans: Iterable[tuple[float, float]], steps: Sequence[TracedStep]
) -> list[tuple[float, float]]:
    """The parts of spans that lie in a step."""
    return [
        (max(start, step.begin_s), min(end, step.end_s))
        for start, end in spans
        for step in steps
        if start < step.end_s and end > step.begin_s
    ]


def what_bounds(
    steps: Sequence[TracedStep],
    spans: Sequence[Span] = (),
    on_devices: Sequence[DeviceSpan] = (),
) -> str:
    """One paragraph: where the time of these steps went, what bounds them, what would help.

    Args:
      steps: that were traced.
      spans: of our lanes; what lies between steps, as in an evaluation, does not count.
      on_devices: what GPUs did meanwhile; empty: not known.
    """
    total = sum(step.end_s - step.begin_s for step in steps)
    sums: dict[tuple[SpanLane, str], float] = {}
    for span in spans:
        for start, end in _within([(span.start_s, span.end_s)], steps):
            sums[span.key] = sums.get(span.key, 0.0) + end - start
    lane_s = lane_seconds(sums)

    def share(name: str) -> float:
        if name in lane_s:
            return lane_s[name] / total
        return sum(float(step.record.get(name) or 0.0) for step in steps) / total

    of_steps = f"{counted(len(steps), 'step')} of {total / len(steps):.3g} s"
    waits = {
        "update": share("wait_update_s"),
        "leave": share("wait_leave_s"),
        "data": share("data_time_s"),
    }
    told = [
        f"the step's thread waited {waits['update']:.0%} of the time for layers that the host was "
        f"still updating, {waits['leave']:.0%} for gradients and activations to leave the devices "
        f"and {waits['data']:.0%} for data",
        f"the optimizer was busy for {share('host_update_s'):.0%}",
    ]
    lanes = {
        lane: _busiest(on_devices, lane, steps) / total
        for lane in ("compute", "h2d", "d2h", "exchange")
        if on_devices
    }
    device_s = share("wait_device_s")
    if lanes:
        told.append(
            f"the busiest GPU computed for {lanes['compute']:.0%}, copied to itself for "
            f"{lanes['h2d']:.0%} and from itself for {lanes['d2h']:.0%}"
            + (f", and exchanged with others for {lanes['exchange']:.0%}" * (lanes["exchange"] > 0))
        )
    else:
        told.append(f"the loop waited {device_s:.0%} for the devices to finish")
    return f"{of_steps}: {'; '.join(told)}. {_verdict(waits, lanes, device_s)}"


def _verdict(waits: Mapping[str, float], lanes: Mapping[str, float], device_s: float) -> str:
    longest = max(waits, key=lambda name: waits[name])
    if waits[longest] < _BOUNDS:
        longest = "none"
    elif longest == "leave" and not lanes:
        return (
            "What the devices compute or copy to the host bounds the step: its thread waits for "
            "results that are not there yet. More tokens per step would hide the copies."
        )
    if longest == "leave" and lanes["compute"] >= _BUSY:
        longest = "none"  # they leave late because they are computed late
    if longest != "none":
        return {
            "update": "The optimizer on the host bounds the step: more tokens per step, state that "
            "stays on the GPUs, an optimizer with less state or more cores would make it faster.",
            "leave": "Copies to the host bound the step: more tokens per step would hide them.",
            "data": "Reading the rows bounds the step, which they must not: look at their disk.",
        }[longest]
    if lanes and lanes["compute"] < _BUSY:
        copies = max(lanes["h2d"], lanes["d2h"])
        if copies > _BUSY:
            return "The link bounds the step: more tokens per step would hide the copies."
        return (
            "No lane is busy throughout: what is short waits for what comes before it; more tokens "
            "per step would make the GPUs' share larger."
        )
    if not lanes and device_s < _BOUNDS:
        return (
            "Handing work over (Python) bounds the step, as nothing that it waits for does: more "
            "tokens per step, larger micro batches or more layers per chunk would hide it."
        )
    return "Compute on the devices bounds the step; all else runs beside it."


def _busiest(on_devices: Sequence[DeviceSpan], lane: str, steps: Sequence[TracedStep]) -> float:
    per_device: dict[str, list[tuple[float, float]]] = {}
    for span in on_devices:
        if span.lane == lane:
            per_device.setdefault(span.device, []).append((span.start_s, span.end_s))
    return max((covered_s(_within(own, steps)) for own in per_device.values()), default=0.0)
