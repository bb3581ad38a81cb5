"""An array of a checkpoint as files that plain Orbax reads: Zarr version 3, one file of data.

    ITEM/_METADATA                  the names of the item's arrays, as Orbax writes them
    ITEM/NAME.KEY/zarr.json         shape, dtype, and how the bytes lie
    ITEM/NAME.KEY/0.0               the array's bytes in row-major order, little endian; behind
                                    them zeros up to whole pieces, then where each piece begins

A reader that wants a part of an array reads the pieces of whole rows that hold it (the codec
`sharding_indexed`). Pieces follow each other without gaps, so the file begins with the array. One
without elements has a single piece, whose place says that it is missing.

Sources: the Zarr v3 specification and its codec `sharding_indexed`; of Orbax, the names of folders
and the content of `_METADATA` (a test has plain Orbax read them).
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from slidedp_jax.checkpoint.crc import crc32c

BYTES_PER_PIECE = 1 << 26
"""The most that a reader must take of an array at once, unless a single row is larger."""

METADATA = "_METADATA"
ARRAY_METADATA = "zarr.json"

_MISSING = 2**64 - 1
"""The place of a piece that is not there."""

_DICT_KEY = 2
"""How Orbax says that a level of its tree is a dictionary."""


@dataclass(frozen=True, kw_only=True)
class ArrayFile:
    """Where an array of a checkpoint lies, and how.

    Attributes:
      folder: of this array.
      shape: of the array.
      dtype: of its elements.
    """

    folder: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def data(self) -> pathlib.Path:
        """The file that holds the bytes."""
        return self.folder / (".".join("0" * len(self.shape)) or "0")

    @property
    def num_elements(self) -> int:
        """Of the array."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the array; as many at the beginning of the file are its values."""
        return self.num_elements * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return len(self.tail) + self.num_bytes

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Shape of a piece: whole rows, as many as `BYTES_PER_PIECE` allow."""
        if not self.num_elements:
            return tuple(max(1, length) for length in self.shape)
        piece = list(self.shape)
        for axis, length in enumerate(self.shape):
            row = math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize
            if length * row <= BYTES_PER_PIECE:
                break
            if row > BYTES_PER_PIECE and axis + 1 < len(piece):
                piece[axis] = 1
                continue
            number = -(-length * row // BYTES_PER_PIECE)
            if axis == 0:  # what the last piece has too much comes behind all values
                piece[axis] = -(-length // number)
            else:  # within an array there must be no gap
                piece[axis] = next(n for n in range(length // number, 0, -1) if length % n == 0)
            break
        return tuple(piece)

    @cached_property
    def tail(self) -> bytes:
        """What comes behind the values: zeros up to whole pieces, then their places."""
        piece_bytes = math.prod(self.pieces) * self.dtype.itemsize
        number = math.prod(self._counts)
        places = np.empty((number, 2), "<u8")
        places[:, 0] = np.arange(number) * piece_bytes
        places[:, 1] = piece_bytes
        if not self.num_elements:
            places[:] = _MISSING
        index = places.tobytes()
        fill = number * piece_bytes - self.num_bytes if self.num_elements else 0
        return bytes(fill) + index + crc32c(index).to_bytes(4, "little")

    @property
    def _counts(self) -> list[int]:
        """Pieces along each axis."""
        return [max(1, -(-n // piece)) for n, piece in zip(self.shape, self.pieces, strict=True)]

    def description(self) -> str:
        """The text of `zarr.json`."""
        whole = [n * piece for n, piece in zip(self._counts, self.pieces, strict=True)]
        little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            "chunk_shape": list(self.pieces),
            "codecs": [little_endian],
            "index_codecs": [little_endian, {"name": "crc32c"}],
            "index_location": "end",
        }
        return json.dumps(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": list(self.shape),
                "data_type": self.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": whole}},
                "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
                "fill_value": 0 if self.dtype.kind in "iu" else False if _is_bool(self) else 0.0,
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                "attributes": {},
            }
        )


def _is_bool(array: ArrayFile) -> bool:
    return array.dtype.kind == "b"


def folder_name(name: str, key: str) -> str:
    """Of the array `key` of a parameter, within its item: Orbax joins a tree's keys by dots."""
    return f"{name}.{key}"


def item_metadata(arrays: Iterable[Sequence[str]]) -> str:
    """The text of an item's `_METADATA`, given the (name, key) of its arrays."""
    tree = {
        str(tuple(path)): {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for path in arrays
    }
    return json.dumps(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )
