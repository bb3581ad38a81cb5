"""Elastic checkpoints: by parameter name, whatever the chunking and the device count.

A checkpoint is a folder `step_N` with one item per stage of the model (embedding, each layer,
head), which Orbax reads, and `trainer.json`, written last. An item maps each parameter of its stage
to its fp32 master and its optimizer state arrays. Several arrays are written, and read, side by
side. Everything is written into a hidden sibling folder and renamed when complete: a folder named
`step_N` is whole.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from slidedp_jax.checkpoint.array_streams import (
    ArrayReader,
    ArrayWriter,
    Fill,
    Use,
    check_metadata,
    checksums,
    for_each_piece,
    is_plain,
    pieces_of,
)
from slidedp_jax.checkpoint.copy_buffer import CopyBuffer
from slidedp_jax.checkpoint.direct_io import Block
from slidedp_jax.checkpoint.former_items import read_former_item
from slidedp_jax.checkpoint.record import (
    RECORD,
    check_fits,
    describe,
    describe_shared,
    form_to_go_on_with,
    read_record,
    recorded_rounding,
    shared_state,
    write_record,
)
from slidedp_jax.checkpoint.retention import is_checkpoint, list_steps
from slidedp_jax.checkpoint.save_beside import SaveBeside, timed
from slidedp_jax.checkpoint.snapshot_writer import SnapshotWriter
from slidedp_jax.checkpoint.state_arrays import from_state, into_state
from slidedp_jax.checkpoint.stored_arrays import (
    Piece,
    StoredArray,
    arrays_of,
    item_name,
    total_bytes,
)
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Stage, StreamedModel
from slidedp_jax.tracer import Tracer
from slidedp_jax.update.state_gate import StateGate
from slidedp_jax.whole_files import UNFINISHED, remove_whole, sync_folder


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint holds beside arrays.

    Attributes:
      step: optimizer steps done.
      extra: what `save` was given (data position, settings).
    """

    step: int
    extra: dict[str, Any]


def save(
    gate: StateGate, model: StreamedModel, folder: pathlib.Path, extra: Mapping[str, Any]
) -> pathlib.Path:
    """Write `folder/step_N` for the present step N; see `Trainer.save`.

    Args:
      gate: of the state; pending updates are waited for.
      model: its stages and configuration.
      folder: where checkpoints live; made if absent.
      extra: JSON-able values to keep beside the state.

    Returns:
      The checkpoint's folder. One that holds this very state is left as it is.

    Raises:
      UserError: there is a checkpoint of another state with the same number of steps.
      OSError: the file system refuses (`DiskFull`, with the sizes, where there is no room);
        nothing is left behind.
    """
    with gate.reading() as reader:
        arrays = arrays_of(gate, model.stages())
        record = describe(gate, model.configuration, extra) | describe_shared(reader.shared)
        target, fill = _target(gate, folder), from_state(reader)
        if (target / RECORD).is_file():
            _check_is_saved(arrays, fill, target, record)
            return target

        def write(writer: ArrayWriter) -> None:
            for_each_piece(lambda block, piece: writer.write(block, piece, fill), pieces_of(arrays))

        _write_checkpoint(target, record, arrays, write)
        return target


def save_beside(
    gate: StateGate,
    model: StreamedModel,
    folder: pathlib.Path,
    extra: Mapping[str, Any],
    *,
    buffer: CopyBuffer,
    tracer: Tracer,
) -> SaveBeside:
    """Begin to write `folder/step_N` for the present step N; see `Trainer.save_beside`.

    Args:
      gate: of the state.
      model: its stages and configuration.
      folder: where checkpoints live; made if absent.
      extra: JSON-able values to keep beside the state.
      buffer: memory for what has been copied and is not written yet, used by this save alone.
      tracer: takes note of copies and writes.

    Raises:
      UserError: there is a checkpoint of another state with the same number of steps.
    """

    def write_arrays(writer: ArrayWriter) -> None:
        SnapshotWriter(snapshot, arrays, writer, buffer=buffer, tracer=tracer).run()
        snapshot.wait_judged()

    def write() -> float:
        if not taken.acquire(blocking=False):
            raise InterruptedError(f"the save to {target} was interrupted as it began")
        try:
            record.update(describe_shared(snapshot.shared()))
            _write_checkpoint(target, record, arrays, write_arrays)
        finally:
            snapshot.abandon()
        return snapshot.held_s

    with gate.turn:
        gate.check()
        arrays = arrays_of(gate, model.stages())
        size = total_bytes(arrays)
        target = _target(gate, folder)
        if (target / RECORD).is_file():
            save(gate, model, folder, extra)
            buffer.stop()
            return SaveBeside(target, lambda: timed(lambda: 0.0, num_bytes=0, buffer_bytes=0))
        record = describe(gate, model.configuration, extra)
        taken = threading.Lock()  # by whoever lets go of the snapshot: its thread, once that runs
        snapshot = gate.snapshot()
        try:
            most = buffer.num_bytes
            return SaveBeside(target, lambda: timed(write, num_bytes=size, buffer_bytes=most))
        except BaseException:
            if taken.acquire(blocking=False):
                snapshot.abandon()
            raise


def _target(gate: StateGate, folder: pathlib.Path) -> pathlib.Path:
    return folder / f"step_{gate.version:08d}"


def _write_checkpoint(
    target: pathlib.Path,
    record: dict[str, Any],
    arrays: Sequence[StoredArray],
    write: Callable[[ArrayWriter], None],
) -> None:
    """Write a checkpoint that is not there yet; `write` writes all its arrays.

    Raises:
      OSError: the file system refuses; nothing is left.
    """
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    with writing(target, total_bytes(arrays)):
        try:
            remove_whole(target)  # half copied
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            writer = ArrayWriter(unfinished, arrays)
            try:
                write(writer)
                record["checksums"] = writer.finish()
            finally:
                writer.abandon()
            write_record(unfinished, record)
            unfinished.rename(target)
            unfinished = target
            sync_folder(target.parent)
        except BaseException:  # what is left would keep a full disk full
            with contextlib.suppress(OSError):
                remove_whole(unfinished)
            raise


def restore(gate: StateGate, model: StreamedModel, checkpoint: pathlib.Path) -> Restored:
    """Read a checkpoint into the state, whatever devices and chunking it was saved with.

    Pending updates are waited for. Everything is judged before anything is changed: where there are
    weights already, the arrays are read once more for that. Only a disk that fails in between
    leaves a trainer without weights, which says so until a checkpoint is restored.

    Raises:
      UserError: the folder is not a complete checkpoint, damaged, or of another model, model
        configuration or optimizer.
    """
    record = read_record(checkpoint)
    with gate.turn:
        gate.wait()
        check_fits(checkpoint, record, gate, model.configuration)
        arrays = arrays_of(gate, model.stages())
        for item in dict.fromkeys(checkpoint / array.item for array in arrays):
            if not item.is_dir():
                raise UserError(
                    f"{checkpoint} has no {item.name}: it is of another model or damaged"
                )
        _check_names(checkpoint, arrays)
        before = gate.kernel_form
        gate.take_kernel_form(form_to_go_on_with(record))  # which may be refused: before arrays
        try:
            if gate.holds_weights:
                _read_arrays(checkpoint, record, arrays, lambda *_: None)
            rounding = gate.rounding_to_go_on_with(recorded_rounding(checkpoint, record))
        except BaseException:
            gate.take_kernel_form(before)
            raise
        with gate.writing(rounding) as writer:
            _read_arrays(checkpoint, record, arrays, into_state(writer))
            writer.finish(record["step"], shared_state(checkpoint, record))
    return Restored(step=record["step"], extra=record["extra"])


def newest(folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint itself, or the newest complete one in a folder of them.

    Raises:
      UserError: there is none.
    """
    if is_checkpoint(folder):
        return folder
    if steps := list_steps(folder):
        return steps[-1]
    raise UserError(
        f"{folder} holds no complete checkpoint; give a folder `step_N`, or one of them"
    )


def read_parameter_arrays(
    checkpoint: pathlib.Path, stage: Stage, *, averaged: bool = False
) -> dict[str, np.ndarray]:
    """fp32 masters of a stage by full name, without a trainer (for export).

    `averaged`: their moving averages; of frozen parameters the masters. The checkpoint must have
    been saved with `ema_decay`.

    Raises:
      UserError: values are not those that were saved.
    """
    record = read_record(checkpoint)
    arrays, found = [], {}
    leaves = jax.tree.leaves(stage.shapes)
    for name, leaf in zip(stage.parameter_names(), leaves, strict=True):
        kept = len(record["optimizer_state"].get(name, ()))  # the average is the last
        array = StoredArray(
            item=item_name(stage),
            name=name,
            number=kept - 1 if averaged and kept else None,
            shape=tuple(leaf.shape),
            dtype=np.dtype(np.float32),
        )
        arrays.append(array)
        found[name] = np.empty(array.shape, np.float32)

    def take(array: StoredArray, start: int, values: np.ndarray) -> None:
        found[array.name].reshape(-1)[start : start + len(values)] = values

    _read_arrays(checkpoint, record, arrays, take)
    return found


def _check_is_saved(
    arrays: Sequence[StoredArray], fill: Fill, target: pathlib.Path, record: Mapping[str, Any]
) -> None:
    """Whether a checkpoint holds the state that is read, bit for bit.

    Raises:
      UserError: it holds another one.
    """
    saved = read_record(target)
    same = {name: saved.get(name) for name in record} == dict(record)
    if same and checksums(arrays, fill) == saved.get("checksums"):
        return
    raise UserError(
        f"{target} holds another state of step {record['step']}, of another run or from before "
        "this one went back. Nothing was written: give another folder, or move that one away"
    )


def _read_arrays(
    checkpoint: pathlib.Path, record: Mapping[str, Any], arrays: Sequence[StoredArray], use: Use
) -> None:
    """Read arrays, compare them with their checksums and hand them on.

    Raises:
      UserError: some are not there, not whole, or others.
    """
    expected = record.get("checksums")
    plain = {item for item in {array.item for array in arrays} if is_plain(checkpoint / item)}
    reader = ArrayReader(checkpoint, expected)

    def read(block: Block, piece: Piece) -> None:
        try:
            reader.read(block, piece, use)
        except (ValueError, FileNotFoundError) as error:
            raise _unreadable(checkpoint / piece.array.item, error) from error

    for_each_piece(read, pieces_of(array for array in arrays if array.item in plain))
    for item in dict.fromkeys(array.item for array in arrays if array.item not in plain):
        own = [array for array in arrays if array.item == item]
        try:
            read_former_item(checkpoint / item, own, expected, use)
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise _unreadable(checkpoint / item, error) from error


def _check_names(checkpoint: pathlib.Path, arrays: Sequence[StoredArray]) -> None:
    """Whether what plain Orbax would read of the items is whole.

    Raises:
      UserError: it is not.
    """
    for item in dict.fromkeys(array.item for array in arrays):
        if is_plain(checkpoint / item):
            try:
                check_metadata(checkpoint, [array for array in arrays if array.item == item])
            except (ValueError, FileNotFoundError) as error:
                raise _unreadable(checkpoint / item, error) from error


def _unreadable(item: pathlib.Path, error: Exception) -> UserError:
    return UserError(
        f"{item} cannot be read: it is damaged, or of another model. To go on from an earlier "
        f"checkpoint, move {item.parent} away. What was found: {str(error)[:500]}"
    )
