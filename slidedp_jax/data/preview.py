"""One example as text, with what the model learns marked."""

from __future__ import annotations

import numpy as np

from slidedp_jax.data.examples import IGNORED, Examples
from slidedp_jax.data.tokenizer import Tokenizer

BEGIN, END = "⟦", "⟧"
"""Around each run of supervised tokens."""


def preview(examples: Examples, tokenizer: Tokenizer, index: int = 0) -> str:
    """An example rendered as text, supervised tokens in ⟦ ⟧, special tokens shown.

    Args:
      examples: what `load_examples` gave.
      tokenizer: the one that they were made with.
      index: which example.
    """
    if not 0 <= index < len(examples):
        raise IndexError(f"there are {len(examples)} examples, index {index} is none of them")
    ids, labels = examples.input_ids(index), examples.labels(index)
    supervised = labels != IGNORED
    runs = np.split(ids, np.flatnonzero(np.diff(supervised)) + 1)
    pieces, learnt = [], bool(supervised[0])
    for run in runs:
        text = tokenizer.decode(run.tolist())
        pieces.append(f"{BEGIN}{text}{END}" if learnt else text)
        learnt = not learnt
    heading = (
        f"example {index} (row {int(examples.row_ids[index])}): {len(ids):,} tokens, "
        f"{int(supervised.sum()):,} supervised, marked {BEGIN} {END}"
    )
    return f"{heading}\n{''.join(pieces)}"
