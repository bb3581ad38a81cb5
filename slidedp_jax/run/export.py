"""What a finished run leaves beside its checkpoints: Hugging Face folders of its weights."""

from __future__ import annotations

from slidedp_jax.pretrained import Pretrained
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.folder import RunFolder
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.trainer import Trainer
from slidedp_jax.whole_files import UNFINISHED, remove_whole

_MARKER = "slidedp_jax_step"


def export_run(
    trainer: Trainer, folder: RunFolder, pretrained: Pretrained, args: TrainArguments
) -> None:
    """Write `export/` and, where an average is kept, `export_ema/`, unless they are there."""
    content = f"{trainer.step_count} {export_text(trainer.weight_rounding, args)}"
    targets = {folder.export: False}
    if args.ema_decay is not None:
        targets[folder.export_ema] = True
    for path, averaged in targets.items():
        marker = path / _MARKER
        if marker.is_file() and marker.read_text() == content:
            continue
        fresh = path.with_name(f".{path.name}{UNFINISHED}")
        pretrained.export(
            trainer,
            fresh,
            dtype=args.export_dtype,
            rounding=args.export_rounding,
            averaged=averaged,
        )
        (fresh / _MARKER).write_text(content)
        remove_whole(path)  # not before the new one is complete
        fresh.rename(path)


def export_text(rounding: WeightRounding, args: TrainArguments) -> str:
    """In words, which numbers an export of a run with that rounding holds."""
    if args.export_dtype != "bfloat16":
        return args.export_dtype
    own = rounding.named(args.export_rounding, args.seed)
    return f"{args.export_dtype}, rounded {own.text}"
