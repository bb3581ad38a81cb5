"""Examples as text, with what the model learns marked, and the account of a preparation.

Supervised tokens stand in ⟦ ⟧, on a terminal also in colour. Characters that would change what a
terminal shows are written as escapes. Long runs of tokens, and many of them, are shown by their
ends: the borders are what one looks at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from slidedp_jax.data.examples import IGNORED, Examples
from slidedp_jax.data.packing import pack
from slidedp_jax.data.report import DataReport
from slidedp_jax.data.tokenizer import Tokenizer
from slidedp_jax.wording import counted, wrapped

BEGIN, END = "⟦", "⟧"
"""Around each run of supervised tokens."""

SHORT = 160
"""Tokens of a run that a shortened example shows; a few more are not worth leaving out."""

_FIRST_RUNS, _LAST_RUNS = 8, 4
_GREEN, _NOT_GREEN = "\x1b[32m", "\x1b[39m"
_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
# Control characters but for tab and newline, and what turns the direction of writing.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def preview(
    examples: Examples,
    tokenizer: Tokenizer | None,
    index: int = 0,
    *,
    colour: bool = False,
    run_tokens: int | None = None,
) -> str:
    """An example rendered as text, supervised tokens in ⟦ ⟧, special tokens shown.

    Args:
      examples: what `load_examples` gave.
      tokenizer: the one that they were made with; None shows ids.
      index: which example.
      colour: supervised tokens in green beside, by ANSI escapes.
      run_tokens: most tokens shown of each run that is supervised or not; of more than thirteen
        runs the first eight and the last four are shown, then. None shows all.
    """
    if not 0 <= index < len(examples):
        raise IndexError(f"there are {len(examples)} examples, index {index} is none of them")
    ids, labels = examples.input_ids(index), examples.labels(index)
    supervised = labels != IGNORED
    heading = (
        f"example {index} (row {int(examples.row_ids[index])}): {counted(len(ids), 'token')}, "
        f"{int(supervised.sum()):,} supervised, marked {BEGIN} {END}"
    )
    edges = np.flatnonzero(np.diff(supervised)) + 1
    runs = np.split(ids, edges)
    learnt = [bool(supervised[begin]) for begin in (0, *edges)]
    pieces = []
    for place in _shown(len(runs), run_tokens is not None):
        if isinstance(place, slice):
            between = runs[place]
            left = counted(sum(map(len, between)), "token")
            pieces.append(_left_out(f"{left} in {len(between):,} parts", colour))
            continue
        text = _text(runs[place], tokenizer, run_tokens, colour)
        if learnt[place]:
            text = f"{_GREEN}{BEGIN}{text}{END}{_NOT_GREEN}" if colour else f"{BEGIN}{text}{END}"
        pieces.append(text)
    return f"{heading}\n{''.join(pieces)}"


def account(
    examples: Examples,
    report: DataReport,
    tokenizer: Tokenizer | None,
    *,
    indices: Sequence[int] = (0,),
    colour: bool = False,
    run_tokens: int | None = SHORT,
    columns: int | None = None,
) -> str:
    """What became of files' rows, and some of the examples: for the start of a run.

    Args:
      examples: what `load_examples` gave.
      report: what it gave beside.
      tokenizer: as for `preview`.
      indices: which examples.
      colour: as for `preview`.
      run_tokens: as for `preview`.
      columns: of the terminal, to which the counts are broken; None breaks nothing.
    """
    shown = [
        preview(examples, tokenizer, index, colour=colour, run_tokens=run_tokens)
        for index in indices
    ]
    counts = wrapped(str(report), columns)
    return "\n\n".join([counts, *(text.rstrip("\n") for text in shown)])


def packing_line(examples: Examples, max_seq_length: int) -> str:
    """How many rows the examples make, one per row and packed, and how full these are."""
    packed = len(pack(examples.lengths, max_seq_length))
    mean = examples.num_tokens / len(examples)
    full = examples.num_tokens / (packed * max_seq_length)
    return (
        f"packing  one example per row: {counted(len(examples), 'row')} of {mean:,.0f} tokens on "
        f"average; packed: {counted(packed, 'row')} of {max_seq_length:,} tokens, {full:.1%} full"
    )


def _shown(num_runs: int, shorten: bool) -> Iterator[int | slice]:
    """Indices of the runs to show, a slice for those left out."""
    if not shorten or num_runs <= _FIRST_RUNS + _LAST_RUNS + 1:
        yield from range(num_runs)
        return
    last = num_runs - _LAST_RUNS
    yield from range(_FIRST_RUNS)
    yield slice(_FIRST_RUNS, last)
    yield from range(last, num_runs)


def _text(ids: np.ndarray, tokenizer: Tokenizer | None, most: int | None, colour: bool) -> str:
    if most is None or len(ids) <= most + most // 4:
        return _decoded(ids, tokenizer)
    first, last = most - most // 4, most // 4
    left = counted(len(ids) - first - last, "token")
    ends = _decoded(ids[:first], tokenizer), _decoded(ids[len(ids) - last :], tokenizer)
    return _left_out(left, colour).join(ends)


def _left_out(what: str, colour: bool) -> str:
    text = f" [... {what} ...] "
    return f"{_DIM}{text}{_NOT_DIM}" if colour else text


def _decoded(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return _INVISIBLE.sub(
        lambda found: found[0].encode("unicode_escape").decode(), tokenizer.decode(ids.tolist())
    )
