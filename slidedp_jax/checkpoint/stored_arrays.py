"""The arrays of a checkpoint: which there are, where they lie, and in which pieces they travel."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from slidedp_jax.checkpoint.array_file import ArrayFile, folder_name
from slidedp_jax.checkpoint.direct_io import BLOCK_BYTES
from slidedp_jax.models.streamed import Stage
from slidedp_jax.update.state_gate import StateGate

MASTER = "master"
PIECE_BYTES = 16 * BLOCK_BYTES
"""Of an array, read or written by one thread at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredArray:
    """One array of the training state.

    Attributes:
      item: folder of its stage within a checkpoint.
      name: full name of its parameter.
      number: of the optimizer state array; None for the fp32 master.
      shape: of the array.
      dtype: of its elements.
      whole: whether it can be read and written as a whole only.
    """

    item: str
    name: str
    number: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    whole: bool = False

    @property
    def key(self) -> str:
        """Its name within the parameter's: `master`, `state_0`, `state_1`, ..."""
        return MASTER if self.number is None else state_key(self.number)

    @cached_property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.file(pathlib.Path()).num_bytes

    def file(self, checkpoint: pathlib.Path) -> ArrayFile:
        """Where it lies in a checkpoint."""
        return ArrayFile(
            folder=checkpoint / self.item / folder_name(self.name, self.key),
            shape=self.shape,
            dtype=self.dtype,
        )

    def pieces(self) -> Iterator[Piece]:
        """The array in pieces, first one first."""
        length = max(1, self.num_bytes if self.whole else PIECE_BYTES)
        for start in range(0, max(1, self.num_bytes), length):
            yield Piece(
                array=self, start=start, num_bytes=max(0, min(length, self.num_bytes - start))
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Bytes [start, start + num_bytes) of an array's values."""

    array: StoredArray
    start: int
    num_bytes: int

    @property
    def is_last(self) -> bool:
        """Whether the array ends with it."""
        return self.start + self.num_bytes >= self.array.num_bytes

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first byte, number of bytes) of what is handed to the disk at once."""
        end = self.start + self.num_bytes
        for start in range(self.start, end, BLOCK_BYTES):
            yield start, min(BLOCK_BYTES, end - start)

    def elements(self, start: int, num_bytes: int) -> tuple[int, int]:
        """(first, number) of the array's elements in some of its bytes."""
        size = self.array.dtype.itemsize
        return start // size, num_bytes // size


def state_key(number: int) -> str:
    """Name of a parameter's `number`-th optimizer state array."""
    return f"state_{number}"


def item_name(stage: Stage) -> str:
    """Folder of a stage within a checkpoint."""
    return stage.item or stage.name or "head"


def arrays_of(gate: StateGate, stages: Iterable[Stage]) -> list[StoredArray]:
    """The arrays of these stages, in their order."""
    found = []
    for stage in stages:
        for name in stage.parameter_names():
            master = StoredArray(
                item=item_name(stage),
                name=name,
                number=None,
                shape=gate.shapes[name],
                dtype=np.dtype(np.float32),
            )
            whole = gate.is_updated_whole(name)
            states = [
                dataclasses.replace(
                    master, number=number, shape=spec.shape, dtype=spec.dtype, whole=whole
                )
                for number, spec in enumerate(gate.state_specs(name))
            ]
            found += [master, *states]
    return found


def total_bytes(arrays: Sequence[StoredArray]) -> int:
    """Bytes of their values."""
    return sum(array.num_bytes for array in arrays)
