"""Elastic checkpoints with Orbax: by parameter name, whatever the chunking and the device count.

A checkpoint is a folder `step_N` with one Orbax item per stage of the model (embedding, each layer,
head) and `trainer.json`, written last. An item maps each parameter of its stage to its fp32 master
and its optimizer state arrays. Stages are written, and read, side by side, as many as fit into the
memory of two neighbouring ones. Everything is written into a hidden sibling folder and renamed when
complete: a folder named `step_N` is whole.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from slidedp_jax.checkpoint.bounded_work import side_by_side
from slidedp_jax.checkpoint.record import (
    RECORD,
    check_fits,
    describe,
    form_to_go_on_with,
    read_record,
    recorded_rounding,
    shared_state,
    write_record,
)
from slidedp_jax.checkpoint.stage_arrays import (
    MASTER,
    Checksums,
    StageArrays,
    array_specs,
    checksums,
    read_stage,
    stage_bytes,
    state_key,
    verify,
    write_stage,
)
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import read_arrays, system_error_code, write_arrays
from slidedp_jax.models.streamed import Stage, StreamedModel
from slidedp_jax.planner.memory import largest_neighbours
from slidedp_jax.update.state_gate import StateGate, StateReader
from slidedp_jax.whole_files import UNFINISHED, remove_whole, sync_folder

STAGES_AT_ONCE = 4
"""Each is one stream of bytes to or from the disk."""
THREADS = 8
"""That copy parameters and add up their checksums, for all stages at once."""
BYTES_PER_FILE_CHUNK = 1 << 26
"""Larger arrays are cut: in one piece, reading them takes the memory twice."""
SMALLEST_FILE_CHUNK = 1 << 22
"""Arrays whose sizes allow smaller pieces only (of a prime vocabulary, rows) are not cut."""

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
        record = describe(gate, reader, model.configuration, extra)
        target = folder / f"step_{reader.version:08d}"
        if (target / RECORD).is_file():
            _check_is_saved(gate, reader, model, target, record)
            return target
        with writing(target, sum(stage_bytes(gate, stage) for stage in model.stages())):
            _write_checkpoint(gate, reader, model, target, record)
        return target


def _write_checkpoint(
    gate: StateGate,
    reader: StateReader,
    model: StreamedModel,
    target: pathlib.Path,
    record: dict[str, Any],
) -> None:
    """Write a checkpoint that is not there yet.

    Raises:
      OSError: the file system refuses; nothing is left.
    """
    remove_whole(target)  # half copied
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        record["checksums"] = _of_all_stages(
            gate, reader, model, lambda arrays, stage: _write_item(unfinished, stage, arrays)
        )
        write_record(unfinished, record)
        unfinished.rename(target)
    except BaseException:  # what is left would keep a full disk full
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(target.parent)


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
        for item in (checkpoint / _item(stage) for stage in model.stages()):
            if not item.is_dir():
                raise UserError(
                    f"{checkpoint} has no {item.name}: it is of another model or damaged"
                )
        gate.take_kernel_form(form_to_go_on_with(record))
        if gate.holds_weights:
            _of_all_items(gate, model, checkpoint, record, lambda *_: None)
        rounding = gate.rounding_to_go_on_with(recorded_rounding(checkpoint, record))
        with gate.writing(rounding) as writer:
            _of_all_items(
                gate,
                model,
                checkpoint,
                record,
                lambda arrays, threads: write_stage(writer, arrays, threads),
            )
            writer.finish(record["step"], shared_state(checkpoint, record))
    return Restored(step=record["step"], extra=record["extra"])


def newest(folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint itself, or the newest complete one in a folder of them.

    Raises:
      UserError: there is none.
    """
    if (folder / RECORD).is_file() or _STEP.fullmatch(folder.name):
        return folder
    if steps := list_steps(folder):
        return steps[-1]
    raise UserError(
        f"{folder} holds no complete checkpoint; give a folder `step_N`, or one of them"
    )


def list_steps(folder: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints of a run, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / RECORD).is_file()]


def keep_last(folder: pathlib.Path, number: int) -> None:
    """Delete all but the newest `number` complete checkpoints of a run, and leftovers of saves."""
    for path in list_steps(folder)[:-number]:
        remove_whole(path)
    for path in folder.glob(f".step_*{UNFINISHED}"):
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
    tree = read_arrays(item)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            verify(tree, read_record(checkpoint).get("checksums"), threads)
    except ValueError as error:
        raise UserError(f"{item} is damaged: {error}") from None

    def wanted(arrays: Mapping[str, Any]) -> Any:
        number = len(arrays) - 1  # state arrays, the average is the last
        return arrays[state_key(number - 1) if averaged and number else MASTER]

    return {name: np.asarray(wanted(arrays)) for name, arrays in tree.items()}


def _item(stage: Stage) -> str:
    return stage.item or stage.name or "head"


def _check_is_saved(
    gate: StateGate,
    reader: StateReader,
    model: StreamedModel,
    target: pathlib.Path,
    record: Mapping[str, Any],
) -> None:
    """Whether a checkpoint holds the state that is read, bit for bit.

    Raises:
      UserError: it holds another one.
    """
    saved = read_record(target)
    same = {name: saved.get(name) for name in record} == dict(record)
    if same and _of_all_stages(gate, reader, model, lambda *_: None) == saved.get("checksums"):
        return
    raise UserError(
        f"{target} holds another state of step {reader.version}, of another run or from before "
        "this one went back. Nothing was written: give another folder, or move that one away"
    )


def _of_all_stages(
    gate: StateGate,
    reader: StateReader,
    model: StreamedModel,
    use: Callable[[StageArrays, Stage], None],
) -> dict[str, Mapping[str, int]]:
    """Checksums of all arrays, each stage's handed to `use` while they are in memory."""
    sums: dict[str, Mapping[str, int]] = {}
    with ThreadPoolExecutor(THREADS) as threads:

        def of_stage(stage: Stage) -> Checksums:
            arrays = read_stage(reader, stage, threads)
            found = checksums(arrays, threads)
            use(arrays, stage)
            return found

        for found in _stage_by_stage(of_stage, gate, model, [1] * len(model.stages())):
            sums |= found
    return sums


def _of_all_items(
    gate: StateGate,
    model: StreamedModel,
    checkpoint: pathlib.Path,
    record: Mapping[str, Any],
    use: Callable[[StageArrays, Executor], None],
) -> None:
    """Read, verify and hand on the arrays of every stage.

    Raises:
      UserError: some are not there, not whole, or others.
    """
    stages = model.stages()
    with ThreadPoolExecutor(THREADS) as threads:

        def of_stage(stage: Stage) -> None:
            use(_load_item(gate, checkpoint, record, stage, threads), threads)

        # What stays on the devices is gathered on its way, beside what has been read.
        copies = [1 + gate.is_resident(stage.parameter_names()[0]) for stage in stages]
        for _ in _stage_by_stage(of_stage, gate, model, copies):
            pass


def _stage_by_stage(
    work: Callable[[Stage], Any], gate: StateGate, model: StreamedModel, copies: Sequence[int]
) -> Iterator[Any]:
    """`work` on every stage, several at once: results as they come.

    `copies`: per stage, how many times its bytes are in memory meanwhile.
    """
    stages = model.stages()
    sizes = [stage_bytes(gate, stage) for stage in stages]
    costs = [size * number for size, number in zip(sizes, copies, strict=True)]
    return side_by_side(
        lambda item: work(item[0]),
        zip(stages, costs, strict=True),
        cost=lambda item: item[1],
        limit=largest_neighbours(sizes),
        workers=STAGES_AT_ONCE,
    )


def _write_item(folder: pathlib.Path, stage: Stage, arrays: StageArrays) -> None:
    """Write the item of a stage.

    Raises:
      OSError: the file system refuses.
    """
    item = (folder / _item(stage)).absolute()
    try:
        write_arrays(
            item,
            arrays,
            piece_bytes=BYTES_PER_FILE_CHUNK,
            smallest_piece_bytes=SMALLEST_FILE_CHUNK,
        )
    except (ValueError, RuntimeError) as error:  # TensorStore's
        code = system_error_code(error)
        if code is None:
            raise OSError(f"{item} cannot be written: {error}") from None
        raise OSError(code, os.strerror(code), str(item)) from None


def _load_item(
    gate: StateGate,
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
    wanted = {name: array_specs(gate, name) for name in stage.parameter_names()}
    try:
        tree = read_arrays(item, wanted)
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
