"""Checkpoints at the command line: `slidedp checkpoints list | inspect | verify | export | copy`.

Needs no GPU and no model folder (but for `export`), and little memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slidedp_jax.errors import UserError
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.jax_internals import backends_have_started
from slidedp_jax.planner.hardware import size_text
from slidedp_jax.process import configure
from slidedp_jax.wording import counted, short_count

_USAGE = "slidedp checkpoints"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 something is damaged or missing."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["export"]:
        from slidedp_jax.export import main as export

        return export(argv[1:])
    parser = argparse.ArgumentParser(prog=_USAGE, description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("list", _list, "the checkpoints of a run"),
        ("inspect", _inspect, "what a checkpoint holds"),
        ("verify", _verify, "read everything and compare it with its checksums"),
        ("copy", _copy, "copy a checkpoint, verified, or its weights alone"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument(
            "checkpoint", type=pathlib.Path, help="run folder, or one step_N folder"
        )
        if name in ("list", "inspect"):
            command.add_argument("--json", action="store_true", help="for programs")
        if name == "inspect":
            command.add_argument("--arrays", action="store_true", help="name every array")
        if name == "verify":
            command.add_argument("--all", action="store_true", help="every checkpoint of a run")
        if name == "copy":
            command.add_argument("output", type=pathlib.Path, help="folder to write; new")
            command.add_argument(
                "--weights_only", "--weights-only", action="store_true", help="fp32 masters alone"
            )
    commands.add_parser("export", help="a checkpoint as a Hugging Face folder")
    args = parser.parse_args(argv)
    with StopAtSignal():
        try:
            if not backends_have_started():  # reading old ones through Orbax starts JAX
                configure(platform="cpu", num_devices=1, num_host_devices=1)
            chosen: Callable[[argparse.Namespace], int] = args.run
            return chosen(args)
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


def _checkpoints(path: pathlib.Path) -> list[pathlib.Path]:
    """Those of a run, oldest first, or the one that is named.

    Raises:
      UserError: there is none.
    """
    from slidedp_jax.checkpoint.retention import is_checkpoint, list_steps

    if is_checkpoint(path):
        return [path]
    found = list_steps(path / "checkpoints") or list_steps(path)
    if not found:
        raise UserError(f"{path} holds no complete checkpoint")
    return found


def _list(args: argparse.Namespace) -> int:
    from slidedp_jax.checkpoint.record import RECORD, read_record
    from slidedp_jax.disk_room import bytes_within
    from slidedp_jax.run.metrics_file import losses_of_steps

    rows: list[dict[str, Any]] = []
    for path in _checkpoints(args.checkpoint):
        losses = losses_of_steps(path.parent.parent / "metrics.jsonl")
        row: dict[str, Any] = {"path": str(path), "bytes": bytes_within(path)}
        row["saved"] = _time((path / RECORD).stat().st_mtime)
        try:
            record = read_record(path)
            row |= {"step": record["step"], **losses.get(record["step"], {})}
        except UserError as error:
            row["damaged"] = str(error)
        rows.append(row)
    if args.json:
        print(json.dumps(rows, indent=1))
        return int(any("damaged" in row for row in rows))
    print(f"{'step':>8}  {'size':>11}  {'saved':19}  {'loss':>8}  {'held out':>8}  folder")
    for row in rows:
        size, step = size_text(row["bytes"]), row.get("step", "damaged")
        numbers = "  ".join(_number(row.get(name)) for name in ("loss", "eval_loss"))
        print(f"{step:>8}  {size:>11}  {row['saved']}  {numbers}  {row['path']}")
    for row in rows:
        if "damaged" in row:
            print(f"error: {row['damaged']}", file=sys.stderr)
    return int(any("damaged" in row for row in rows))


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _number(value: float | None) -> str:
    return f"{'' if value is None else format(value, '.4f'):>8}"


def _inspect(args: argparse.Namespace) -> int:
    from slidedp_jax.checkpoint.contents import arrays_in, parameters_in
    from slidedp_jax.checkpoint.record import read_record
    from slidedp_jax.checkpoint.stored_arrays import total_bytes

    checkpoint = _checkpoints(args.checkpoint)[-1]
    record = read_record(checkpoint)
    arrays = arrays_in(checkpoint, record)
    if args.json:
        stored = [
            {
                "item": array.item,
                "name": array.name,
                "array": array.key,
                "meaning": _meaning(record, array.name, array.number),
                "shape": list(array.shape),
                "dtype": array.dtype.name,
            }
            for array in arrays
        ]
        print(json.dumps({"path": str(checkpoint), "record": record, "arrays": stored}, indent=1))
        return 0
    print(f"{checkpoint}: step {record['step']}, {size_text(total_bytes(arrays))}")
    print(f"  parameters  {short_count(parameters_in(arrays))} in fp32, ", end="")
    print(f"{counted(len({array.item for array in arrays}), 'item')}")
    for key, meaning, number in _kinds(record, arrays):
        print(f"  {key:<10}  {meaning}, of {counted(number, 'parameter')}")
    for name in ("kernel_form", "weight_rounding", "ema_decay", "versions"):
        print(f"  {name:<10}  {record.get(name)}")
    print(f"  beside      {', '.join(record['extra']) or 'nothing'}")
    if args.arrays:
        for array in arrays:
            shape = " x ".join(map(str, array.shape)) or "scalar"
            print(f"  {array.item}: {array.name} {array.key}: {array.dtype.name} {shape}")
    return 0


def _kinds(record: Mapping[str, Any], arrays: Sequence[Any]) -> list[tuple[str, str, int]]:
    """(array, what it is, how many parameters have it), each meaning once."""
    counts: dict[tuple[str, str], int] = {}
    for array in arrays:
        if array.number is not None:
            kind = array.key, _meaning(record, array.name, array.number)
            counts[kind] = counts.get(kind, 0) + 1
    return [(*kind, count) for kind, count in sorted(counts.items())]


def _meaning(record: Mapping[str, Any], name: str, number: int | None) -> str:
    """What an array is, by the names that the optimizer's state has."""
    if number is None:
        return "weights"
    names = record.get("optimizer_state_names", {}).get(name, [])
    return str(names[number]) if number < len(names) else "optimizer state"


def _verify(args: argparse.Namespace) -> int:
    from slidedp_jax.checkpoint.contents import verify

    found = _checkpoints(args.checkpoint)
    code = 0
    for checkpoint in found if args.all else found[-1:]:
        start = time.perf_counter()
        try:
            num_bytes, damages = verify(checkpoint)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
            continue
        seconds = time.perf_counter() - start
        for damage in damages:
            print(f"error: {damage.path} is damaged: {damage.why}", file=sys.stderr)
        code = max(code, int(bool(damages)))
        if not damages:
            rate = num_bytes / seconds / 1e9
            print(f"{checkpoint}: {size_text(num_bytes)} are what was saved ({rate:.2f} GB/s)")
    return code


def _copy(args: argparse.Namespace) -> int:
    from slidedp_jax.checkpoint.contents import copy

    checkpoint = _checkpoints(args.checkpoint)[-1]
    num_bytes = copy(checkpoint, args.output, weights_only=args.weights_only)
    what = "weights" if args.weights_only else "all"
    print(f"wrote {args.output}: {what} of {checkpoint}, {size_text(num_bytes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
