"""Tokenised examples, kept compactly in host memory.

One int32 per token and nothing else: host memory is what this project is short of. A supervised
token is stored as its id, any other as the bitwise complement of its id (a negative number), so
inputs and labels come out of one array.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

IGNORED = -100
"""Label of a token that is not supervised (the Hugging Face convention)."""

_TOKENS_AT_ONCE = 1 << 24


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Token sequences with labels.

    Attributes:
      coded: int32 [tokens]: ids of supervised tokens, complements of the others.
      offsets: int64 [examples + 1]: example i is `coded[offsets[i]:offsets[i + 1]]`.
      row_ids: int64 [examples]: number of the row (from 0, over all files) that each came from.
      file_rows: rows of each file, in order; empty where that is not known.

    The arrays may be memory-mapped files.
    """

    coded: np.ndarray
    offsets: np.ndarray
    row_ids: np.ndarray
    file_rows: tuple[int, ...] = ()

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
        starts = range(0, len(self.coded), _TOKENS_AT_ONCE)
        parts = (self.coded[start : start + _TOKENS_AT_ONCE] for start in starts)
        return sum(int(np.count_nonzero(part >= 0)) for part in parts)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of tokens, labels and boundaries, the same on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.ascontiguousarray(self.offsets, "<i8").data)
        digest.update(np.ascontiguousarray(self.coded, "<i4").data)
        return digest.hexdigest()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some examples of consecutive rows of one file; the attributes are those of `Examples`.

    Attributes:
      coded: int32 [tokens].
      lengths: int64 [examples].
      row_ids: int64 [examples], from 0 in the part.
    """

    coded: np.ndarray
    lengths: np.ndarray
    row_ids: np.ndarray


@final
class ExamplesBuilder:
    """Appends examples, then `finish`es."""

    def __init__(self) -> None:
        self._coded = array("i")
        self._lengths = array("q")
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
        self._lengths.append(len(coded))
        self._row_ids.append(row_id)

    def extend(self, part: Part, first_row: int) -> None:
        """Add the examples of a part whose first row has that number."""
        self._coded.frombytes(part.coded.tobytes())
        self._lengths.frombytes(part.lengths.tobytes())
        self._row_ids.frombytes((part.row_ids + first_row).tobytes())

    def part(self) -> Part:
        """The examples, to be handed on."""
        return Part(
            coded=_view(self._coded, np.int32),
            lengths=_view(self._lengths, np.int64),
            row_ids=_view(self._row_ids, np.int64),
        )

    def finish(self, file_rows: Sequence[int] = ()) -> Examples:
        """The examples; the arrays are views of what was gathered, without a copy.

        Args:
          file_rows: rows of each file.
        """
        lengths = _view(self._lengths, np.int64)
        return Examples(
            coded=_view(self._coded, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            row_ids=_view(self._row_ids, np.int64),
            file_rows=tuple(file_rows),
        )


def _view(gathered: array[int], dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(gathered, dtype) if gathered else np.zeros(0, dtype)
