"""Rows that are evaluated: under which names, when, and what their losses decide.

Files without a name are evaluated together; `name=file` makes a set of its own. A record of an
evaluation has `eval_loss` and `eval_perplexity` of all tokens, and of each named set
`eval_NAME_loss` and `eval_NAME_perplexity`; no perplexity where the loss is not the cross-entropy
alone.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slidedp_jax.data import BatchSource
from slidedp_jax.errors import UserError

_NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)", re.DOTALL)
UNNAMED = ""
"""Name of the set of files that have none."""

METRICS = ("loss", "perplexity")


def held_out_sets(entries: Sequence[str]) -> dict[str, list[str]]:
    """Name of a set -> its files; a file that is there under all of the words has no name."""
    sets: dict[str, list[str]] = {}
    for entry in entries:
        found = None if pathlib.Path(entry).exists() else _NAMED.fullmatch(entry)
        name, file = (UNNAMED, entry) if found is None else (found[1], found[2])
        sets.setdefault(name, []).append(file)
    return sets


def checked_metric(metric: str, entries: Sequence[str]) -> str:
    """A figure of evaluations by its key in their records, with or without `eval_` in front.

    Raises:
      UserError: there is none of that name.
    """
    names = sorted(held_out_sets(entries))
    keys = [f"eval_{f'{name}_' if name else ''}{kind}" for name in names for kind in METRICS]
    keys = list(dict.fromkeys([*(f"eval_{kind}" for kind in METRICS), *keys]))
    wanted = metric if metric.startswith("eval_") else f"eval_{metric}"
    if wanted not in keys:
        raise UserError(
            f"metric_for_best_model is {metric!r}; evaluations give {', '.join(keys)} (a set gets "
            "a name by `--validation_file name=file`)"
        )
    return wanted


def row_fingerprints(sets: Mapping[str, BatchSource]) -> dict[str, str]:
    """Name of a set -> fingerprint of its rows."""
    return {name: str(source.state()["data"]) for name, source in sets.items()}


def losses_record(
    losses: Mapping[str, tuple[float, int]], *, cross_entropy: bool = True
) -> dict[str, Any]:
    """Entries of an evaluation's record.

    Args:
      losses: name of a set -> mean loss of its supervised tokens, and their number.
      cross_entropy: whether the loss is that alone, so that its exponential is the perplexity.
    """
    count = sum(tokens for _, tokens in losses.values())
    loss = sum(loss * tokens for loss, tokens in losses.values()) / count
    if len(losses) == 1:
        (loss, _), *_ = losses.values()  # as it was measured
    record: dict[str, Any] = {
        "eval_loss": loss,
        **({"eval_perplexity": perplexity(loss)} if cross_entropy else {}),
        "eval_supervised_tokens": count,
    }
    for name, (own, tokens) in losses.items():
        if name != UNNAMED:
            record[f"eval_{name}_loss"] = own
            if cross_entropy:
                record[f"eval_{name}_perplexity"] = perplexity(own)
            record[f"eval_{name}_supervised_tokens"] = tokens
    return record


def losses_line(
    step: int, losses: Mapping[str, tuple[float, int]], *, cross_entropy: bool = True
) -> str:
    """An evaluation for the console; `cross_entropy`: as for `losses_record`."""
    record = losses_record(losses)
    text = (
        f"step {step}: held-out loss {record['eval_loss']:.4f} over "
        f"{record['eval_supervised_tokens']} tokens"
    )
    if cross_entropy:
        text += f", perplexity {record['eval_perplexity']:.4g}"
    if len(losses) > 1:
        for name, (loss, _) in losses.items():
            text += f"; {name or 'files without a name'} {loss:.4f}"
            text += f" ({perplexity(loss):.4g})" if cross_entropy else ""
    return text


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluations_without_gain(
    values: Iterable[tuple[int, float | None]], threshold: float
) -> tuple[int, int | None]:
    """How many of the last evaluations brought nothing better, and the step of the best.

    Args:
      values: step -> figure of each evaluation, smaller is better; None was not finite.
      threshold: by how much a figure has to be smaller than the best before it.
    """
    best, best_step, without = math.inf, None, 0
    for step, value in sorted(values, key=lambda pair: pair[0]):
        if value is not None and (best_step is None or value < best - threshold):
            best, best_step, without = value, step, 0
        else:
            without += 1
    return without, best_step
