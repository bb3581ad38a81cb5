"""`metrics.jsonl`: one JSON object per line, each written whole."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from slidedp_jax.disk_room import writing


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
        """Append one record; what a full disk cuts is forgotten when the run goes on.

        Raises:
          OSError: the file system refuses; the message names the file.
        """
        line = (json.dumps(dict(record)) + "\n").encode()
        with writing(self._path):
            while line:
                line = line[self._stream.write(line) :]

    def close(self) -> None:
        """Nothing is written any more."""
        self._stream.close()
