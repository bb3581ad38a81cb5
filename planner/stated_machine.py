"""A preset of a machine, with what the user says about it in place of what is assumed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from slidedp_jax.planner.hardware import (
    GIB,
    HOST_UPDATE_GROWTH,
    HardwareProfile,
    LinkRate,
    size_text,
)
from slidedp_jax.planner.presets import PRESETS, preset_of_kind
from slidedp_jax.planner.process_limits import usable_device_bytes
from slidedp_jax.wording import counted


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What is known of a machine; None: as the preset has it.

    Attributes:
      host_cores: cores that the job may use.
      host_memory_gib: host memory in GiB.
      link_gb_per_s: 1e9 bytes per second of large copies to one GPU, and as many back.
      device_memory_gib: memory of one GPU in GiB.
      network_gb_per_s: 1e9 bytes per second that collectives bring into each host from the others.
    """

    host_cores: int | None = None
    host_memory_gib: float | None = None
    link_gb_per_s: float | None = None
    device_memory_gib: float | None = None
    network_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name} is {value}; give a number above 0.")

    @property
    def names(self) -> set[str]:
        """Names of what is known."""
        return {name for name in self.__dataclass_fields__ if getattr(self, name) is not None}


_OF_THE_HOST = ("host_cores", "host_memory_gib", "link_gb_per_s")


def machine(name: str, num_devices: int, stated: Stated, *, num_hosts: int = 1) -> HardwareProfile:
    """A preset grown to a number of GPUs, with what is stated.

    Fewer cores than the preset has update parameters in proportion, which is the worst case; more
    are worth as much as measured (`HOST_UPDATE_GROWTH`). Another link keeps the shape of the
    preset's over the size of copies, and what goes through the host scales with it.

    Args:
      name: of a preset, or as its maker or JAX spells the device.
      num_devices: GPUs of the job, on each host.
      stated: what is known, of the whole host.
      num_hosts: as many hosts.

    Raises:
      ValueError: there is no such preset; the nearest ones are given.
    """
    return with_stated(
        replace(PRESETS[preset_name(name)].with_devices(num_devices), num_hosts=num_hosts), stated
    )


def with_stated(profile: HardwareProfile, stated: Stated) -> HardwareProfile:
    """A machine with what is stated of it in place of what its profile says."""
    if stated.network_gb_per_s is not None:
        profile = replace(profile, network_bytes_per_s=stated.network_gb_per_s * 1e9)
    if stated.host_cores is not None:
        share = stated.host_cores / profile.num_host_cores
        profile = replace(
            profile,
            num_host_cores=stated.host_cores,
            host_update_params_per_s=profile.host_update_params_per_s
            * (share if share < 1 else share**HOST_UPDATE_GROWTH),
        )
    if stated.host_memory_gib is not None:
        profile = replace(
            profile,
            host_memory_bytes=stated.host_memory_gib * GIB,
            stated_pinned_limit_bytes=None,  # of the memory before
        )
    if stated.device_memory_gib is not None:
        usable = usable_device_bytes(stated.device_memory_gib * GIB, profile.device_reserve_bytes)
        profile = replace(profile, device_memory_bytes=usable)
    if stated.link_gb_per_s is not None:
        profile = _with_link(profile, stated.link_gb_per_s * 1e9)
    return profile


def host_line(hardware: HardwareProfile, assumed: Collection[str] = ()) -> str:
    """The host that a plan is for, and which flags say otherwise.

    Args:
      hardware: the machine.
      assumed: attributes of `Stated` that nobody has stated.
    """
    parts = [counted(hardware.num_host_cores, "core"), size_text(hardware.host_memory_bytes)]
    if not hardware.unified_memory:
        up, down = (f"{link.points[-1][1] / 1e9:.0f}" for link in (hardware.h2d, hardware.d2h))
        back = "back" if up == down else f"{down} GB/s back"
        parts.append(f"{up} GB/s to each GPU and {back}")
    of_host: tuple[str, ...] = _OF_THE_HOST
    if hardware.num_hosts > 1:
        parts.append(f"{hardware.network_bytes_per_s / 1e9:.3g} GB/s from the other hosts")
        of_host = (*of_host, "network_gb_per_s")
    flags = [f"--{name}" for name in of_host if name in assumed]
    end = f" (assumed; {', '.join(flags)})" if flags else ""
    each = "host" if hardware.num_hosts == 1 else "each host"
    return f"{each}: {', '.join(parts)}{end}"


def _with_link(profile: HardwareProfile, bytes_per_s: float) -> HardwareProfile:
    through_host = profile.gather_bytes_per_s < profile.h2d.points[-1][1]
    up, down = (link.points[-1][1] for link in (profile.h2d, profile.d2h))
    both = 2 * bytes_per_s / (up + down)

    def scaled(link: LinkRate) -> LinkRate:
        faster = bytes_per_s / link.points[-1][1]
        return LinkRate(points=tuple((size, rate * faster) for size, rate in link.points))

    return replace(
        profile,
        h2d=scaled(profile.h2d),
        d2h=scaled(profile.d2h),
        duplex_bytes_per_s=profile.duplex_bytes_per_s * both,
        gather_bytes_per_s=profile.gather_bytes_per_s * (both if through_host else 1),
    )


def preset_name(name: str) -> str:
    """The name of a preset, also as its maker or JAX spells the device.

    Raises:
      ValueError: there is no such preset; the nearest ones are given.
    """
    if (own := preset_of_kind(name)) is not None:
        return own.name
    found = {_letters(preset): preset for preset in PRESETS}
    if _letters(name) in found:
        return found[_letters(name)]
    given = _letters(name)
    near = [preset for key, preset in found.items() if given and key.startswith(given)]
    near = near or [found[key] for key in difflib.get_close_matches(given, found, n=2, cutoff=0.5)]
    hint = ""
    if near:
        hint = (
            f" The nearest by name: {', '.join(near)}; with the --device_memory_gib, --host_cores "
            "and --link_gb_per_s of `slidedp plan` one of them may do as a first guess."
        )
    raise ValueError(
        f"No hardware preset is named {name!r}; known: {', '.join(sorted(PRESETS))}.{hint}"
    )


def _letters(name: str) -> str:
    return re.sub("nvidia|geforce|[^a-z0-9]", "", name.lower())
