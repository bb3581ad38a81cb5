"""From a checkpoint to a Hugging Face folder: `python -m slidedp_jax.export RUN_OR_CHECKPOINT OUT`.

Needs no GPU and no more memory than one stage of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from slidedp_jax.command_parser import CommandParser
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.models.hf_export import export, export_bytes, remove_unfinished
from slidedp_jax.models.hf_hub import resolve_model_folder
from slidedp_jax.planner.disk import EXPORT_BYTES
from slidedp_jax.process import configure
from slidedp_jax.state.weight_rounding import Rounding
from slidedp_jax.wording import say_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser(
        prog="slidedp export", description="Write a checkpoint's weights as a Hugging Face folder."
    )
    parser.add_argument("checkpoint", type=pathlib.Path, help="run folder, or one step_N folder")
    parser.add_argument("output", type=pathlib.Path, help="folder to write; new or empty")
    parser.add_argument("--model_name_or_path", "--model-name-or-path", help="source model folder")
    parser.add_argument(
        *("--dtype", "--export_dtype", "--export-dtype"),
        choices=tuple(EXPORT_BYTES),
        default="bfloat16",
        help="of the weights (bfloat16)",
    )
    parser.add_argument(
        *("--rounding", "--export_rounding", "--export-rounding"),
        choices=get_args(Rounding),
        help="of bfloat16; default: as was trained",
    )
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights")
    args = parser.parse_whole(sys.argv[1:] if argv is None else argv)
    with StopAtSignal() as stop:
        stop.last_words = lambda: f"{args.output} was not written"
        stop.tidy = lambda: remove_unfinished(args.output)
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        how = export_checkpoint(
            args.checkpoint,
            args.output,
            args.model_name_or_path,
            args.dtype,
            rounding=args.rounding,
            averaged=args.ema,
        )
    except (UserError, ValueError, OSError) as error:
        say_error(error)
        return 1
    print(f"wrote {args.output} ({how})")
    return 0


def export_checkpoint(
    checkpoint: pathlib.Path,
    output: pathlib.Path,
    source: str | None,
    dtype: str,
    *,
    rounding: Rounding | None = None,
    averaged: bool = False,
) -> str:
    """Write the weights of a checkpoint, by default the newest of a run, as a model folder.

    Args:
      checkpoint: its folder, or that of a run.
      output: folder to write; new or empty.
      source: the model folder that training started from; None: as the run has recorded.
      dtype: of the weights.
      rounding: to bfloat16; None: as the run did, which gives the weights that it computed with.
      averaged: the moving averages instead.

    Returns:
      In words, which numbers the folder holds.

    Raises:
      UserError, ValueError, OSError: something is missing, damaged or does not fit.
    """
    configure(platform="cpu", num_devices=1, num_host_devices=1)
    from slidedp_jax.checkpoint.record import check_configuration, read_record, recorded_rounding
    from slidedp_jax.checkpoint.save_restore import list_steps, read_parameter_arrays
    from slidedp_jax.models.decoder import build
    from slidedp_jax.run.export import weights_text
    from slidedp_jax.run.model_card import NAME, model_card
    from slidedp_jax.run.record import IN_CHECKPOINT, read_run
    from slidedp_jax.run.same_inputs import base_model_name
    from slidedp_jax.state.split_float import rounded

    if rounding == "dither" and dtype != "bfloat16":
        raise UserError(f"--rounding dither is for bfloat16, --dtype is {dtype}; drop one of them")
    checkpoint = checkpoint.expanduser().resolve()
    if not checkpoint.is_dir():
        raise UserError(
            f"{checkpoint} does not exist; give the output_dir of a run, or one of its "
            "checkpoints/step_N"
        )
    root = checkpoint
    if not (checkpoint / "trainer.json").is_file():
        steps = list_steps(checkpoint / "checkpoints")
        if not steps:  # the folder of a run's checkpoints, or a folder of them elsewhere
            steps = list_steps(checkpoint)
            root = checkpoint.parent if checkpoint.name == "checkpoints" else checkpoint
        if not steps:
            raise UserError(f"{checkpoint} holds no complete checkpoint")
        checkpoint = steps[-1]
    else:
        root = checkpoint.parent.parent
    record = read_record(checkpoint)
    if record["ema_decay"] is None and averaged:
        raise UserError(f"{checkpoint} holds no moving average; train with --ema_decay 0.999")
    previous = None
    if source is None:
        previous, _ = read_run(root, checkpoint)
        if previous is None:
            raise UserError(f"{root} has no run.json; name the source with --model_name_or_path")
        source = str(previous["arguments"]["model_name_or_path"])
    folder = resolve_model_folder(source)
    config = read_config(folder)
    check_configuration(checkpoint, record, dataclasses.asdict(config))
    own = recorded_rounding(checkpoint, record).named(rounding, record["extra"].get("seed", 0))
    stages = {name: s for s in build(config).stages() for name in s.parameter_names()}
    loaded: dict[str, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        if name not in loaded:
            loaded.clear()
            loaded.update(read_parameter_arrays(checkpoint, stages[name], averaged=averaged))
        values = loaded[name]
        return rounded(values, own, name) if dtype == "bfloat16" else values

    how = f"{dtype}, rounded {own.text}" if dtype == "bfloat16" else dtype
    run = {"base_model": base_model_name(source), "versions": record.get("versions")}
    run |= {name: value for name, value in (previous or {}).items() if value is not None}
    run |= record["extra"].get(IN_CHECKPOINT) or {}
    card = model_card(
        run,
        step=record["step"],
        weights=weights_text(how, record["ema_decay"] if averaged else None),
        tokens_seen=record["extra"].get("tokens_seen"),
    )
    shapes = config.parameter_shapes()
    with writing(output, export_bytes(shapes, dtype)):
        export(
            output,
            folder,
            shapes,
            read,
            dtype=dtype,
            chat_template=_template(run),
            more_files={NAME: card},
        )
    return how


def _template(run: Mapping[str, Any]) -> str | None:
    """The text of the run's own chat template, if it had one."""
    path = (run.get("arguments") or {}).get("chat_template_path")
    if run.get("chat_template") is not None or path is None:
        return run.get("chat_template")
    try:  # earlier versions kept its path only
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the run was trained with the chat template {path}, which cannot be read "
            f"({error.strerror}); put it there again"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
