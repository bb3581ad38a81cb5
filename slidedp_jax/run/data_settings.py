"""The settings that decide how rows become examples, for every command that reads rows."""

from __future__ import annotations

from slidedp_jax.data import ExampleSettings
from slidedp_jax.run.arguments import TrainArguments


def example_settings(args: TrainArguments) -> ExampleSettings:
    """How the training files' rows become examples; of validation files all rows are taken."""
    return ExampleSettings(
        max_seq_length=args.max_seq_length,
        loss_on=args.loss_on,
        over_long=args.over_long,
        keep=args.truncation_keep,
        append_eos=args.append_eos,
        skip_bad_rows=args.skip_bad_rows,
        max_rows=args.max_train_samples,
        columns=args.columns,
        template_kwargs=args.chat_template_kwargs,
    )
