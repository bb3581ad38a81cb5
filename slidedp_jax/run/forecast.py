"""The plan against what happens: after twenty steps, and at the end of a run.

The step's time is compared, and that of the host update, which the run sees by itself. What the
devices compute and copy it sees only together: where a step is off and the update is not, it is
one of those. Looking costs nothing and changes nothing: a run's bits never depend on a clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.step_time import running_s
from slidedp_jax.planner.timeline import Lane
from slidedp_jax.planner.words import LANE_WORDS
from slidedp_jax.tracer import SpanLane
from slidedp_jax.wording import counted

STEPS = 20
"""Steps after which the forecast is looked at, those that compile left out."""

OFF = 0.10
"""Share by which what is measured may differ without a word."""

LITTLE = 0.05
"""Share of a step below which a lane's own time is not worth comparing."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A forecast and what came.

    Attributes:
      steps: that were measured.
      step_s: median of a step.
      predicted_s: of the same steps.
      update_s: of the host update, per step.
      predicted_update_s: of the same steps.
      lane: what is off by more than `OFF`, if anything is.
      on_cpu: the devices are CPU devices, of whose speed presets know nothing.
    """

    steps: int
    step_s: float
    predicted_s: float
    update_s: float
    predicted_update_s: float
    lane: Lane | None
    on_cpu: bool = False

    @property
    def off(self) -> float:
        """How much longer a step takes, as a share; below 0 if it is shorter."""
        return self.step_s / self.predicted_s - 1

    def record(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "predicted_step_s": self.predicted_s,
            "host_update_s": self.update_s,
            "predicted_host_update_s": self.predicted_update_s,
            "off_lane": self.lane,
        }

    def describe(self, *, measured: bool) -> str:
        """A line or two for people.

        Args:
          measured: the plan was made with a profile of this machine.
        """
        text = f"forecast: {counted(self.steps, 'step')} of {self.step_s:.3g} s (median)"
        if self.on_cpu and not measured:
            return (
                f"{text}, and none to compare with: CPU machines differ too much for a preset. "
                "`slidedp measure`, then --hardware_profile auto, predicts by this machine's rates"
            )
        text += f", predicted {self.predicted_s:.3g} s ({self.off:+.0%})"
        if self.lane is None:
            return text
        what = LANE_WORDS[self.lane]
        if self.lane == "host_update":
            text += f"; {what}: {self.update_s:.3g} s, predicted {self.predicted_update_s:.3g} s"
        else:
            text += f"; off is {what}: the optimizer is as predicted"
        if not measured:
            text += ". `slidedp measure`, then --hardware_profile auto, plans with this machine's"
            text += " own rates"
        return text


class Forecast:
    """Takes the steps of a run as they come.

    Args:
      plan: by which it runs.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._predicted: dict[int, tuple[float, float]] = {}
        self._ratios: list[float] = []
        self._seconds: list[float] = []
        self._update_ratios: list[tuple[float, float]] = []
        self._due = False

    def step(self, width: int, seconds: float, lanes: Mapping[tuple[SpanLane, str], float]) -> None:
        """A step has ended; the first of each width compiles.

        Args:
          width: tokens of its rows.
          seconds: that it took.
          lanes: what `StepTracer.take` gave since the step before.
        """
        self._due = False
        own_s = lanes.get(("host_update", ""), 0.0)
        if width not in self._predicted:
            self._predicted[width] = self._of_width(width)
            return
        step_s, predicted_update_s = self._predicted[width]
        self._seconds.append(seconds)
        self._ratios.append(seconds / step_s)
        self._update_ratios.append((own_s, predicted_update_s))
        self._due = len(self._ratios) == STEPS

    @property
    def is_due(self) -> bool:
        """Whether the step that ended just now is the one to look at."""
        return self._due

    def comparison(self) -> Comparison | None:
        """Of all steps so far; None where there are none that count."""
        if not self._ratios:
            return None
        step_s = statistics.median(self._seconds)
        ratio = statistics.median(self._ratios)
        update_s, predicted_update_s = (
            statistics.median(column) for column in zip(*self._update_ratios, strict=True)
        )
        return Comparison(
            steps=len(self._ratios),
            step_s=step_s,
            predicted_s=step_s / ratio,
            update_s=update_s,
            predicted_update_s=predicted_update_s,
            lane=self._lane(step_s, ratio, update_s, predicted_update_s),
            on_cpu=self._plan.job.hardware.unified_memory,
        )

    def _lane(
        self, step_s: float, ratio: float, update_s: float, predicted_update_s: float
    ) -> Lane | None:
        counts = max(update_s, predicted_update_s) > LITTLE * step_s
        if counts and abs(update_s - predicted_update_s) > OFF * predicted_update_s:
            return "host_update"
        if abs(ratio - 1) <= OFF:
            return None
        busy = self._plan.chosen.time.busy_s
        devices: tuple[Lane, ...] = ("compute", "h2d", "d2h")
        return max(devices, key=lambda lane: busy[lane])

    def _of_width(self, width: int) -> tuple[float, float]:
        """Predicted seconds of a step and of its host update, with all that runs beside."""
        job = self._plan.job
        if width != job.batch.seq_length:
            job = replace(job, batch=replace(job.batch, seq_length=width))
        running = running_s(
            job.workload,
            job.batch,
            self._plan.strategy,
            job.hardware,
            optimizer_state_bytes=job.optimizer_state_bytes,
        )
        return job.time(self._plan.strategy).step_s, running["host_update"]
