"""What lies in a checkpoint, found without the model that it is of: listed, verified, copied."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slidedp_jax.checkpoint.array_file import ARRAY_METADATA, METADATA, folder_name
from slidedp_jax.checkpoint.array_streams import (
    ArrayReader,
    ArrayWriter,
    check_metadata,
    for_each_piece,
    is_plain,
    pieces_of,
)
from slidedp_jax.checkpoint.direct_io import Block
from slidedp_jax.checkpoint.former_items import read_former_item
from slidedp_jax.checkpoint.record import WEIGHTS_ONLY, read_record, write_record
from slidedp_jax.checkpoint.stored_arrays import (
    MASTER,
    Piece,
    StoredArray,
    state_key,
    total_bytes,
)
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import read_arrays
from slidedp_jax.whole_files import UNFINISHED, remove_whole, sync_folder

_COPIERS = 4
"""Threads that hold a piece each while it is copied."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Something of a checkpoint that is not what was written: which file, and why."""

    path: pathlib.Path
    why: str


def items_of(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """Folders of its items, by name; hidden ones are none."""
    found = (path for path in checkpoint.iterdir() if not path.name.startswith("."))
    return sorted(path for path in found if path.is_dir())


def arrays_in(checkpoint: pathlib.Path, record: Mapping[str, Any]) -> list[StoredArray]:
    """The arrays of a checkpoint, item by item, as its record names them.

    Raises:
      UserError: some cannot be found.
    """
    expected = record.get("checksums")
    found = [array for item in items_of(checkpoint) for array in _arrays_in_item(item)]
    if expected is not None:
        there = {(array.name, array.key) for array in found}
        wanted = {(name, key) for name, own in expected.items() for key in own}
        if missing := sorted(wanted - there):
            name, key = missing[0]
            raise UserError(
                f"{checkpoint} is damaged: {key} of {name} is missing"
                + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            )
    return found


def _arrays_in_item(item: pathlib.Path) -> Iterator[StoredArray]:
    if not is_plain(item):
        for name, arrays in read_arrays(item.absolute()).items():
            for key, values in arrays.items():
                yield _stored(item, name, key, np.shape(values), np.asarray(values).dtype)
        return
    try:
        tree = json.loads((item / METADATA).read_bytes().decode())["tree_metadata"]
        paths = [[level["key"] for level in entry["key_metadata"]] for entry in tree.values()]
        for name, key in paths:
            text = (item / folder_name(name, key) / ARRAY_METADATA).read_bytes().decode()
            described = json.loads(text)
            yield _stored(
                item, name, key, tuple(described["shape"]), _dtype(described["data_type"])
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{item} is damaged: {error}") from None


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # which teaches NumPy bfloat16  # noqa: F401

    return np.dtype(name)


def _stored(
    item: pathlib.Path, name: str, key: str, shape: Sequence[int], dtype: np.dtype[Any]
) -> StoredArray:
    number = None if key == MASTER else int(key.removeprefix(state_key(0)[:-1]))
    return StoredArray(item=item.name, name=name, number=number, shape=tuple(shape), dtype=dtype)


def verify(checkpoint: pathlib.Path) -> tuple[int, list[Damage]]:
    """Read all of a checkpoint: its bytes of arrays, and everything that is not what was written.

    Raises:
      UserError: its record is missing or damaged, or arrays are missing.
      OSError: the file system refuses, in another way than for a file that is missing.
    """
    record = read_record(checkpoint)
    arrays = arrays_in(checkpoint, record)
    expected = record.get("checksums")
    damages: dict[pathlib.Path, str] = {}
    lock = threading.Lock()

    def note(path: pathlib.Path, error: Exception) -> None:
        with lock:
            damages.setdefault(path, str(error))

    for item in dict.fromkeys(array.item for array in arrays):
        own = [array for array in arrays if array.item == item]
        try:
            if is_plain(checkpoint / item):
                check_metadata(checkpoint, own)
            else:
                read_former_item(checkpoint / item, own, expected, lambda *_: None)
        except (ValueError, KeyError, FileNotFoundError, RuntimeError) as error:
            note(checkpoint / item, error)
    reader = ArrayReader(checkpoint, expected)

    def read(block: Block, piece: Piece) -> None:
        try:
            reader.read(block, piece, lambda *_: None)
        except (ValueError, FileNotFoundError) as error:
            note(piece.array.file(checkpoint).folder, error)

    plain = [array for array in arrays if is_plain(checkpoint / array.item)]
    for_each_piece(read, pieces_of(plain))
    return total_bytes(arrays), [Damage(path=path, why=why) for path, why in damages.items()]


def copy(checkpoint: pathlib.Path, target: pathlib.Path, *, weights_only: bool) -> int:
    """Copy a checkpoint, reading every array against its checksum; returns the bytes of arrays.

    One that an earlier version wrote becomes one of today's.

    Args:
      checkpoint: its folder.
      target: the copy; it must not exist.
      weights_only: leave the optimizer's state out; nothing can go on from that, but it can be
        exported, and Orbax reads it.

    Raises:
      UserError: it is damaged, or there is something at `target`.
      OSError: the file system refuses; nothing is left.
    """
    if target.exists():
        raise UserError(f"{target} exists; give a new name")
    record = read_record(checkpoint)
    arrays = arrays_in(checkpoint, record)
    if weights_only:
        arrays = [array for array in arrays if array.number is None]
        nothing: dict[str, list[str]] = {name: [] for name in record["optimizer_state"]}
        record |= {WEIGHTS_ONLY: True, "optimizer_state": nothing, "ema_decay": None}
        if "optimizer_state_names" in record:
            record |= {"optimizer_state_names": nothing}
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    with writing(target, total_bytes(arrays)):
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            record["checksums"] = _copy_arrays(checkpoint, unfinished, arrays, record)
            write_record(unfinished, record)
            unfinished.rename(target)
            unfinished = target
            sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_whole(unfinished)
            raise
    return total_bytes(arrays)


def _copy_arrays(
    checkpoint: pathlib.Path,
    folder: pathlib.Path,
    arrays: Sequence[StoredArray],
    record: Mapping[str, Any],
) -> dict[str, dict[str, int]]:
    expected = record.get("checksums")
    writer, reader = ArrayWriter(folder, arrays), ArrayReader(checkpoint, expected)

    def copy_piece(block: Block, piece: Piece) -> None:
        held = np.empty(piece.num_bytes, np.uint8).view(piece.array.dtype)
        first, _ = piece.elements(piece.start, piece.num_bytes)

        def take(_: StoredArray, start: int, values: np.ndarray) -> None:
            held[start - first : start - first + len(values)] = values

        def give(_: StoredArray, start: int, out: np.ndarray) -> None:
            out[:] = held[start - first : start - first + len(out)]

        try:
            reader.read(block, piece, take)
        except FileNotFoundError as error:  # of the checkpoint, not of the copy
            raise ValueError(str(error)) from None
        writer.write(block, piece, give)

    try:
        plain = [array for array in arrays if is_plain(checkpoint / array.item)]
        for_each_piece(copy_piece, pieces_of(plain), threads=_COPIERS)
        for item in dict.fromkeys(array.item for array in arrays):
            if not is_plain(checkpoint / item):
                own = [array for array in arrays if array.item == item]
                _copy_former(checkpoint / item, own, expected, writer)
        return writer.finish()
    except (ValueError, KeyError) as error:
        raise UserError(f"{checkpoint} is damaged: {error}") from None
    finally:
        writer.abandon()


def _copy_former(
    item: pathlib.Path,
    arrays: Sequence[StoredArray],
    expected: Mapping[str, Mapping[str, int]] | None,
    writer: ArrayWriter,
) -> None:
    """An item of an earlier version, all of which is in memory meanwhile."""
    held: dict[StoredArray, np.ndarray] = {}

    def take(array: StoredArray, _: int, values: np.ndarray) -> None:
        held[array] = values

    def give(array: StoredArray, start: int, out: np.ndarray) -> None:
        out[:] = held[array][start : start + len(out)]

    read_former_item(item, arrays, expected, take)
    for_each_piece(lambda block, piece: writer.write(block, piece, give), pieces_of(arrays))


def parameters_in(arrays: Sequence[StoredArray]) -> int:
    """Elements of all masters."""
    return sum(math.prod(array.shape) for array in arrays if array.number is None)
