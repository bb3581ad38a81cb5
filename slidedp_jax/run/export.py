"""What a finished run leaves beside its checkpoints: Hugging Face folders of its weights."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from slidedp_jax.models.hf_export import export
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.folder import RunFolder
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
        _write(targets, reader.version, inputs, args)


def _write(
    targets: Mapping[pathlib.Path, Callable[[str], np.ndarray]],
    step: int,
    inputs: RunInputs,
    args: TrainArguments,
) -> None:
    content = f"{step} {args.export_dtype}"
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
