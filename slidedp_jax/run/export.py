"""What a finished run leaves beside its checkpoints: Hugging Face folders of its weights."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from slidedp_jax.models.hf_export import export
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.folder import RunFolder
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.trainer import Trainer
from slidedp_jax.whole_files import UNFINISHED, remove_whole

_MARKER = "slidedp_jax_step"


def export_run(
    trainer: Trainer, folder: RunFolder, inputs: RunInputs, args: TrainArguments
) -> None:
    """Write `export/` and, where an average is kept, `export_ema/`, unless they are there."""
    with trainer.gate.reading() as reader:
        targets = {folder.export: reader.read}
        if args.ema_decay is not None:
            targets[folder.export_ema] = reader.read_average
        if args.export_dtype == "bfloat16":
            rounding = _rounding(trainer, args)
            targets = {
                path: functools.partial(
                    reader.read_rounded, rounding=rounding, averaged=path == folder.export_ema
                )
                for path in targets
            }
        content = f"{reader.version} {export_text(trainer, args)}"
        _write(targets, content, inputs, args)


def export_text(trainer: Trainer, args: TrainArguments) -> str:
    """In words, which numbers an export holds."""
    if args.export_dtype != "bfloat16":
        return args.export_dtype
    return f"{args.export_dtype}, rounded {_rounding(trainer, args).text}"


def _rounding(trainer: Trainer, args: TrainArguments) -> WeightRounding:
    return trainer.weight_rounding.named(args.export_rounding, args.seed)


def _write(
    targets: Mapping[pathlib.Path, Callable[[str], np.ndarray]],
    content: str,
    inputs: RunInputs,
    args: TrainArguments,
) -> None:
    for path, read in targets.items():
        marker = path / _MARKER
        if marker.is_file() and marker.read_text() == content:
            continue
        template = args.chat_template_path
        fresh = path.with_name(f".{path.name}{UNFINISHED}")
        export(
            fresh,
            inputs.folder,
            inputs.config.parameter_shapes(),
            read,
            dtype=args.export_dtype,
            chat_template=pathlib.Path(template).read_text() if template else None,
        )
        (fresh / _MARKER).write_text(content)
        remove_whole(path)  # not before the new one is complete
        fresh.rename(path)
