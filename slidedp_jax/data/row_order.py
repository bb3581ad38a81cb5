"""In which order rows are taken: each file's as often as its weight says, epoch by epoch.

All orders are read by random access, so that a run is resumed anywhere at once. Without weights an
epoch is one permutation of all rows, made by grain. With weights, a file of n rows and weight w
gives round(w n) rows to each epoch, the next ones of its own endless order, in which every row
comes once before any comes again: with 0.5 each half of a file has its turn, with 2 an epoch has
all rows twice. What the files give is then permuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from slidedp_jax.errors import UserError


@final
class RowOrder:
    """An endless order of rows.

    Args:
      rows_of_files: rows of each file; those of a file follow each other.
      weights: passes over each file in an epoch; None: one over all of them.
      seed: 0 to 2**32 - 1; None: the rows' own order.

    Attributes:
      num_rows: rows of an epoch.
      taken: of them from each file; None without weights.
    """

    def __init__(
        self, rows_of_files: Sequence[int], weights: Sequence[float] | None, seed: int | None
    ):
        self.taken: tuple[int, ...] | None = None
        self._firsts = np.concatenate([[0], np.cumsum(rows_of_files)]).astype(np.int64)
        self.num_rows = int(self._firsts[-1])
        if weights is not None:
            self.taken = tuple(
                max(1, round(weight * rows)) if weight and rows else 0
                for weight, rows in zip(weights, rows_of_files, strict=True)
            )
            self.num_rows = sum(self.taken)
            self._ends = np.cumsum(self.taken)
            self._files = [
                None if not rows else _permutations(rows, _seed_of_file(seed, file))
                for file, rows in enumerate(rows_of_files)
            ]
        self._places = _permutations(self.num_rows, seed) if self.num_rows else None

    def row(self, epoch: int, place: int) -> int:
        """The row at a place of an epoch."""
        assert self._places is not None
        slot = int(self._places[epoch * self.num_rows + place]) % self.num_rows
        if self.taken is None:
            return slot
        file = int(np.searchsorted(self._ends, slot, side="right"))
        taken, rows = self.taken[file], self._files[file]
        assert rows is not None
        turn = epoch * taken + slot - int(self._ends[file] - taken)
        own = int(self._firsts[file + 1] - self._firsts[file])
        return int(self._firsts[file]) + int(rows[turn]) % own


def checked_weights(weights: Sequence[float] | None, num_files: int) -> tuple[float, ...] | None:
    """Weights as they are used; None where they change nothing.

    Raises:
      UserError: they are not one for each file, or not numbers that can be weights.
    """
    if weights is None or len(weights) == 0:
        return None
    if len(weights) != num_files:
        raise UserError(
            f"there are {len(weights)} file weights for {num_files} files; give one for each file"
        )
    if not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise UserError(
            f"file weights are {list(weights)}; they must be finite and not negative, and one of "
            "them not 0"
        )
    return None if set(weights) == {1.0} else tuple(float(weight) for weight in weights)


def _seed_of_file(seed: int | None, file: int) -> int | None:
    """Files of equal length are not to be taken in the same order."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, file]).generate_state(1, np.uint32)[0])


def _permutations(num_rows: int, seed: int | None) -> Any:
    """Endless order by random access: index = epoch * num_rows + place -> row."""
    import grain  # here, as it imports JAX where that is installed

    rows = grain.MapDataset.range(num_rows)
    if seed is not None:
        rows = rows.seed(seed).shuffle()
    return rows.repeat()
