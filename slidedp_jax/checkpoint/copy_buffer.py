"""Memory of a bounded size through which a snapshot passes on its way to the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from slidedp_jax.checkpoint.stored_arrays import PIECE_BYTES, Piece, StoredArray

_IN_FILE = 4096
"""Pieces begin at multiples of a page within their files (`direct_io`)."""
_IN_MEMORY = 64
"""And of a cache line in memory."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Pieces of one chunk that are copied, and written, together.

    Attributes:
      chunk: whose they are.
      pieces: with the place in the batch's memory where each begins.
      num_bytes: of that memory.
      is_last: whether the chunk ends with it.
    """

    chunk: int
    pieces: tuple[tuple[int, Piece], ...]
    num_bytes: int
    is_last: bool


def batches_of(chunk: int, arrays: Iterable[StoredArray]) -> Iterator[Batch]:
    """A chunk's arrays in batches of `PIECE_BYTES`, all full but the last.

    An array that can be copied as a whole only is a batch of its own.
    """
    found: list[tuple[tuple[tuple[int, Piece], ...], int]] = []
    own: list[tuple[int, Piece]] = []
    used = 0
    for array in arrays:
        if array.whole:
            (piece,) = array.pieces()
            found.append((((0, piece),), array.num_bytes))
            continue
        start = 0
        if not array.num_bytes:
            own.append((used, Piece(array=array, start=0, num_bytes=0)))
        while start < array.num_bytes:
            room = (PIECE_BYTES - used) // _IN_FILE * _IN_FILE
            size = min(room, array.num_bytes - start)
            if size:
                own.append((used, Piece(array=array, start=start, num_bytes=size)))
                start += size
                used += -(-size // _IN_MEMORY) * _IN_MEMORY
            if start < array.num_bytes:
                found.append((tuple(own), PIECE_BYTES))
                own, used = [], 0
    if own:
        found.append((tuple(own), PIECE_BYTES))
    for number, (pieces, num_bytes) in enumerate(found, start=1):
        yield Batch(chunk=chunk, pieces=pieces, num_bytes=num_bytes, is_last=number == len(found))


class Stopped(Exception):
    """Whoever waited for memory need not wait any more: something else has failed."""


class CopyBuffer:
    """Memory for batches, used again and again.

    Args:
      num_bytes: most of it at once; a batch that takes more is copied alone.

    Attributes:
      num_bytes: the same.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = self._left = num_bytes
        self._unused: list[np.ndarray] = []
        self._begun = 0
        self._used = self._stopped = False
        self._condition = threading.Condition()

    def make_ahead(self) -> None:
        """Have the system find the memory before it is used; ends early when it is, or stopped.

        The first touch of memory costs more than copying into it: where a virtual machine has to
        ask its host for it, several times as much. Several threads may share the work.
        """
        while True:
            with self._condition:
                whole = self._begun >= self.num_bytes // PIECE_BYTES
                if whole or self._used or self._stopped:
                    return
                self._begun += 1
            memory = np.empty(PIECE_BYTES, np.uint8)
            memory.fill(0)
            with self._condition:
                if not self._stopped:
                    self._unused.append(memory)
                    self._keep_no_more_than_is_left()

    def has_room(self, batch: Batch) -> bool:
        """Whether `take` would not wait."""
        with self._condition:
            return self._has_room(batch.num_bytes)

    def _has_room(self, size: int) -> bool:
        return self._left >= size or self._left == self.num_bytes

    def take(self, batch: Batch) -> np.ndarray:
        """Memory for a batch, uint8; waits for it.

        Raises:
          Stopped: `stop` was called.
        """
        size = batch.num_bytes
        with self._condition:
            self._used = True
            self._condition.wait_for(lambda: self._stopped or self._has_room(size))
            if self._stopped:
                raise Stopped
            self._left -= size
            if size == PIECE_BYTES and self._unused:
                return self._unused.pop()
            self._keep_no_more_than_is_left()
        return np.empty(size, np.uint8)

    def _keep_no_more_than_is_left(self) -> None:
        """Batches of another size have memory of their own, which counts as well."""
        del self._unused[max(0, self._left) // PIECE_BYTES :]

    def give_back(self, memory: np.ndarray) -> None:
        """The batch has been written."""
        with self._condition:
            self._left += len(memory)
            if len(memory) == PIECE_BYTES and not self._stopped:
                self._unused.append(memory)
                self._keep_no_more_than_is_left()
            self._condition.notify_all()

    def stop(self) -> None:
        """Wake who waits; nothing is to be had any more, so no memory is kept."""
        with self._condition:
            self._stopped = True
            self._unused.clear()
            self._condition.notify_all()
