"""What a search is about, and what a strategy costs in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.limits import Limit, exceeded_limits
from slidedp_jax.planner.memory import MemoryUse, device_bytes, host_bytes, memory_use
from slidedp_jax.planner.step_time import StepTime, lower_bound_s, step_s, step_time
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

_Prediction = TypeVar("_Prediction")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A strategy that fits, with its prediction."""

    strategy: Strategy
    memory: MemoryUse
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A strategy that fits, with what is compared while searching.

    Attributes:
      strategy: the strategy.
      step_s: its step, simulated.
    """

    strategy: Strategy
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was asked of strategies before: searches come by the same ones, under other budgets too.

    Attributes:
      device_bytes: what they take of each device.
      host_bytes: what they take of the host.
      step_s: how long their steps take.
    """

    device_bytes: dict[Strategy, float] = field(default_factory=dict)
    host_bytes: dict[Strategy, float] = field(default_factory=dict)
    step_s: dict[Strategy, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, a batch and a machine with budgets.

    Attributes:
      workload: the model.
      batch: rows of a step.
      hardware: the host and its devices.
      optimizer_state_bytes: optimizer state per trained parameter in bytes.
      device_budget_bytes: what each device is allowed.
      host_budget_bytes: what the host is allowed.
      seen: answers for the same model, batch and machine.
    """

    workload: Workload
    batch: BatchShape
    hardware: HardwareProfile
    optimizer_state_bytes: float
    device_budget_bytes: float
    host_budget_bytes: float
    seen: Seen = field(default_factory=Seen, repr=False, compare=False)

    def memory(self, strategy: Strategy) -> MemoryUse:
        """What the strategy takes."""
        return self._predicted(memory_use, strategy)

    def device_bytes(self, strategy: Strategy) -> float:
        """What the strategy takes of each device; cheaper than `memory`."""
        seen = self.seen.device_bytes
        if strategy not in seen:
            seen[strategy] = self._predicted(device_bytes, strategy)
        return seen[strategy]

    def fits_devices(self, strategy: Strategy) -> bool:
        """Whether each device has room for the strategy."""
        return self.device_bytes(strategy) <= self.device_budget_bytes

    def host_bytes(self, strategy: Strategy) -> float:
        """What the strategy takes of the host; cheaper than `memory`."""
        seen = self.seen.host_bytes
        if strategy not in seen:
            seen[strategy] = self._predicted(host_bytes, strategy)
        return seen[strategy]

    def fits_host(self, strategy: Strategy) -> bool:
        """Whether the host has room for the strategy."""
        return self.host_bytes(strategy) <= self.host_budget_bytes

    def fits(self, strategy: Strategy) -> bool:
        """Whether devices and host have room for the strategy."""
        return self.fits_devices(strategy) and self.fits_host(strategy)

    def limits(self, memory: MemoryUse) -> tuple[Limit, ...]:
        """The budgets that it exceeds."""
        return exceeded_limits(memory, self.device_budget_bytes, self.host_budget_bytes)

    def lower_bound_s(self, strategy: Strategy) -> float:
        """Seconds that a step takes at least; cheaper than `timed`."""
        durations = self._predicted(chunk_durations, strategy)
        return lower_bound_s(durations, strategy, self.hardware)

    def time(self, strategy: Strategy) -> StepTime:
        """The step, simulated."""
        return self._predicted(step_time, strategy)

    def timed(self, strategy: Strategy) -> Timed:
        """The strategy with the time of its step; cheaper than `alternative`."""
        seen = self.seen.step_s
        if strategy not in seen:
            seen[strategy] = self._predicted(step_s, strategy)
        return Timed(strategy=strategy, step_s=seen[strategy])

    def alternative(self, strategy: Strategy) -> Alternative:
        """The strategy with its prediction."""
        return Alternative(
            strategy=strategy, memory=self.memory(strategy), time=self.time(strategy)
        )

    def _predicted(self, model: Callable[..., _Prediction], strategy: Strategy) -> _Prediction:
        """What one of the planner's models says of a strategy."""
        return model(
            self.workload,
            self.batch,
            strategy,
            self.hardware,
            optimizer_state_bytes=self.optimizer_state_bytes,
        )
