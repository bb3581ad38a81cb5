"""What a finished run leaves beside its checkpoints: Hugging Face folders of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slidedp_jax.pretrained import Pretrained
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.folder import RunFolder
from slidedp_jax.run.many_hosts import all_say
from slidedp_jax.run.model_card import NAME, is_card_of, model_card
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.trainer import Trainer
from slidedp_jax.whole_files import UNFINISHED, remove_whole


def export_run(
    trainer: Trainer,
    folder: RunFolder,
    pretrained: Pretrained,
    args: TrainArguments,
    *,
    run: Mapping[str, Any],
    tokens_seen: int,
) -> None:
    """Write `export/` and, where an average is kept, `export_ema/`, unless they are there.

    Args:
      trainer: whose weights.
      folder: where to.
      pretrained: what it began with.
      args: settings of the run.
      run: its record, for the model card.
      tokens_seen: in training, so far.
    """
    targets = {folder.export: False}
    if args.ema_decay is not None:
        targets[folder.export_ema] = True
    for path, averaged in targets.items():
        step, how = trainer.step_count, export_text(trainer.weight_rounding, args)
        weights = weights_text(how, args.ema_decay if averaged else None)
        card = path / NAME
        there = card.is_file() and is_card_of(card.read_text("utf-8"), step=step, weights=weights)
        if all_say(trainer.together, there):
            continue
        fresh = path.with_name(f".{path.name}{UNFINISHED}")
        pretrained.export(
            trainer,
            fresh,
            dtype=args.export_dtype,
            rounding=args.export_rounding,
            averaged=averaged,
            more_files={NAME: model_card(run, step=step, weights=weights, tokens_seen=tokens_seen)},
        )
        if folder.is_owner:
            remove_whole(path)  # not before the new one is complete
            fresh.rename(path)


def weights_text(how: str, average: float | None) -> str:
    """The same for the model card; `average` is the decay, where moving averages are meant."""
    return how if average is None else f"{how}, moving average with decay {average:g}"


def export_text(rounding: WeightRounding, args: TrainArguments) -> str:
    """In words, which numbers an export of a run with that rounding holds."""
    if args.export_dtype != "bfloat16":
        return args.export_dtype
    own = rounding.named(args.export_rounding, args.seed)
    return f"{args.export_dtype}, rounded {own.text}"
