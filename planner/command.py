"""Plan a run without the hardware: `slidedp plan --preset qwen3-8b --hardware h200 ...`.

Prints memory by category, disk, step time and strategy; where nothing fits, what would. Exit code
0: it fits; 1: it does not; 2: the command is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from slidedp_jax.command_parser import WRONG_COMMAND
from slidedp_jax.planner.command_line import parse
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.machine_profile import named_profile
from slidedp_jax.planner.report import Completion, limit_as_dict, plan_as_dict, plan_as_text
from slidedp_jax.planner.request import Request, request_of
from slidedp_jax.planner.stated_machine import Stated, host_line, machine, with_stated
from slidedp_jax.planner.ways_out import fewer_rows, halves, leaner_optimizers
from slidedp_jax.planner.whole_updates import whole_update_note
from slidedp_jax.wording import columns_of, counted, say_error, short_count, wrapped

FITS, DOES_NOT_FIT = 0, 1


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m planner") -> int:
    """Runs the command; returns its exit code."""
    args = parse(sys.argv[1:] if arguments is None else list(arguments), prog)
    try:
        request = request_of(args)
        stated = _stated(args)
        hardware, machine_notes = _machine(args, stated)
        completion, disk = _completion(args), request.disk()
    except (ValueError, FileNotFoundError) as error:
        say_error(error)
        return WRONG_COMMAND
    assumed = [
        name
        for name in Stated.__dataclass_fields__
        if args.hardware_profile is None and name not in stated.names
    ]
    try:
        found = request.plan(hardware)
    except PlanError as error:
        return _does_not_fit(request, hardware, assumed, error)
    if args.json:
        result = plan_as_dict(found, completion, disk=disk)
        result["notes"] += machine_notes
        print(json.dumps({"fits": True, "assumed": assumed, **result}, indent=2))
        return FITS
    text = plan_as_text(found, completion, disk=disk, assumed=assumed)
    print(wrapped(text, columns_of(sys.stdout)))
    for note in machine_notes:
        _note(note)
    if frozen := len(request.config.parameter_shapes()) - len(request.trained):
        _note(
            f"{counted(frozen, 'parameter array')} frozen, {short_count(request.num_trained)} of "
            f"{short_count(request.config.num_parameters)} parameters trained; time and gradients "
            "are predicted as if all were"
        )
    if (of_update := whole_update_note(request.optimizer)) is not None:
        _note(of_update)
    return FITS


def _note(text: str) -> None:
    print(wrapped(f"note: {text}", columns_of(sys.stdout), 6))


def _machine(args: argparse.Namespace, stated: Stated) -> tuple[HardwareProfile, list[str]]:
    """The machine that is planned for, and what should be said of it."""
    if args.hardware_profile is None:
        return machine(
            args.hardware, 1 if args.num_devices is None else args.num_devices, stated
        ), []
    profile = named_profile(args.hardware_profile)
    measured = profile.hardware.num_devices
    count = measured if args.num_devices is None else args.num_devices
    notes = []
    if count != measured:
        notes.append(
            f"{profile.source} was measured with {counted(measured, 'device')}; the host's share "
            f"of {count} is taken in proportion, and what passes between them is a guess"
        )
    if profile.assumed:
        notes.append(f"not measured, but assumed: {', '.join(sorted(profile.assumed))}")
    return with_stated(profile.hardware.with_devices(count), stated), notes


def _does_not_fit(
    request: Request, hardware: HardwareProfile, assumed: list[str], error: PlanError
) -> int:
    """Say what does not fit, and what would."""
    args, limits = request.args, {limit.name for limit in error.limits}
    ways: list[str] = []
    if "host memory" in limits and request.optimizer is not None:
        ways += leaner_optimizers(
            request.optimizer, lambda name: request.plan(hardware, optimizer=name)
        )
    steps = [
        (rows, f"--tokens_per_step {rows * args.seq_length}")
        for rows in halves(args.tokens_per_step // args.seq_length, hardware.num_devices)
    ]
    if limits:
        ways += fewer_rows(
            steps, args.seq_length, lambda rows: request.plan(hardware, num_rows=rows)
        )
    line = host_line(hardware, assumed)
    if args.json:
        found = {
            "fits": False,
            "assumed": assumed,
            "message": str(error),
            "limits": [limit_as_dict(limit) for limit in error.limits],
            "ways_out": ways,
        }
        print(json.dumps(found, indent=2))
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
    return Completion(
        total_tokens=args.total_tokens, price_per_device_hour=args.price_per_device_hour
    )


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
    )
