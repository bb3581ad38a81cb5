"""Elastic checkpoints with Orbax: by parameter name, whatever the chunking and the device count.

A checkpoint is a folder `step_N` with one Orbax item per stage of the model (embedding, each layer,
head) and `trainer.json`, written last. An item maps each parameter of its stage to its fp32 master
and its optimizer state arrays. Stages are written, and read, side by side, as many as fit into the
memory of two neighbouring ones. Everything is written into a hidden sibling folder and renamed when
complete: a folder named `step_N` is whole.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from models.streamed import Stage
from planner.memory import largest_neighbours
from slidedp_jax.bounded_work import side_by_side
from slidedp_jax.errors import UserError
from slidedp_jax.host_store import HostStore
from slidedp_jax.stage_arrays import (
    MASTER,
    Checksums,
    array_specs,
    checksums,
    read_stage,
    stage_bytes,
    state_key,
    verify,
    write_stage,
)
from slidedp_jax.trainer import Trainer

FORMAT = 2
STAGES_AT_ONCE = 4
"""Each is one stream of bytes to or from the disk."""
THREADS = 8
"""That copy parameters and add up their checksums, for all stages at once."""
BYTES_PER_FILE_CHUNK = 1 << 26
"""Larger arrays are cut: in one piece, reading them takes the memory twice."""
SMALLEST_FILE_CHUNK = 1 << 22
"""Arrays whose sizes allow smaller pieces only (of a prime vocabulary, rows) are not cut."""

_KEYS = {
    "format",
    "step",
    "shared_optimizer_state",
    "optimizer_state",
    "kernel_form",
    "ema_decay",
    "extra",
}
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint holds beside arrays.

    Attributes:
      step: optimizer steps done.
      extra: what `save` was given (data position, settings).
    """

    step: int
    extra: dict[str, Any]


def save(trainer: Trainer, folder: pathlib.Path, extra: Mapping[str, Any]) -> pathlib.Path:
    """Write `folder/step_N` for the trainer's present step N.

    Args:
      trainer: its pending updates are waited for.
      folder: where checkpoints live; made if absent.
      extra: JSON-able values to keep beside the state.

    Returns:
      The checkpoint's folder. An existing complete checkpoint of the step is left as it is.

    Raises:
      OSError: the file system refuses; no `step_N` is left behind.
    """
    trainer.wait()
    target = folder / f"step_{trainer.step_count:08d}"
    if (target / "trainer.json").is_file():
        return target
    shutil.rmtree(target, ignore_errors=True)  # half copied or half deleted
    unfinished = folder / f".{target.name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    sums: dict[str, Any] = {}
    with ThreadPoolExecutor(THREADS) as threads:

        def save_stage(stage: Stage) -> Checksums:
            return _save_stage(trainer.store, unfinished, stage, threads)

        for of_stage in _stage_by_stage(save_stage, trainer, [1] * len(trainer.model.stages())):
            sums |= of_stage
    record = {
        "format": FORMAT,
        "step": trainer.step_count,
        "shared_optimizer_state": [_to_json(leaf) for leaf in trainer.shared_optimizer_state],
        "optimizer_state": _state_kinds(trainer),
        "kernel_form": trainer.kernel_form,
        "ema_decay": trainer.ema_decay,
        "checksums": sums,
        "extra": dict(extra),
    }
    path = unfinished / "trainer.json"
    with path.open("w") as stream:
        json.dump(record, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(target)
    return target


def restore(trainer: Trainer, checkpoint: pathlib.Path) -> Restored:
    """Read a checkpoint into a trainer, whatever devices and chunking it was saved with.

    Raises:
      UserError: the folder is not a complete checkpoint, or of another model or optimizer.
    """
    record = read_record(checkpoint)
    _check_state_kinds(checkpoint, record["optimizer_state"], _state_kinds(trainer))
    stages = trainer.model.stages()
    for item in (checkpoint / _item(stage) for stage in stages):
        if not item.is_dir():
            raise UserError(f"{checkpoint} has no {item.name}: it is of another model or damaged")
    with ThreadPoolExecutor(THREADS) as threads:

        def restore_stage(stage: Stage) -> None:
            arrays = _load_stage(trainer.store, checkpoint, record, stage, threads)
            write_stage(trainer.store, arrays, threads)

        # What stays on the devices is gathered on its way, beside what has been read.
        copies = [1 + trainer.store.is_resident(stage.parameter_names()[0]) for stage in stages]
        for _ in _stage_by_stage(restore_stage, trainer, copies):
            pass
    shared = [_from_json(leaf) for leaf in record["shared_optimizer_state"]]
    trainer.resume_at(record["step"], shared)
    return Restored(step=record["step"], extra=record["extra"])


def read_record(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The `trainer.json` of a checkpoint.

    Raises:
      UserError: it is missing, unreadable or of another format.
    """
    path = checkpoint / "trainer.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint} is not a complete checkpoint: {path.name} is missing"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    found = record if isinstance(record, dict) else {}
    if found.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path} has format {found['format']}, this version reads {FORMAT}")
    if missing := sorted(_KEYS - found.keys()):
        raise UserError(
            f"{path} is damaged: it lacks {', '.join(missing)}. To go on from an earlier "
            f"checkpoint, move {checkpoint} away"
        )
    return record


def list_steps(folder: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints of a run, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / "trainer.json").is_file()]


def keep_last(folder: pathlib.Path, number: int) -> None:
    """Delete all but the newest `number` complete checkpoints of a run, and leftovers of saves."""
    for path in list_steps(folder)[:-number]:
        shutil.rmtree(path)
    for path in folder.glob(".step_*.partial"):
        shutil.rmtree(path)


def read_parameter_arrays(
    checkpoint: pathlib.Path, stage: Stage, *, averaged: bool = False
) -> dict[str, np.ndarray]:
    """fp32 masters of a stage by full name, without a trainer (for export).

    `averaged`: their moving averages; of frozen parameters the masters. The checkpoint must have
    been saved with `ema_decay`.

    Raises:
      UserError: values are not those that were saved.
    """
    item = (checkpoint / _item(stage)).absolute()
    tree = _checkpointer().restore(item)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            verify(tree, read_record(checkpoint).get("checksums"), threads)
    except ValueError as error:
        raise UserError(f"{item} is damaged: {error}") from None

    def wanted(arrays: Mapping[str, Any]) -> Any:
        number = len(arrays) - 1  # state arrays, the average is the last
        return arrays[state_key(number - 1) if averaged and number else MASTER]

    return {name: np.asarray(wanted(arrays)) for name, arrays in tree.items()}


def _checkpointer() -> ocp.Checkpointer:
    """Uncompressed: weights do not compress, and zstd is the slowest part of a save."""
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True))


def _item(stage: Stage) -> str:
    return stage.item or stage.name or "head"


def _state_kinds(trainer: Trainer) -> dict[str, list[str]]:
    """Parameter name -> dtype and shape of each of its optimizer state arrays; none if frozen."""
    return {
        name: [f"{spec.dtype}{list(spec.shape)}" for spec in trainer.store.state_specs(name)]
        for name in trainer.store.parameter_names
    }


def _check_state_kinds(
    checkpoint: pathlib.Path, saved: Mapping[str, list[str]], wanted: Mapping[str, list[str]]
) -> None:
    if saved.keys() != wanted.keys():
        odd = min(saved.keys() ^ wanted.keys())
        raise UserError(f"{checkpoint} does not fit this model: only one of them has {odd}")
    for name, kinds in wanted.items():
        if saved[name] != kinds:
            raise UserError(
                f"{checkpoint} holds optimizer state {saved[name]} of {name}, this optimizer keeps "
                f"{kinds}; resume with the optimizer and the frozen parameters of the saving run"
            )


def _stage_by_stage(
    work: Callable[[Stage], Any], trainer: Trainer, copies: Sequence[int]
) -> Iterator[Any]:
    """`work` on every stage, several at once: results as they come.

    `copies`: per stage, how many times its bytes are in memory meanwhile.
    """
    stages = trainer.model.stages()
    sizes = [stage_bytes(trainer.store, stage) for stage in stages]
    costs = [size * number for size, number in zip(sizes, copies, strict=True)]
    return side_by_side(
        lambda item: work(item[0]),
        zip(stages, costs, strict=True),
        cost=lambda item: item[1],
        limit=largest_neighbours(sizes),
        workers=STAGES_AT_ONCE,
    )


def _save_stage(
    store: HostStore, folder: pathlib.Path, stage: Stage, threads: Executor
) -> Checksums:
    """Write one item; returns its checksums.

    Raises:
      OSError: the file system refuses.
    """
    item = (folder / _item(stage)).absolute()
    arrays = read_stage(store, stage, threads)
    sums = checksums(arrays, threads)
    cut = jax.tree.map(_save_args, arrays)
    try:
        _checkpointer().save(item, args=ocp.args.PyTreeSave(arrays, save_args=cut))
    except (ValueError, RuntimeError) as error:  # TensorStore's, with the system's words inside
        raise OSError(f"{item} cannot be written: {error}") from None
    return sums


def _save_args(array: np.ndarray) -> ocp.SaveArgs:
    """With pieces of a sensible size, or in one piece."""
    pieces = _piece_bytes(array.shape, array.itemsize)
    return ocp.SaveArgs(
        chunk_byte_size=BYTES_PER_FILE_CHUNK if pieces >= SMALLEST_FILE_CHUNK else None
    )


def _piece_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of the pieces into which Orbax would cut an array; of one that it would not, the limit.

    It takes the largest dimension to its next smaller divisor until a piece is small enough.
    """
    piece = list(shape)
    if math.prod(piece) * itemsize <= BYTES_PER_FILE_CHUNK:
        return BYTES_PER_FILE_CHUNK
    while math.prod(piece) * itemsize > BYTES_PER_FILE_CHUNK:
        largest = piece.index(max(piece))
        whole, now = shape[largest], piece[largest]
        piece[largest] = next(size for size in range(now - 1, 0, -1) if whole % size == 0)
    return math.prod(piece) * itemsize


def _load_stage(
    store: HostStore,
    checkpoint: pathlib.Path,
    record: Mapping[str, Any],
    stage: Stage,
    threads: Executor,
) -> Any:
    """Arrays of a stage, in the shapes and dtypes of the state.

    Raises:
      UserError: they are not there, not whole, or others.
    """
    item = (checkpoint / _item(stage)).absolute()
    wanted = {name: array_specs(store, name) for name in stage.parameter_names()}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    try:
        tree = _checkpointer().restore(
            item, args=ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy)
        )
        for name, arrays in wanted.items():
            for key, spec in arrays.items():
                found = tree[name][key]
                if found.shape != spec.shape:
                    raise ValueError(f"{key} of {name} has shape {found.shape}, not {spec.shape}")
        verify(tree, record.get("checksums"), threads)
        return tree
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise UserError(
            f"{item} cannot be read: it is damaged, or of another model. To go on from an earlier "
            f"checkpoint, move {item.parent} away. What was found: {str(error)[:500]}"
        ) from error


def _to_json(leaf: np.ndarray) -> dict[str, Any]:
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "hex": leaf.tobytes().hex()}


def _from_json(leaf: Mapping[str, Any]) -> np.ndarray:
    data = np.frombuffer(bytes.fromhex(leaf["hex"]), np.dtype(leaf["dtype"]))
    return data.reshape(leaf["shape"]).copy()
