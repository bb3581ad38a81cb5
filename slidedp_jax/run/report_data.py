"""What a run has left, for its report: settings, steps, evaluations, samples."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slidedp_jax.errors import UserError
from slidedp_jax.run.record import NAME

MOST_POINTS = 600
"""Of a curve."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What the page is made of.

    Attributes:
      name: of the folder.
      record: what `run.json` holds.
      steps: records of steps, in order.
      evaluations: records of evaluations, in order.
      samples: records of `samples.jsonl` (step, prompt, completion), in order.
      profiles: paragraphs on what bounds some steps, by name.
    """

    name: str
    record: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    profiles: Mapping[str, str]


def read_run_data(root: pathlib.Path) -> RunData:
    """Read a run's folder; the run may be going on.

    Raises:
      UserError: it is no run's, or has not taken a step.
    """
    try:
        record = json.loads((root / NAME).read_bytes().decode())
        records = _records(root / "metrics.jsonl")
    except FileNotFoundError as error:
        raise UserError(
            f"{root} holds no {pathlib.Path(str(error.filename)).name}: give the output_dir of a "
            "run that has begun"
        ) from None
    except ValueError as error:
        raise UserError(f"{root / NAME} is damaged ({error})") from None
    steps = [entry for entry in records if "loss" in entry]
    if not steps:
        raise UserError(f"the run in {root} has not taken a step yet; there is nothing to draw")
    return RunData(
        name=root.resolve().name,
        record=record,
        steps=steps,
        evaluations=[entry for entry in records if any(name.startswith("eval_") for name in entry)],
        samples=_records(samples) if (samples := root / "samples.jsonl").is_file() else [],
        profiles={path.stem: path.read_text() for path in sorted((root / "profile").glob("*.txt"))},
    )


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().decode(errors="replace").splitlines()
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: str) -> dict[str, Any] | None:
    """A record; None for what a run that was cut short left of one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "step" in entry else None


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Some steps in a row as one point of a curve: the last step's number, and their figures."""

    step: float
    mean: float
    low: float
    high: float


def curve(records: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> list[Bin]:
    """Values of a field over steps, as many in a bin as the page has room for.

    Args:
      records: in the order of steps; those without the field, or with null in it, are left out.
      name: the field.
      scale: what values are multiplied with.
    """
    found = [
        (record["step"], scale * record[name])
        for record in records
        if isinstance(record.get(name), int | float)
    ]
    size = -(-len(found) // MOST_POINTS) or 1
    bins = []
    for first in range(0, len(found), size):
        some = found[first : first + size]
        values = [value for _, value in some]
        bins.append(
            Bin(
                step=some[-1][0],
                mean=sum(values) / len(values),
                low=min(values),
                high=max(values),
            )
        )
    return bins


def shares(steps: Sequence[Mapping[str, Any]], name: str) -> list[Bin]:
    """Share of the time that a field in seconds took, bins as in `curve`.

    Lanes are busy between steps too, as in saves and evaluations; the time is from the end of one
    step to that of the next.
    """
    seconds = [
        max(entry["step_time_s"], _elapsed(entry) - _elapsed(before))
        for before, entry in itertools.pairwise([{}, *steps])
    ]
    size = -(-len(steps) // MOST_POINTS) or 1
    bins = []
    for first in range(0, len(steps), size):
        some = steps[first : first + size]
        took, total = [entry.get(name) or 0.0 for entry in some], seconds[first : first + size]
        each = [_share(part, whole) for part, whole in zip(took, total, strict=True)]
        mean = _share(sum(took), sum(total))
        bins.append(Bin(step=some[-1]["step"], mean=mean, low=min(each), high=max(each)))
    return bins


def _elapsed(entry: Mapping[str, Any]) -> float:
    """Seconds since this start's first step; not a number where there was no step or no word."""
    value = entry.get("elapsed_s")
    return math.nan if value is None else float(value)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def median(values: Sequence[float]) -> float | None:
    """None where there are none."""
    return sorted(values)[len(values) // 2] if values else None
