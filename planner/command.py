"""Plan a run without the hardware: `python -m planner --model_config DIR --hardware h200 ...`.

Prints memory by category, step time and strategy. Exit code 0: it fits; 1: it does not; 2: the
command is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slidedp_jax.models.config import config_names, named_config
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import (
    COMPUTE_DTYPES,
    GIB,
    PRESETS,
    HardwareProfile,
    named_hardware,
)
from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.memory import ADAMW_STATE_BYTES
from slidedp_jax.planner.report import Completion, plan_as_dict, plan_as_text
from slidedp_jax.planner.search import Plan, plan
from slidedp_jax.planner.strategy import GRADIENT_ROUTES, WEIGHT_ROUTES
from slidedp_jax.planner.workload import BatchShape, Workload

FITS, DOES_NOT_FIT, WRONG_COMMAND = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = _parser().parse_args(arguments)
    try:
        found = _plan(args)
    except PlanError as error:
        print(error, file=sys.stderr)
        return DOES_NOT_FIT
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_COMMAND
    completion = None
    if args.total_tokens is not None:
        completion = Completion(
            total_tokens=args.total_tokens, price_per_device_hour=args.price_per_device_hour
        )
    if args.json:
        print(json.dumps(plan_as_dict(found, completion), indent=2))
    else:
        print(plan_as_text(found, completion))
    return FITS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m planner",
        allow_abbrev=False,
        description="Predict memory and step time of a fine-tuning run and pick its strategy, "
        "without the hardware.",
        epilog="Exit code 0: it fits; 1: it does not; 2: the command is wrong.",
    )
    job = parser.add_argument_group("job")
    model = job.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model_config", type=Path, help="model folder or its config.json; no weights are read"
    )
    model.add_argument("--preset", help=f"shapes of a known model: {', '.join(config_names())}")
    job.add_argument("--tokens_per_step", type=int, required=True, help="over all devices")
    job.add_argument("--seq_length", type=int, default=4096, help="tokens of a row (4096)")
    job.add_argument(
        "--document_length", type=int, help="tokens of the documents packed into rows; default: one"
    )
    job.add_argument(
        "--max_grad_norm", type=float, default=1.0, help="0 switches clipping off (1.0)"
    )
    job.add_argument("--compute_dtype", choices=COMPUTE_DTYPES, default="bfloat16")
    job.add_argument(
        "--optimizer_state_bytes",
        type=float,
        default=ADAMW_STATE_BYTES,
        help="optimizer state per parameter in bytes (8, AdamW in fp32)",
    )
    job.add_argument("--total_tokens", type=int, help="tokens of the whole job, for hours and cost")
    job.add_argument("--price_per_device_hour", type=float)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--hardware", choices=sorted(PRESETS), required=True)
    machine.add_argument("--num_devices", type=int, default=1)
    machine.add_argument(
        "--host_memory_gib",
        help="memory of the host, or 'here' for what this machine and its control groups leave; "
        "default: the usual share of the hardware",
    )
    machine.add_argument("--device_memory_budget_gib", type=float, help="per device; default: all")
    machine.add_argument("--host_memory_budget_gib", type=float, help="default: all")
    fixed = parser.add_argument_group("decided already (default: the planner's choice)")
    fixed.add_argument("--weight_route", choices=WEIGHT_ROUTES)
    fixed.add_argument("--gradient_route", choices=GRADIENT_ROUTES)
    for name in _COUNTS:
        fixed.add_argument(f"--{name}", type=int)
    parser.add_argument(
        "--keep_activations",
        action=argparse.BooleanOptionalAction,
        help="keep results of as many layer chunks as fit instead of recomputing them; by default "
        "on devices with memory of their own",
    )
    parser.add_argument(
        "--resident_state",
        action=argparse.BooleanOptionalAction,
        help="let the training state of the lowest chunks stay on the devices where that pays or "
        "the host has no room; by default on devices with memory of their own",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


_COUNTS = (
    "layers_per_chunk",
    "rows_per_microbatch",
    "prefetch_depth",
    "loss_chunk_tokens",
    "num_host_devices",
    "block_size",
)


def _plan(args: argparse.Namespace) -> Plan:
    if args.max_grad_norm < 0:
        raise ValueError(f"--max_grad_norm is {args.max_grad_norm}; use 0 for none or a limit > 0.")
    return plan(
        _workload(args.model_config, args.preset),
        _batch(args.tokens_per_step, args.seq_length, args.document_length),
        _hardware(args),
        update_policy="deferred" if args.max_grad_norm else "eager",
        compute_dtype=args.compute_dtype,
        optimizer_state_bytes=args.optimizer_state_bytes,
        device_budget_bytes=_gib(args.device_memory_budget_gib),
        host_budget_bytes=_gib(args.host_memory_budget_gib),
        choices=Choices(
            weight_route=args.weight_route,
            gradient_route=args.gradient_route,
            **{name: getattr(args, name) for name in _COUNTS},
        ),
        keep_activations=args.keep_activations,
        resident_state=args.resident_state,
    )


def _workload(model_config: Path | None, preset: str | None) -> Workload:
    if model_config is None:
        assert preset is not None
        return Workload.from_config(named_config(preset), name=preset)
    folder = model_config.parent if model_config.name == "config.json" else model_config
    return Workload.from_config(read_config(folder))


def _batch(tokens_per_step: int, seq_length: int, document_length: int | None) -> BatchShape:
    if seq_length < 1 or tokens_per_step % seq_length:
        raise ValueError(
            f"--tokens_per_step is {tokens_per_step}; it must be a multiple of --seq_length "
            f"{seq_length}."
        )
    documents = None
    if document_length is not None:
        if not 1 <= document_length <= seq_length:
            raise ValueError(
                f"--document_length is {document_length}; it must be between 1 and --seq_length "
                f"{seq_length}."
            )
        full, rest = divmod(seq_length, document_length)
        documents = (document_length,) * full + ((rest,) if rest else ())
    return BatchShape(
        num_rows=tokens_per_step // seq_length,
        seq_length=seq_length,
        document_lengths=documents,
        documents_per_row=None if documents is None else len(documents),
    )


def _hardware(args: argparse.Namespace) -> HardwareProfile:
    hardware = named_hardware(args.hardware, num_devices=args.num_devices)
    if args.host_memory_gib is None:
        return hardware
    if args.host_memory_gib == "here":
        memory = available_host_memory()
        print(f"host memory: {memory.describe()}", file=sys.stderr)
        return replace(hardware, host_memory_bytes=float(memory.available_bytes))
    try:
        return replace(hardware, host_memory_bytes=float(args.host_memory_gib) * GIB)
    except ValueError as error:
        raise ValueError(
            f"--host_memory_gib is {args.host_memory_gib!r}; give a number above 0, or 'here'."
        ) from error


def _gib(value: float | None) -> float | None:
    return None if value is None else value * GIB
