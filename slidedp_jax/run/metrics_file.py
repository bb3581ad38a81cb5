"""`metrics.jsonl`: one JSON object per line, each written whole and read back."""

from __future__ import annotations

import datetime
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from slidedp_jax.disk_room import writing
from slidedp_jax.whole_files import write_whole

NONFINITE = "nonfinite"
"""Entry of a record that says what the numbers were that JSON cannot hold and that are null."""


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


def records_of_steps(path: pathlib.Path) -> list[dict[str, Any]]:
    """All whole records; none without the file."""
    if not path.exists():
        return []
    lines = path.read_bytes().decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if _step_of(line) is not None]


def losses_of_steps(path: pathlib.Path) -> dict[int, dict[str, float]]:
    """Step -> its `loss`, and its `eval_loss` where it was evaluated; nothing without the file."""
    found: dict[int, dict[str, float]] = {}
    for record in records_of_steps(path):
        own: dict[str, float] = {
            name: record[name] for name in ("loss", "eval_loss") if name in record
        }
        found.setdefault(int(record["step"]), {}).update(own)
    return found


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
