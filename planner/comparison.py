"""Which machine for a job: `slidedp compare --preset qwen3-14b --tokens_per_step 131072`.

Plans the job for every machine and number of GPUs, and prints a table: whether it fits or why not,
tokens per second, memory, what binds, and with prices tokens per unit of money. With --upgrades
also what more of one thing would bring. Exit code 0: it fits somewhere; 1: nowhere; 2: the command
is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slidedp_jax.command_parser import WRONG_COMMAND, CommandParser
from slidedp_jax.planner.asked_job import AskedJob, asked_job
from slidedp_jax.planner.command_line import COUNTS, add_job
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, HardwareProfile, size_text
from slidedp_jax.planner.limits import Limit
from slidedp_jax.planner.machine_facts import machine_facts, of_this_machine
from slidedp_jax.planner.machine_profile import AUTO, named_profile
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.stated_machine import Stated, machine, preset_name, with_stated
from slidedp_jax.planner.step_time import StepTime
from slidedp_jax.planner.upgrades import Upgrade, upgrades
from slidedp_jax.planner.words import LANE_WORDS
from slidedp_jax.wording import columns_of, counted, say_error, short_count, wrapped

FITS, FITS_NOWHERE = 0, 1

DEFAULT_COUNTS = (1, 2, 4, 8)

LONG_WAIT = 0.05
"""Share of a step that compute waits for a lane from which on that lane binds too."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One machine for the job.

    Attributes:
      hardware: the machine.
      plan: what was found; None: nothing fits.
      limits: what does not fit, where nothing does.
      reason: the same in words, or why it cannot be planned.
      price_per_device_hour: in any currency; None: not given.
    """

    hardware: HardwareProfile
    plan: Plan | None
    limits: tuple[Limit, ...] = ()
    reason: str = ""
    price_per_device_hour: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """0 where it does not fit."""
        return 0.0 if self.plan is None else self.plan.chosen.time.tokens_per_s

    @property
    def tokens_per_unit(self) -> float | None:
        """Tokens for a unit of the currency; None without a price."""
        if self.price_per_device_hour is None:
            return None
        per_hour = self.price_per_device_hour * self.hardware.num_devices
        return 3600 * self.tokens_per_s / per_hour

    @property
    def is_measured(self) -> bool:
        """Whether the machine's figures were measured."""
        return self.hardware.provenance.startswith("measured")


def compared(
    request: AskedJob,
    machines: Sequence[HardwareProfile],
    prices: Mapping[str, float] | None = None,
) -> list[Row]:
    """The job on each machine; those where it fits first, the fastest or cheapest first.

    Args:
      request: the job.
      machines: each with its number of devices.
      prices: per device and hour, by name of the preset, or of the machine where it has none.
    """
    rows = []
    for hardware in machines:
        price = (prices or {}).get(_usual(hardware.name))
        try:
            found = request.plan(hardware)
        except PlanError as error:
            reason = "; ".join(map(_short, error.limits)) or str(error).partition("\n")[0]
            rows.append(
                Row(
                    hardware=hardware,
                    plan=None,
                    limits=error.limits,
                    reason=reason,
                    price_per_device_hour=price,
                )
            )
        else:
            rows.append(Row(hardware=hardware, plan=found, price_per_device_hour=price))
    return sorted(rows, key=_order)


def _order(row: Row) -> tuple[float, float]:
    return -(row.tokens_per_unit or 0.0), -row.tokens_per_s


def _short(limit: Limit) -> str:
    return f"{limit.name}: needs {size_text(limit.need_bytes)}, has {size_text(limit.have_bytes)}"


def binding(time: StepTime) -> str:
    """What a step's time goes by: the busiest lane, and what compute waits for."""
    waits = {
        lane: seconds / time.step_s
        for lane, seconds in time.exposed_s.items()
        if lane != "compute" and seconds > LONG_WAIT * time.step_s
    }
    text = LANE_WORDS[time.bottleneck]
    others = sorted((lane for lane in waits if lane != time.bottleneck), key=waits.__getitem__)
    return " and ".join([text, *(LANE_WORDS[lane] for lane in reversed(others))])


def main(arguments: Sequence[str] | None = None, *, prog: str = "slidedp compare") -> int:
    """Runs the command; returns its exit code."""
    args = _parser(prog).parse_whole(sys.argv[1:] if arguments is None else list(arguments))
    try:
        request = asked_job(args)
        prices = _prices(args.prices)
        machines, notes = _machines(args, prices)
    except (ValueError, FileNotFoundError) as error:
        say_error(error)
        return WRONG_COMMAND
    rows, of_job = compared(request, machines, prices), request.notes()
    better = {}
    if args.upgrades:
        better = {id(row): upgrades(request, row.hardware, row.plan) for row in rows}
    if args.json:
        found = [
            row_as_dict(row, better.get(id(row), ()), [*notes.get(row.hardware, ()), *of_job])
            for row in rows
        ]
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print("\n".join(_heading(request)))
        print("\n".join(table(rows)))
        print(wrapped(_hosts(rows), columns_of(sys.stdout), 6))
        for row in rows:
            for upgrade in better.get(id(row), ()):
                print(f"{named(row.hardware)}: {upgrade.describe()}")
        if not all(row.is_measured for row in rows):
            text = "note: figures of machines marked * are not measured: expect larger errors"
            print(wrapped(text, columns_of(sys.stdout), 6))
        of_profiles = [
            f"{named(hardware)}: {note}" for hardware, said in notes.items() for note in said
        ]
        for note in [*of_profiles, *of_job]:
            print(wrapped(f"note: {note}", columns_of(sys.stdout), 6))
    return FITS if any(row.plan for row in rows) else FITS_NOWHERE


def _parser(prog: str) -> CommandParser:
    assert __doc__ is not None
    parser = CommandParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_job(parser.add_argument_group("job"))
    group = parser.add_argument_group("machines")
    group.add_argument(
        "--hardware",
        nargs="+",
        metavar="NAME",
        help=f"some of {', '.join(PRESETS)}; default: all GPUs",
    )
    group.add_argument(
        "--hardware_profile",
        nargs="+",
        default=[],
        metavar="FILE",
        help="machines that `slidedp measure` has measured; auto: the one measured here",
    )
    group.add_argument(
        "--num_devices",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of GPUs (1 2 4 8; of a measured machine, as many as were measured)",
    )
    group.add_argument(
        "--host_memory_gib",
        type=float,
        help="memory of each host, however many GPUs; default: the usual share of the hardware",
    )
    group.add_argument(
        "--prices",
        nargs="+",
        default=[],
        metavar="NAME=PRICE",
        help="per GPU and hour, in any one currency: h100=2.5 rtx4090=0.4",
    )
    group.add_argument(
        "--upgrades", action="store_true", help="what more of one thing would bring (takes longer)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(
        weight_route=None,
        gradient_route=None,
        keep_activations=None,
        resident_state=None,
        device_memory_budget_gib=None,
        host_memory_budget_gib=None,
        **dict.fromkeys(COUNTS),
    )
    return parser


def _prices(words: Sequence[str]) -> dict[str, float]:
    prices = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf:
            raise ValueError(f"--prices has {word!r}; give NAME=PRICE with a price above 0.")
        name = _usual(name)
        if name in prices:
            raise ValueError(f"--prices names {name} twice; give one price.")
        prices[name] = price
    return prices


def _usual(name: str) -> str:
    """The preset's name of a device, or its own."""
    try:
        return preset_name(name)
    except ValueError:
        return name


def _machines(
    args: argparse.Namespace, prices: Mapping[str, float]
) -> tuple[list[HardwareProfile], dict[HardwareProfile, list[str]]]:
    """What is compared, and what is to be said of some of it."""
    names = args.hardware
    if names is None:
        names = [] if args.hardware_profile else [name for name in PRESETS if name != "cpu"]
    stated = Stated(host_memory_gib=args.host_memory_gib)
    counts = args.num_devices or DEFAULT_COUNTS
    found = [machine(name, count, stated) for name in names for count in counts]
    notes = {}
    here = machine_facts() if AUTO in args.hardware_profile else None
    for path in args.hardware_profile:
        profile = named_profile(path, here)
        for count in args.num_devices or [profile.hardware.num_devices]:
            found.append(with_stated(profile.hardware.with_devices(count), stated))
            notes[found[-1]] = profile.notes(count)
            if path == AUTO and here is not None:
                notes[found[-1]].append(of_this_machine(profile, here))
    unknown = sorted(prices.keys() - {_usual(hardware.name) for hardware in found})
    if unknown:
        raise ValueError(
            f"--prices names {', '.join(unknown)}, of which nothing is compared; compared are "
            f"{', '.join(dict.fromkeys(hardware.name for hardware in found))}."
        )
    return found, notes


def named(hardware: HardwareProfile) -> str:
    """`4 x h100`, with a mark where nothing was measured."""
    mark = "" if hardware.provenance.startswith("measured") else " *"
    return f"{hardware.num_devices} x {hardware.name}{mark}"


def _heading(request: AskedJob) -> list[str]:
    args = request.args
    job = f"{args.tokens_per_step:,} tokens per step in rows of {args.seq_length:,}"
    trained = f", {short_count(request.num_trained)} trained" if args.freeze else ""
    name = request.name or request.config.model_type
    return [f"{name} ({short_count(request.config.num_parameters)} parameters{trained}), {job}"]


def _hosts(rows: Sequence[Row]) -> str:
    """What hosts are taken to have for each GPU."""
    counts: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        hardware, count = row.hardware, row.hardware.num_devices
        share = counted(hardware.num_host_cores // count, "core")
        share += f", {size_text(hardware.host_memory_bytes / count)}"
        name = named(hardware).partition(" x ")[2]
        counts.setdefault((name, share), []).append(count)
    parts = [
        f"{', '.join(map(str, sorted(found)))} x {name}: {share}"
        for (name, share), found in counts.items()
    ]
    return f"host for each GPU: {'; '.join(parts)}"


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table for people."""
    priced = any(row.tokens_per_unit is not None for row in rows)
    price = f"{'tokens per unit':>17}" if priced else ""
    lines = [
        f"{'machine':<18}{'tokens/s':>10}{'step s':>9}{'GPU GiB':>10}{'host GiB':>10}{price}  "
    ]
    lines[0] += "binds"
    for row in rows:
        name = f"{named(row.hardware):<18}"
        if row.plan is None:
            lines.append(f"{name}{'-':>10}  {row.reason}")
            continue
        time, memory = row.plan.chosen.time, row.plan.chosen.memory
        unit = row.tokens_per_unit
        price = "" if not priced else f"{'-' if unit is None else short_count(unit):>17}"
        lines.append(
            f"{name}{time.tokens_per_s:>10,.0f}{time.step_s:>9.3g}"
            f"{memory.device_bytes / GIB:>10.1f}{memory.host_bytes / GIB:>10,.0f}{price}  "
            f"{binding(time)}"
        )
    return lines


def row_as_dict(
    row: Row, better: Sequence[Upgrade] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
    """A row for JSON; SI units, named in the keys."""
    result: dict[str, Any] = {
        "hardware": row.hardware.name,
        "num_devices": row.hardware.num_devices,
        "provenance": row.hardware.provenance,
        "fits": row.plan is not None,
        "price_per_device_hour": row.price_per_device_hour,
        "tokens_per_unit": row.tokens_per_unit,
        "num_host_cores": row.hardware.num_host_cores,
        "host_memory_bytes": row.hardware.host_memory_bytes,
        "notes": list(notes),
    }
    if row.plan is None:
        result["reason"] = row.reason
    else:
        time, memory = row.plan.chosen.time, row.plan.chosen.memory
        result |= {
            "tokens_per_s": time.tokens_per_s,
            "step_s": time.step_s,
            "device_bytes": memory.device_bytes,
            "host_bytes": memory.host_bytes,
            "binds": binding(time),
            "busy_s": dict(time.busy_s),
        }
    if better:
        result["upgrades"] = [
            {"what": one.what, "tokens_per_s": one.tokens_per_s, "gain": one.gain} for one in better
        ]
    return result


if __name__ == "__main__":
    sys.exit(main())
