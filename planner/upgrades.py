"""What more of one thing would bring to a job: host memory, cores, links, GPUs or their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from slidedp_jax.planner.asked_job import AskedJob
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import HardwareProfile, LinkRate
from slidedp_jax.planner.search import NEARLY, Plan

FACTOR = 2
"""Of everything that there is more of."""


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """One change of a machine.

    Attributes:
      what: in words.
      tokens_per_s: with it; 0: the job still does not fit.
      before: tokens per second without it; 0: the job does not fit.
    """

    what: str
    tokens_per_s: float
    before: float

    @property
    def gain(self) -> float | None:
        """Share of tokens per second that it adds; None where there are none without.

        The search takes what is nearly the fastest: a loss within that is none.
        """
        if not self.before:
            return None
        gain = self.tokens_per_s / self.before - 1
        return 0.0 if 1 / NEARLY - 1 <= gain < 0 else gain

    def describe(self) -> str:
        """One line."""
        if not self.tokens_per_s:
            return f"{self.what}: still does not fit"
        gain = "fits then" if self.gain is None else f"{self.gain:+.0%}"
        return f"{self.what}: {self.tokens_per_s:,.0f} tokens/s ({gain})"


def upgrades(request: AskedJob, hardware: HardwareProfile, plan: Plan | None) -> list[Upgrade]:
    """Each of the changes alone, the one that brings most first.

    Args:
      request: the job.
      hardware: the machine.
      plan: the job's on it; None: it does not fit.
    """
    before = 0.0 if plan is None else plan.chosen.time.tokens_per_s
    found = [
        Upgrade(what=what, tokens_per_s=_tokens_per_s(request, change(hardware)), before=before)
        for what, change in CHANGES.items()
    ]
    return sorted(found, key=lambda upgrade: -upgrade.tokens_per_s)


def _tokens_per_s(request: AskedJob, hardware: HardwareProfile) -> float:
    try:
        return request.plan(hardware).chosen.time.tokens_per_s
    except PlanError:
        return 0.0


def _more_host_memory(hardware: HardwareProfile) -> HardwareProfile:
    return replace(hardware, host_memory_bytes=FACTOR * hardware.host_memory_bytes)


def _faster_host(hardware: HardwareProfile) -> HardwareProfile:
    """Cores and channels: the update is bound by memory."""
    return replace(
        hardware,
        num_host_cores=FACTOR * hardware.num_host_cores,
        host_memory_bytes_per_s=FACTOR * hardware.host_memory_bytes_per_s,
        host_update_params_per_s=FACTOR * hardware.host_update_params_per_s,
    )


def _faster_links(hardware: HardwareProfile) -> HardwareProfile:
    def faster(link: LinkRate) -> LinkRate:
        return LinkRate(points=tuple((size, FACTOR * rate) for size, rate in link.points))

    through_host = hardware.gather_bytes_per_s < hardware.h2d.points[-1][1]
    return replace(
        hardware,
        h2d=faster(hardware.h2d),
        d2h=faster(hardware.d2h),
        duplex_bytes_per_s=FACTOR * hardware.duplex_bytes_per_s,
        gather_bytes_per_s=hardware.gather_bytes_per_s * (FACTOR if through_host else 1),
    )


def _more_device_memory(hardware: HardwareProfile) -> HardwareProfile:
    return replace(hardware, device_memory_bytes=FACTOR * hardware.device_memory_bytes)


def _more_devices(hardware: HardwareProfile) -> HardwareProfile:
    """In the same host: its cores, memory and bandwidth stay."""
    more = hardware.with_devices(FACTOR * hardware.num_devices)
    return replace(
        more,
        num_host_cores=hardware.num_host_cores,
        host_memory_bytes=hardware.host_memory_bytes,
        host_memory_bytes_per_s=hardware.host_memory_bytes_per_s,
        host_update_params_per_s=hardware.host_update_params_per_s,
    )


CHANGES: Mapping[str, Callable[[HardwareProfile], HardwareProfile]] = {
    "twice the host memory": _more_host_memory,
    "twice the host's cores and memory channels": _faster_host,
    "links twice as fast": _faster_links,
    "twice the memory of each GPU": _more_device_memory,
    "twice the GPUs in the same host": _more_devices,
}
"""In words -> the machine with it."""
