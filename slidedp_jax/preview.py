"""Look at the data as training sees it: `slidedp preview --model_name_or_path DIR --train_file F`.

Prints what becomes of the rows, and examples as text with the tokens that are learnt in ⟦ ⟧. Takes
the words of a training command as they are; settings that do not concern the data are checked and
make no difference. Needs no weights and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np

from slidedp_jax.command_parser import WRONG_COMMAND, CommandParser
from slidedp_jax.data import (
    DataReport,
    Examples,
    NeedsTokenizer,
    Tokenizer,
    account,
    load_examples,
    load_tokenizer,
    packing_line,
    preview,
)
from slidedp_jax.data.preview import SHORT
from slidedp_jax.errors import UserError
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.models.hf_hub import resolve_model_folder
from slidedp_jax.run.arguments import FIELDS, TrainArguments, parse_arguments
from slidedp_jax.run.data_settings import example_settings, num_processes, token_cache
from slidedp_jax.run.held_out import held_out_sets
from slidedp_jax.run.settings_help import help_lines
from slidedp_jax.wording import columns_of, counted, say_error, wrapped

FAILED = 1

_NOT_ABOUT_ROWS = ("shuffle", "data_seed", "train_file_weights")
DATA_FLAGS = (
    "model_name_or_path",
    *(
        name
        for name, field in FIELDS.items()
        if field.metadata["group"] == "data" and name not in _NOT_ABOUT_ROWS
    ),
)
"""Settings of training that make a difference here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 wrong command."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if not argv or "-h" in argv or "--help" in argv:
        print(_help(parser))
        return 0 if argv else WRONG_COMMAND
    own, rest = parser.parse_known_args(argv)
    try:
        args = parse_arguments(rest, defaults={"output_dir": ""})
    except UserError as error:
        say_error(error)
        return WRONG_COMMAND
    if hasattr(sys.stdout, "reconfigure"):  # a terminal may lack characters that rows have
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _show(args, own)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        say_error(error)
        return FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="slidedp preview",
        usage="slidedp preview [--config FILE.yaml] --name value ...",
        description="Print what becomes of the rows of a training command, and examples of them "
        "with what is learnt marked.",
        add_help=False,
    )
    group = parser.add_argument_group("preview")
    group.add_argument(
        "--num_examples", "--num-examples", type=int, default=3, help="from the first on [3]"
    )
    group.add_argument(
        "--rows", type=int, nargs="+", help="rows of the training files to show instead, from 0"
    )
    group.add_argument("--full", action="store_true", help="show long examples whole")
    group.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours beside ⟦ ⟧; auto: on a terminal without NO_COLOR [auto]",
    )
    return parser


def _help(parser: argparse.ArgumentParser) -> str:
    lines = [parser.format_help(), "of the training command (all its other settings are taken too)"]
    return "\n".join([*lines, *help_lines(DATA_FLAGS)])


def _show(args: TrainArguments, own: argparse.Namespace) -> None:
    if own.num_examples < 0:
        raise UserError(f"num_examples is {own.num_examples}; it must be 0 or more")
    colour, run_tokens = _in_colour(own.color, sys.stdout), None if own.full else SHORT
    tokenizer, vocab_size, folder = _tokenizer(args)
    settings = example_settings(args)
    try:
        examples, report = load_examples(
            args.train_file,
            tokenizer,
            settings,
            vocab_size=vocab_size,
            num_proc=num_processes(args),
            cache=token_cache(args, args.train_file),
            progress=_progress(),
        )
    except NeedsTokenizer:
        load_tokenizer(folder)  # says what is missing, and where
        raise
    indices = list(range(min(own.num_examples, len(examples))))
    if own.rows is not None:
        indices = _examples_of(own.rows, examples, report)
    columns = columns_of(sys.stdout)
    print(wrapped(f"{report}\n{packing_line(examples, args.max_seq_length)}", columns))
    for index in indices:
        print()
        text = preview(examples, tokenizer, index, colour=colour, run_tokens=run_tokens)
        print(text.rstrip("\n"))
    for name, files in held_out_sets(args.validation_file).items():
        held_out, report = load_examples(
            files,
            tokenizer,
            dataclasses.replace(settings, max_rows=None),
            vocab_size=vocab_size,
            num_proc=num_processes(args),
            cache=token_cache(args, files),
            progress=_progress(),
        )
        shown = range(min(1, own.num_examples))
        print(f"\nfor evaluation{f', {name}' if name else ''}")
        print(
            account(
                held_out,
                report,
                tokenizer,
                indices=shown,
                colour=colour,
                run_tokens=run_tokens,
                columns=columns,
            )
        )


def _tokenizer(args: TrainArguments) -> tuple[Tokenizer | None, int | None, pathlib.Path]:
    """The tokenizer, None where there is none, the number of ids, if the model says, its folder."""
    try:
        folder = resolve_model_folder(args.model_name_or_path, weights=False)
        has_config = (folder / "config.json").is_file()
        vocab_size = read_config(folder).vocab_size if has_config else None
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise UserError(str(error)) from error
    if not (folder / "tokenizer.json").is_file():
        return None, vocab_size, folder
    return load_tokenizer(folder, chat_template=args.chat_template_path), vocab_size, folder


def _examples_of(rows: Sequence[int], examples: Examples, report: DataReport) -> list[int]:
    """Indices of the examples that came from rows, in the order of the rows."""
    indices: list[int] = []
    for row in rows:
        if not 0 <= row < report.rows_in:
            raise UserError(
                f"--rows {row}: the training files have {counted(report.rows_in, 'row')}, numbered "
                f"from 0 to {report.rows_in - 1:,}"
            )
        found = np.flatnonzero(examples.row_ids == row).tolist()
        if not found:
            raise UserError(
                f"--rows {row}: nothing of this row is trained on. In all: {report.drops}"
            )
        indices += found
    return indices


def _progress() -> Callable[[int, float], None] | None:
    """Counts rows on a terminal while they are read."""
    if not sys.stderr.isatty():
        return None
    return lambda rows, share: print(
        f"\r{rows:,} rows read, {share:.0%}\r", end="", file=sys.stderr, flush=True
    )


def _in_colour(choice: str, stream: TextIO) -> bool:
    if choice == "auto":
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"


if __name__ == "__main__":
    sys.exit(main())
