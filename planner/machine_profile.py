"""A machine's measured profile: a JSON file of `slidedp measure`, read and compared.

The file holds the `HardwareProfile` that plans use, the machine that it belongs to, and the raw
samples behind it. Rates belong to one machine with its drivers and limits: what differs here from
there is said (`differences`), and the profile is used all the same, because it was asked for.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slidedp_jax.planner.hardware import GIB, HardwareProfile, LinkRate
from slidedp_jax.wording import counted

FORMAT = 1
"""Number of the form of the file; another is refused."""

AUTO = "auto"
"""In place of a path: the profile that `slidedp measure` wrote for this machine."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a profile belongs to.

    Attributes:
      device_kind: as JAX spells it.
      num_devices: that were measured together.
      driver: of the GPUs; None: they are none, or it is not known.
      versions: of JAX and of what computes beneath it, by package.
      processor: the host's, as the kernel spells it.
      num_cores: that the process may use.
      memory_limits: bytes by bound: physical memory and control groups.
      numa_nodes: node -> cores.
    """

    device_kind: str
    num_devices: int
    driver: str | None
    versions: Mapping[str, str]
    processor: str
    num_cores: int
    memory_limits: Mapping[str, float]
    numa_nodes: Mapping[str, str]

    @property
    def file_name(self) -> str:
        """Of this machine's profile among those of a user: `nvidia-h200-x2-32-cores.json`."""
        kind = re.sub(r"[^a-z0-9]+", "-", self.device_kind.lower()).strip("-")
        return f"{kind}-x{self.num_devices}-{self.num_cores}-cores.json"


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """A measured machine.

    Attributes:
      hardware: for plans.
      machine: what it belongs to.
      date: of the measurement, ISO 8601.
      assumed: fields of `hardware` that were not measured, and where they come from.
      source: path of the file.
    """

    hardware: HardwareProfile
    machine: Machine
    date: str
    assumed: Mapping[str, str]
    source: str

    def notes(self, num_devices: int) -> list[str]:
        """What was measured, when, the file, and what was not; `num_devices` are planned for."""
        machine, measured = self.machine, self.hardware.num_devices
        found = [
            f"rates as measured on {self.date[:10]} with {machine.num_devices} x "
            f"{machine.device_kind} and {counted(machine.num_cores, 'core')} ({self.source})"
        ]
        if num_devices != measured:
            found.append(
                f"{self.source} was measured with {counted(measured, 'device')}; the host's share "
                f"of {num_devices} is taken in proportion, and what passes between them is a guess"
            )
        if self.assumed:
            found.append(f"not measured, but assumed: {', '.join(sorted(self.assumed))}")
        return found

    def identity(self) -> dict[str, Any]:
        """What a run records of it, the rates that its plan is made of included."""
        return {
            "file": self.source,
            "date": self.date,
            "machine": asdict(self.machine),
            "hardware": hardware_record(self.hardware),
            "assumed": dict(self.assumed),
        }


def profiles_folder() -> Path:
    """Where profiles lie by default: `$XDG_CACHE_HOME` or `~/.cache`, `slidedp_jax/profiles`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "slidedp_jax" / "profiles"


def hardware_record(hardware: HardwareProfile) -> dict[str, Any]:
    """A profile's fields for JSON."""
    return asdict(hardware)


def hardware_recorded(values: Mapping[str, Any]) -> HardwareProfile:
    """The profile that `hardware_record` wrote.

    Raises:
      ValueError: fields are missing, unknown or no numbers.
    """
    known = {field.name for field in fields(HardwareProfile)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"its hardware has {', '.join(unknown)}, which this version lacks")
    links = {
        name: LinkRate(points=tuple((float(size), float(rate)) for size, rate in points))
        for name in ("h2d", "d2h")
        for points in [values[name]["points"]]
    }
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"its hardware has {name} {value}")
    return HardwareProfile(**{**values, **links})


def read_profile(path: Path | str) -> MachineProfile:
    """Read a file that `slidedp measure` wrote.

    Raises:
      ValueError: there is none, or it is no profile; the message names it.
    """
    path = Path(path).expanduser()
    try:
        record = json.loads(path.read_bytes().decode())
        if record["format"] != FORMAT:
            raise ValueError(f"it is of form {record['format']}, this version reads {FORMAT}")
        return MachineProfile(
            hardware=hardware_recorded(record["hardware"]),
            machine=Machine(**record["machine"]),
            date=str(record["date"]),
            assumed=dict(record["assumed"]),
            source=str(path),
        )
    except OSError as error:
        raise ValueError(
            f"the hardware profile {path} cannot be read ({error.strerror}); `slidedp measure "
            "--out FILE` writes one"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is no profile of `slidedp measure` that this version reads: {why}. Measure "
            "again"
        ) from None


def named_profile(named: Path | str, here: Machine | None) -> MachineProfile:
    """The profile of a file, or with `auto` what `slidedp measure` has written here.

    That is the only one, or of several the only one of this machine's device, processor and cores;
    if there are several of those, the one with as many devices. Files that are none are left out.

    Args:
      named: a path, or `auto`.
      here: this machine; needed for `auto` alone.

    Raises:
      ValueError: there is none, or several, which are named.
    """
    if str(named) != AUTO:
        return read_profile(named)
    found = sorted(profiles_folder().glob("*.json"))
    if len(found) > 1 and here is not None:
        found = _of_this_machine(found, here) or found
    if len(found) != 1:
        names = ", ".join(map(str, found))
        raise ValueError(
            f"several machines have been measured: {names}; name one of these files"
            if found
            else f"no machine has been measured here ({profiles_folder()}): `slidedp measure`"
        )
    return read_profile(found[0])


def _of_this_machine(files: Collection[Path], here: Machine) -> list[Path]:
    """The profiles among these files that are of this machine, best of as many devices."""
    machines: dict[Path, Machine] = {}
    for path in files:
        with contextlib.suppress(ValueError):
            machines[path] = read_profile(path).machine
    own = [path for path, machine in machines.items() if _is_of(machine, here)]
    exact = [path for path in own if machines[path].num_devices == here.num_devices]
    return exact or own


def _is_of(profile: Machine, here: Machine) -> bool:
    names = ("device_kind", "processor", "num_cores")
    return all(getattr(profile, name) == getattr(here, name) for name in names)


def differences(profile: Machine, here: Machine, *, but: Collection[str] = ()) -> list[str]:
    """In what this machine differs from the one of a profile, a line each.

    Args:
      profile: the machine of the profile.
      here: this machine.
      but: names of attributes that may differ.
    """
    found = []
    for name, word in _COMPARED.items():
        there, now = getattr(profile, name), getattr(here, name)
        if there != now and name not in but:
            found.append(f"{word}: measured with {there}, here {now}")
    packages = sorted(profile.versions.keys() | here.versions.keys())
    for package in packages:
        there, now = profile.versions.get(package), here.versions.get(package)
        if there != now:
            found.append(f"{package}: measured with {there or 'none'}, here {now or 'none'}")
    there, now = (min(machine.memory_limits.values()) for machine in (profile, here))
    if abs(there - now) > 0.02 * max(there, now):
        found.append(
            f"host memory (physical, or a control group's): measured with {there / GIB:.1f} GiB, "
            f"here {now / GIB:.1f} GiB"
        )
    return found


_COMPARED = {
    "device_kind": "device",
    "num_devices": "number of devices",
    "driver": "driver",
    "processor": "processor",
    "num_cores": "cores",
    "numa_nodes": "NUMA nodes",
}
