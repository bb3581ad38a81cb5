"""A stage's arrays out of and into the training state, several at a time.

With a checksum of each, by which damage on a disk is noticed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np

from slidedp_jax.jax_internals import unchanging
from slidedp_jax.models.streamed import Stage
from slidedp_jax.update.state_gate import StateGate, StateReader, StateWriter

MASTER = "master"
StageArrays = dict[str, dict[str, np.ndarray]]
"""Parameter name -> `master` (fp32) and `state_0`, `state_1`, ..."""


Checksums = Mapping[str, Mapping[str, int]]
"""CRC-32 of the bytes of each array of `StageArrays`."""


def read_stage(reader: StateReader, stage: Stage, readers: Executor) -> StageArrays:
    """Fresh arrays of all parameters of a stage and their optimizer state."""
    jobs: dict[str, dict[str, Future[np.ndarray]]] = {
        name: {MASTER: readers.submit(reader.read, name)}
        | {
            state_key(number): readers.submit(reader.read_state, name, number)
            for number in range(len(reader.state_specs(name)))
        }
        for name in stage.parameter_names()
    }
    return {
        name: {key: unchanging(job.result()) for key, job in arrays.items()}
        for name, arrays in jobs.items()
    }


def stage_bytes(gate: StateGate, stage: Stage) -> int:
    """Bytes of these arrays."""
    return sum(
        math.prod(spec.shape) * spec.dtype.itemsize
        for name in stage.parameter_names()
        for spec in array_specs(gate, name).values()
    )


def array_specs(gate: StateGate, name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each array of a parameter."""
    master = jax.ShapeDtypeStruct(gate.shapes[name], np.dtype(np.float32))
    states = {state_key(n): spec for n, spec in enumerate(gate.state_specs(name))}
    return {MASTER: master} | states


def checksums(arrays: Mapping[str, Mapping[str, Any]], workers: Executor) -> Checksums:
    """Of all arrays."""
    jobs = {
        name: {key: workers.submit(_checksum, values) for key, values in of_name.items()}
        for name, of_name in arrays.items()
    }
    return {
        name: {key: job.result() for key, job in of_name.items()} for name, of_name in jobs.items()
    }


def verify(
    arrays: Mapping[str, Mapping[str, Any]], expected: Checksums | None, workers: Executor
) -> None:
    """Compare with what was saved, if that is known.

    Raises:
      ValueError: an array has changed.
    """
    if expected is None:
        return
    for name, of_name in checksums(arrays, workers).items():
        for key, value in of_name.items():
            if value != expected[name][key]:
                raise ValueError(f"{key} of {name} has other values than were saved")


def write_stage(
    writer: StateWriter, arrays: Mapping[str, Mapping[str, Any]], threads: Executor
) -> None:
    """Set all parameters of a stage and their optimizer state."""

    def write(item: tuple[str, Mapping[str, Any]]) -> None:
        name, values = item
        writer.write(name, values[MASTER])
        for number in range(len(writer.state_specs(name))):
            writer.write_state(name, number, values[state_key(number)])

    list(threads.map(write, arrays.items()))


def state_key(number: int) -> str:
    """Name of a parameter's `number`-th optimizer state array."""
    return f"state_{number}"


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
