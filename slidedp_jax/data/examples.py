"""Tokenised examples, kept compactly in host memory.

One int32 per token and nothing else: host memory is what this project is short of. A supervised
token is stored as its id, any other as the bitwise complement of its id (a negative number), so
inputs and labels come out of one array.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

IGNORED = -100
"""Label of a token that is not supervised (the Hugging Face convention)."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Token sequences with labels.

    Attributes:
      coded: int32 [tokens]: ids of supervised tokens, complements of the others.
      offsets: int64 [examples + 1]: example i is `coded[offsets[i]:offsets[i + 1]]`.
      row_ids: int64 [examples]: number of the row (from 0, over all files) that each came from.
    """

    coded: np.ndarray
    offsets: np.ndarray
    row_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs and labels of each example."""
        return ((self.input_ids(i), self.labels(i)) for i in range(len(self)))

    def input_ids(self, index: int) -> np.ndarray:
        """Token ids of an example, int32 [length]."""
        coded = self.coded[self.offsets[index] : self.offsets[index + 1]]
        return np.where(coded >= 0, coded, ~coded)

    def labels(self, index: int) -> np.ndarray:
        """Labels of an example, int32 [length], aligned with its inputs: the id or -100."""
        coded = self.coded[self.offsets[index] : self.offsets[index + 1]]
        return np.where(coded >= 0, coded, np.int32(IGNORED))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per example, int64 [examples]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return len(self.coded)

    @cached_property
    def num_supervised_tokens(self) -> int:
        """Supervised tokens of all examples."""
        return int(np.count_nonzero(self.coded >= 0))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of tokens, labels and boundaries, the same on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.ascontiguousarray(self.offsets, "<i8").data)
        digest.update(np.ascontiguousarray(self.coded, "<i4").data)
        return digest.hexdigest()


@final
class ExamplesBuilder:
    """Appends examples, then `finish`es."""

    def __init__(self) -> None:
        self._coded = array("i")
        self._offsets = array("q", [0])
        self._row_ids = array("q")
        assert self._coded.itemsize == 4

    def __len__(self) -> int:
        return len(self._row_ids)

    def append(self, input_ids: np.ndarray, supervised: np.ndarray, row_id: int) -> None:
        """Add an example.

        Args:
          input_ids: int32 [length], not negative.
          supervised: bool [length].
          row_id: number of its row.
        """
        coded = np.where(supervised, input_ids, ~input_ids).astype(np.int32)
        self._coded.frombytes(coded.tobytes())
        self._offsets.append(len(self._coded))
        self._row_ids.append(row_id)

    def finish(self) -> Examples:
        """The examples; the arrays are views of what was gathered, without a copy."""
        return Examples(
            coded=np.frombuffer(self._coded, np.int32) if self._coded else np.zeros(0, np.int32),
            offsets=np.frombuffer(self._offsets, np.int64),
            row_ids=np.frombuffer(self._row_ids, np.int64) if len(self) else np.zeros(0, np.int64),
        )
