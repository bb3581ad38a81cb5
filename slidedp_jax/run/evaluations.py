"""Evaluations that a run has logged: which of them may be compared, and what is the best of them.

A figure is that of certain rows by a certain loss. After a change of either the comparison begins
anew; the best before it stays where it is not evaluated again.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slidedp_jax.errors import UserError
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.held_out import METRICS, UNNAMED
from slidedp_jax.run.metrics_file import records_of_steps
from slidedp_jax.wording import counted

EVALUATED_ROWS = "eval_data"
"""Entry of an evaluation: set -> the fingerprint of its rows; earlier versions wrote one of all."""
LOSS_TERMS = "eval_loss_terms"
"""Entry of an evaluation: what the loss had beside the cross-entropy, where it had anything."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What figures of evaluations are of.

    Attributes:
      rows: name of a set -> fingerprint of its rows.
      terms: as `loss_terms` gives them.
    """

    rows: Mapping[str, str]
    terms: Mapping[str, float]

    def record(self) -> dict[str, Any]:
        """Entries of an evaluation's record."""
        terms = {LOSS_TERMS: dict(self.terms)} if self.terms else {}
        return {EVALUATED_ROWS: dict(self.rows), **terms}

    def gives(self, record: Mapping[str, Any], metric: str) -> bool:
        """Whether a record has that figure of these rows by this loss, as far as it tells."""
        if metric not in record:
            return False
        before = record.get(EVALUATED_ROWS)
        if not isinstance(before, Mapping):
            return before in (None, self._together())
        terms = record.get(LOSS_TERMS, {})
        named = [name for name in self.rows if metric in _figures_of(name)]
        same = all(before.get(name) == self.rows[name] for name in named)
        return terms == self.terms and (same if named else before == self.rows)

    def _together(self) -> str:
        """The fingerprint of all rows that earlier versions wrote."""
        if list(self.rows) == [UNNAMED]:
            return self.rows[UNNAMED]
        text = json.dumps(dict(self.rows), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _figures_of(name: str) -> list[str]:
    return [] if name == UNNAMED else [f"eval_{name}_{kind}" for kind in METRICS]


def loss_terms(args: TrainArguments, config: ModelConfig) -> dict[str, float]:
    """Setting -> value of what the loss has beside the cross-entropy, in evaluations as well."""
    aux = args.router_aux_loss_coef
    if aux is None:
        aux = config.router_aux_loss_coef if config.num_experts else 0.0
    terms = {
        "label_smoothing_factor": args.label_smoothing_factor,
        "z_loss_coef": args.z_loss_coef,
        "router_aux_loss_coef": aux,
        "router_z_loss_coef": args.router_z_loss_coef,
    }
    return {name: float(value) for name, value in terms.items() if value}


def check_metric(args: TrainArguments, config: ModelConfig) -> None:
    """Whether evaluations give the figure that `metric_for_best_model` names.

    Raises:
      UserError: it is a perplexity, and the loss is not the cross-entropy alone.
    """
    terms = loss_terms(args, config)
    if args.best_metric.endswith("_perplexity") and terms:
        raise UserError(
            f"metric_for_best_model is {args.metric_for_best_model!r}; there is no perplexity "
            "where the loss has more than the cross-entropy in it, here by "
            f"{', '.join(f'{name} {value:g}' for name, value in terms.items())}: give "
            f"{args.best_metric.removesuffix('perplexity')}loss"
        )


def has_evaluation(path: pathlib.Path, step: int, measure: Measure) -> bool:
    """Whether the file holds the loss of these rows after a step.

    Args:
      path: metrics.jsonl; it need not exist.
      step: steps done.
      measure: what is evaluated.
    """
    return step in evaluated(path, measure)


def evaluated(
    path: pathlib.Path, measure: Measure, metric: str = "eval_loss"
) -> dict[int, float | None]:
    """Step -> a figure of its evaluation; None where that is not finite.

    Args:
      path: metrics.jsonl; it need not exist.
      measure: what has to have been evaluated.
      metric: key of the figure.
    """
    records = records_of_steps(path)
    return {record["step"]: record[metric] for record in records if measure.gives(record, metric)}


def best_evaluated(
    path: pathlib.Path, steps: Collection[int], measure: Measure, metric: str = "eval_loss"
) -> int | None:
    """Of these steps, that with the lowest figure; None where none was evaluated.

    Args:
      path: metrics.jsonl; it need not exist.
      steps: to choose from.
      measure: what has to have been evaluated.
      metric: key of the figure.
    """
    return _lowest({s: v for s, v in evaluated(path, measure, metric).items() if s in steps})


def best_before(
    path: pathlib.Path, steps: Collection[int], measure: Measure, metric: str = "eval_loss"
) -> list[int]:
    """Of these steps, the best by other rows or another loss that nothing has been compared with.

    One for each change of them; a step that has been evaluated since is compared as all others.

    Args:
      path: metrics.jsonl; it need not exist.
      steps: to choose from.
      measure: what is evaluated now.
      metric: key of the figure; the loss decides where it was not there.
    """
    alike: dict[str, dict[int, float | None]] = {}
    for record in records_of_steps(path):
        if record["step"] in steps and "eval_loss" in record and not measure.gives(record, metric):
            of = json.dumps([record.get(EVALUATED_ROWS), record.get(LOSS_TERMS)], sort_keys=True)
            value = record[metric if metric in record else "eval_loss"]
            alike.setdefault(of, {})[record["step"]] = value
    since = evaluated(path, measure, metric)
    found = {_lowest(values) for values in alike.values()}
    return sorted(step for step in found if step is not None and step not in since)


def begins_anew(path: pathlib.Path, measure: Measure, metric: str) -> bool:
    """Whether there are evaluations and the last of them cannot be compared with those to come."""
    records = [record for record in records_of_steps(path) if "eval_loss" in record]
    last = max((record["step"] for record in records), default=None)
    return last is not None and not any(
        measure.gives(record, metric) for record in records if record["step"] == last
    )


def skipped_text(path: pathlib.Path, after: int, step: int) -> str:
    """How many steps from one to another were skipped, in words; empty where none was."""
    steps = {
        record["step"]: record.get("skipped", False)
        for record in records_of_steps(path)
        if "skipped_steps" in record and after < record["step"] <= step
    }
    skipped = sum(steps.values())
    return (
        f"; {skipped} of {counted(len(steps), 'step')} since then were skipped" if skipped else ""
    )


def _lowest(values: Mapping[int, float | None]) -> int | None:
    finite = [(value, step) for step, value in values.items() if value is not None]
    return min(finite)[1] if finite else None
