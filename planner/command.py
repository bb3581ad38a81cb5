"""Plan a run without the hardware: `slidedp plan --preset qwen3-8b --hardware h200 ...`.

Prints memory by category, disk, step time and strategy; where nothing fits, what would. Exit code
0: it fits; 1: it does not; 2: the command is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slidedp_jax.command_parser import WRONG_COMMAND
from slidedp_jax.planner.asked_job import ROUTES, AskedJob, asked_job
from slidedp_jax.planner.command_line import COUNTS, parse
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.machine_facts import machine_facts, of_this_machine
from slidedp_jax.planner.machine_profile import AUTO, named_profile
from slidedp_jax.planner.nearest_fits import MemoryFlags, larger_memories, more_devices
from slidedp_jax.planner.optimizers import WHOLE_PARAMETER_OPTIMIZERS, OptimizerName
from slidedp_jax.planner.report import Completion, limit_as_dict, plan_as_dict, plan_as_text
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.stated_choices import cost_of_choices
from slidedp_jax.planner.stated_machine import Stated, host_line, machine, with_stated
from slidedp_jax.planner.ways_out import fewer_rows, halves, leaner_optimizers, shorter_rows
from slidedp_jax.wording import columns_of, say_error, wrapped

FITS, DOES_NOT_FIT = 0, 1

_PERMISSIONS = ("keep_activations", "resident_state")


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m planner") -> int:
    """Runs the command; returns its exit code."""
    args = parse(sys.argv[1:] if arguments is None else list(arguments), prog)
    try:
        request = _request(args)
        completion, disk = _completion(args), request.job.disk()
    except (ValueError, FileNotFoundError) as error:
        say_error(error)
        return WRONG_COMMAND
    try:
        found = request.plan()
    except PlanError as error:
        if error.request is None:  # no machine would do
            say_error(error)
            return WRONG_COMMAND
        return _does_not_fit(request, error)
    slower = cost_of_choices(found, request.stated_choices, lambda: request.plan(free=True))
    more = [*request.notes, *request.job.notes()]
    if args.json:
        result = plan_as_dict(found, completion, disk=disk, more_notes=[*slower, *more])
        whole = {"fits": True, "assumed": request.assumed, **result}
        print(json.dumps(whole, indent=2, allow_nan=False))
        return FITS
    text = plan_as_text(found, completion, disk=disk, assumed=request.assumed, more_notes=slower)
    print(wrapped(text, columns_of(sys.stdout)))
    for note in more:
        _note(note)
    return FITS


def _note(text: str) -> None:
    print(wrapped(f"note: {text}", columns_of(sys.stdout), 6))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is to be planned, and for which machine.

    Attributes:
      job: what.
      hardware: the machine.
      machine: the same with another number of devices.
      stated: what has been stated of it.
      notes: what should be said of the machine.
    """

    job: AskedJob
    hardware: HardwareProfile
    machine: Callable[[int], HardwareProfile]
    stated: Stated
    notes: list[str]

    @property
    def args(self) -> argparse.Namespace:
        """The words of the command."""
        return self.job.args

    @property
    def assumed(self) -> list[str]:
        """Attributes of the machine that nobody has stated."""
        if self.args.hardware_profile is not None:
            return []
        names = set(Stated.__dataclass_fields__) - self.stated.names
        if self.hardware.num_hosts == 1:
            names.discard("network_gb_per_s")
        return [name for name in Stated.__dataclass_fields__ if name in names]

    @property
    def stated_choices(self) -> dict[str, object]:
        """What has been decided of the strategy, by flag."""
        names = (*ROUTES, *COUNTS, *_PERMISSIONS)
        return {f"--{name}": getattr(self.args, name) for name in names}

    def plan(self, *, free: bool = False) -> Plan:
        """The plan, or that `free` of what was decided.

        Raises:
          PlanError: nothing fits.
        """
        return self.job.plan(self.hardware, free=free)

    def with_optimizer(self, name: OptimizerName) -> Plan:
        """The plan with another optimizer.

        Raises:
          PlanError: nothing fits, or it does not go with what is stated.
        """
        if self.args.resident_state and name in WHOLE_PARAMETER_OPTIMIZERS:
            raise PlanError(f"--resident_state is not for --optim {name}")
        return self.job.plan(self.hardware, optimizer=name)


def _request(args: argparse.Namespace) -> _Request:
    """Check the words of the command.

    Raises:
      ValueError: one of them is wrong.
      FileNotFoundError: there is no such model.
    """
    job, stated = asked_job(args), _stated(args)
    grown, count, notes = _machine(args, stated)
    hardware = grown(count)
    args.num_devices = count
    return _Request(job=job, hardware=hardware, machine=grown, notes=notes, stated=stated)


def _ways_out(request: _Request, error: PlanError) -> list[str]:
    """What would fit, each tried; none where the request itself is wrong."""
    args, refused, ways = request.args, error.request, list[str]()
    if refused is None:
        return []
    if request.job.optimizer is not None and "host memory" in {
        limit.name for limit in error.limits
    }:
        ways += leaner_optimizers(request.job.optimizer, request.with_optimizer)
    num_rows = args.tokens_per_step // args.seq_length
    steps = [
        (rows, f"--tokens_per_step {rows * args.seq_length}")
        for rows in halves(num_rows, args.num_devices * args.num_hosts)
    ]
    ways += fewer_rows(refused, steps)
    ways += shorter_rows(refused, lambda length: _shorter_flags(args, num_rows, length))
    flags = MemoryFlags(
        host="--host_memory_gib",
        device="--device_memory_gib",
        host_budget="--host_memory_budget_gib",
        device_budget="--device_memory_budget_gib",
        host_budget_is_stated=args.host_memory_budget_gib is not None,
        device_budget_is_stated=args.device_memory_budget_gib is not None,
    )
    ways += larger_memories(refused, error.limits, flags)
    if args.device_memory_budget_gib is None and args.host_memory_budget_gib is None:
        ways += more_devices(
            refused,
            request.machine,
            "--num_devices",
        )
    return ways


def _shorter_flags(args: argparse.Namespace, num_rows: int, length: int) -> str:
    flags = f"--seq_length {length} --tokens_per_step {num_rows * length}"
    if args.document_length is not None and args.document_length > length:
        flags += f" --document_length {length}"
    return flags


def _machine(
    args: argparse.Namespace, stated: Stated
) -> tuple[Callable[[int], HardwareProfile], int, list[str]]:
    """The machine by its number of devices, how many are asked for, and what should be said."""
    if args.hardware_profile is None:
        count = 1 if args.num_devices is None else args.num_devices
        return partial(machine, args.hardware, stated=stated, num_hosts=args.num_hosts), count, []
    here = machine_facts() if args.hardware_profile == AUTO else None
    profile = named_profile(args.hardware_profile, here)
    count = profile.hardware.num_devices if args.num_devices is None else args.num_devices

    def grown(number: int) -> HardwareProfile:
        hosts = replace(profile.hardware.with_devices(number), num_hosts=args.num_hosts)
        return with_stated(hosts, stated)

    notes = profile.notes(count)
    if here is not None:
        notes.append(of_this_machine(profile, here))
    return grown, count, notes


def _does_not_fit(request: _Request, error: PlanError) -> int:
    """Say what does not fit, and what would."""
    args, ways = request.args, _ways_out(request, error)
    line = host_line(request.hardware, request.assumed)
    if args.json:
        found = {
            "fits": False,
            "assumed": request.assumed,
            "message": str(error),
            "limits": [limit_as_dict(limit) for limit in error.limits],
            "ways_out": ways,
        }
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        also = ["Also tried:", *(f"- {way}." for way in ways)] if ways else []
        text = "\n".join([str(error), *also, line])
        print(wrapped(text, columns_of(sys.stderr)), file=sys.stderr)
    return DOES_NOT_FIT


def _completion(args: argparse.Namespace) -> Completion | None:
    if args.total_tokens is None:
        if args.price_per_device_hour is not None:
            raise ValueError("--price_per_device_hour needs --total_tokens.")
        return None
    if args.total_tokens < 1:
        raise ValueError(f"--total_tokens is {args.total_tokens}; it must be at least 1.")
    price = args.price_per_device_hour
    if price is not None and not 0 <= price < math.inf:
        raise ValueError(f"--price_per_device_hour is {price}; give a number, 0 or more.")
    return Completion(total_tokens=args.total_tokens, price_per_device_hour=price)


def _stated(args: argparse.Namespace) -> Stated:
    host_memory_gib = None
    if args.host_memory_gib == "here":
        memory = available_host_memory()
        print(f"host memory: {memory.describe()}", file=sys.stderr)
        host_memory_gib = memory.available_bytes / GIB
    elif args.host_memory_gib is not None:
        try:
            host_memory_gib = float(args.host_memory_gib)
        except ValueError:
            raise ValueError(
                f"--host_memory_gib is {args.host_memory_gib!r}; give a number above 0, or 'here'."
            ) from None
    return Stated(
        host_cores=args.host_cores,
        host_memory_gib=host_memory_gib,
        link_gb_per_s=args.link_gb_per_s,
        device_memory_gib=args.device_memory_gib,
        network_gb_per_s=args.network_gb_per_s,
    )
