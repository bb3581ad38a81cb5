"""The settings that decide how rows become examples, for every command that reads rows."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from slidedp_jax.compilation_cache import AUTO
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


_WORTH_KEEPING_BYTES = 1 << 20
"""Of files; smaller ones are tokenised in less than a second."""


def num_processes(args: TrainArguments) -> int | None:
    """Processes that tokenise, as `load_examples` takes them."""
    return args.dataset_num_proc if isinstance(args.dataset_num_proc, int) else None


def token_cache(args: TrainArguments, files: Sequence[str]) -> pathlib.Path | None:
    """Folder for tokenised rows; None: they are not kept.

    `auto` is a folder in the user's cache (`$XDG_CACHE_HOME` or `~/.cache`) where that can be
    written and the files are large enough for it to save time.
    """
    if args.data_cache != AUTO:
        return None if args.data_cache is None else pathlib.Path(args.data_cache)
    paths = [path for file in files if (path := pathlib.Path(file)).is_file()]
    if sum(path.stat().st_size for path in paths) < _WORTH_KEEPING_BYTES:
        return None
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(root) / "slidedp_jax" / "tokenised"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"note: tokenised rows are not kept in {folder}: {error.strerror}", flush=True)
        return None
    if not os.access(folder, os.W_OK):
        print(f"note: tokenised rows are not kept in {folder}: it cannot be written", flush=True)
        return None
    return folder
