"""`metrics.jsonl`: one JSON object per line, each written whole and read back."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from slidedp_jax.disk_room import writing
from slidedp_jax.whole_files import write_whole

NONFINITE = "nonfinite"
"""Entry of a record that says what the numbers were that JSON cannot hold and that are null."""
EVALUATED_ROWS = "eval_data"
"""Entry of an evaluation: the fingerprint of its rows."""


class MetricsFile:
    """Appends records.

    Args:
      path: the file; made if it is not there.

    Raises:
      OSError: the file system refuses; the message names the file.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        with writing(path):
            self._stream = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, with the time of day (UTC) as `time`.

        What a full disk cuts is forgotten when the run goes on.

        Raises:
          OSError: the file system refuses; the message names the file.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = (json.dumps(as_json({**record, "time": now}), allow_nan=False) + "\n").encode()
        with writing(self._path):
            while line:
                line = line[self._stream.write(line) :]

    def close(self) -> None:
        """Nothing is written any more."""
        self._stream.close()


def as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same with null for numbers that JSON has no word for; `nonfinite` says what they were."""
    odd = {
        name: str(value)
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return {
        **{name: None if name in odd else value for name, value in record.items()},
        **({NONFINITE: odd} if odd else {}),
    }


def drop_after(path: pathlib.Path, step: int) -> None:
    """Forget records of later steps, which a resumed run will take again, and lines that are cut.

    Raises:
      OSError: the file system refuses; the message names the file.
    """
    if not path.exists():
        return
    text = path.read_bytes().decode(errors="replace")
    kept = [f"{line}\n" for line in text.splitlines() if _step_of(line) in range(step + 1)]
    if "".join(kept) != text:
        write_whole(path, "".join(kept))


def has_evaluation(path: pathlib.Path, step: int, rows: str) -> bool:
    """Whether the file holds the loss of these rows after a step.

    Args:
      path: the file; it need not exist.
      step: steps done.
      rows: their fingerprint; earlier versions did not write it down.
    """
    if not path.exists():
        return False
    lines = path.read_bytes().decode(errors="replace").splitlines()
    records = [json.loads(line) for line in lines if _step_of(line) == step]
    return any(
        "eval_loss" in record and record.get(EVALUATED_ROWS, rows) == rows for record in records
    )


def best_evaluated(
    path: pathlib.Path, steps: Collection[int], rows: str, metric: str = "eval_loss"
) -> int | None:
    """Of these steps, that with the lowest figure; None where none was evaluated.

    Args:
      path: the file; it need not exist.
      steps: to choose from.
      rows: fingerprint of the rows.
      metric: key of the figure.
    """
    found = evaluated(path, rows, metric)
    values = [(value, step) for step, value in found.items() if step in steps and value is not None]
    return min(values)[1] if values else None


def evaluated(path: pathlib.Path, rows: str, metric: str = "eval_loss") -> dict[int, float | None]:
    """Step -> a figure of its evaluation of these rows; None where that is not finite.

    Args:
      path: the file; it need not exist.
      rows: fingerprint of the rows.
      metric: key of the figure.
    """
    if not path.exists():
        return {}
    lines = path.read_bytes().decode(errors="replace").splitlines()
    records = [json.loads(line) for line in lines if _step_of(line) is not None]
    return {
        record["step"]: record[metric]
        for record in records
        if metric in record and record.get(EVALUATED_ROWS, rows) == rows
    }


def losses_of_steps(path: pathlib.Path) -> dict[int, dict[str, float]]:
    """Step -> its `loss`, and its `eval_loss` where it was evaluated; nothing without the file."""
    found: dict[int, dict[str, float]] = {}
    if path.exists():
        for line in path.read_bytes().decode(errors="replace").splitlines():
            if (step := _step_of(line)) is not None:
                record = json.loads(line)
                own = {name: record[name] for name in ("loss", "eval_loss") if name in record}
                found.setdefault(step, {}).update(own)
    return found


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
