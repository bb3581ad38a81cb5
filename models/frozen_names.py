"""Which parameters stay as they are, by name. Imports no JAX."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Sequence


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Names that a shell-style pattern fits (`*`, `?`, `[...]`; case matters).

    Raises:
      ValueError: a pattern fits no name, or all names are frozen.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
            raise ValueError(
                f"no parameter is called {pattern!r}, which is to be frozen; names look like "
                f"{', '.join(near)}, and * stands for anything, as in 'model.layers.0.*'"
            )
        found.update(fitting)
    if len(found) == len(names):
        raise ValueError(
            f"all {len(names)} parameters are frozen by {list(patterns)}; nothing is left to train"
        )
    return found
