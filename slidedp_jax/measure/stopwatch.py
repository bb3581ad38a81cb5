"""Timing for profiles: warm-ups, repeats, and a budget of seconds that is kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Samples of one thing.

    Attributes:
      name: what was done, such as `h2d`.
      seconds: of each repetition.
      work: of one repetition, in `unit`; 0 where only the time counts.
      unit: of the work: "bytes", "operations" or "parameters".
      about: sizes, counts and whatever else tells this one from others of its name.
    """

    name: str
    seconds: tuple[float, ...]
    work: float = 0.0
    unit: str = "bytes"
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Median of the samples."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Work per second, of the median."""
        return self.work / self.median_s

    @property
    def spread(self) -> float:
        """Distance of the outer samples over the median; 0.2 on hosts that others use too."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s

    def record(self) -> dict[str, Any]:
        """For JSON: median, spread and raw samples."""
        rate = {"per_s": self.rate} if self.work else {}
        return {
            "name": self.name,
            **self.about,
            "unit": self.unit,
            "work": self.work,
            "median_s": self.median_s,
            **rate,
            "spread": self.spread,
            "seconds": list(self.seconds),
        }


class Stopwatch:
    """Times calls until the budget is used up, and keeps what it measured.

    Args:
      budget_s: seconds for everything.
      say: takes a line about each measurement.
    """

    def __init__(self, budget_s: float, say: Callable[[str], None] = lambda line: None):
        self._start, self._budget_s, self._say = time.perf_counter(), budget_s, say
        self.measured: list[Measurement] = []
        self.left_out: dict[str, str] = {}
        """What was not measured, and why."""

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    @property
    def left_s(self) -> float:
        """Of the budget."""
        return self._budget_s - self.elapsed_s

    def attempt(self, name: str, part: Callable[..., None], *given: Any, needs_s: float) -> None:
        """Run a part if there is time for it; what goes wrong is told and does not end the rest."""
        if self.left_s < needs_s:
            self._leave_out(name, f"no time: {self.left_s:.0f} s of the budget were left")
            return
        try:
            part(*given)
        except Exception as error:  # any: one part must not cost the others
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            self._leave_out(name, first_line[:300])

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self._say(f"{self.elapsed_s:5.1f} s  {name}: not measured ({reason})")

    def time(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        work: float = 0.0,
        unit: str = "bytes",
        repeats: int = 9,
        about: Mapping[str, Any] | None = None,
    ) -> Measurement:
        """Time a call that returns when all is done.

        Args:
          name: what it does.
          call: what is timed.
          work: of one call.
          unit: of the work.
          repeats: samples; two where the budget is used up.
          about: what tells it from others of its name.
        """
        for _ in range(WARM_UPS):  # they compile and fill pools
            call()
        seconds: list[float] = []
        for number in range(repeats):
            if number >= 2 and self.left_s < 0:
                break
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return self.keep(
            Measurement(name=name, seconds=tuple(seconds), work=work, unit=unit, about=about or {})
        )

    def keep(self, measurement: Measurement) -> Measurement:
        """Take note of a measurement that was made elsewhere."""
        self.measured.append(measurement)
        self._say(f"{self.elapsed_s:5.1f} s  {described(measurement)}")
        return measurement

    def all(self, name: str, **about: Any) -> list[Measurement]:
        """Measurements of a name, of those with the given marks."""
        return [
            one
            for one in self.measured
            if one.name == name and all(one.about.get(key) == value for key, value in about.items())
        ]

    def one(self, name: str, **about: Any) -> Measurement | None:
        """The last of these, None if there is none."""
        found = self.all(name, **about)
        return found[-1] if found else None


def described(measurement: Measurement) -> str:
    """A line for people: `h2d, 64 MiB: 43.1 GB/s (+-3 %)`."""
    about = ", ".join(f"{key} {_short(value)}" for key, value in measurement.about.items())
    name = f"{measurement.name} ({about})" if about else measurement.name
    spread = f"spread {measurement.spread:.0%}"
    if not measurement.work:
        return f"{name}: {measurement.median_s * 1e3:.3f} ms, {spread}"
    scale, unit = _UNITS[measurement.unit]
    return f"{name}: {measurement.rate / scale:.4g} {unit}, {spread}"


_UNITS = {
    "bytes": (1e9, "GB/s"),
    "operations": (1e12, "TFLOP/s"),
    "parameters": (1e9, "Gparam/s"),
}


def _short(value: Any) -> str:
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value // 2**20} Mi"
    return str(value)
