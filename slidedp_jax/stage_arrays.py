"""A stage's arrays out of and into the training state, several at a time, the next stage ahead.

With a checksum of each, by which damage on a disk is noticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from models.streamed import Stage
from slidedp_jax.host_store import HostStore

MASTER = "master"
READERS = 8
"""Threads that read or write parameters: they copy, so they go as fast as memory does."""

_T = TypeVar("_T")
_R = TypeVar("_R")

StageArrays = dict[str, dict[str, np.ndarray]]
"""Parameter name -> `master` (fp32) and `state_0`, `state_1`, ..."""


Checksums = Mapping[str, Mapping[str, int]]
"""CRC-32 of the bytes of each array of `StageArrays`."""


def read_stages(
    store: HostStore, stages: Iterable[Stage]
) -> Iterator[tuple[Stage, StageArrays, Checksums]]:
    """Fresh arrays of one stage after the other; the next is read while one is in use."""
    with ThreadPoolExecutor(READERS) as readers:

        def read(stage: Stage) -> tuple[StageArrays, Checksums]:
            arrays = _read(store, stage, readers)
            return arrays, checksums(arrays, readers)

        for stage, (arrays, sums) in ahead(read, stages):
            yield stage, arrays, sums


def checksums(arrays: Mapping[str, Mapping[str, Any]], workers: Executor) -> Checksums:
    """Of all arrays."""
    jobs = {
        name: {key: workers.submit(_checksum, values) for key, values in of_name.items()}
        for name, of_name in arrays.items()
    }
    return {
        name: {key: job.result() for key, job in of_name.items()} for name, of_name in jobs.items()
    }


def verify(arrays: Mapping[str, Mapping[str, Any]], expected: Checksums | None) -> None:
    """Compare with what was saved, if that is known.

    Raises:
      ValueError: an array has changed.
    """
    if expected is None:
        return
    with ThreadPoolExecutor(READERS) as workers:
        found = checksums(arrays, workers)
    for name, of_name in found.items():
        for key, value in of_name.items():
            if value != expected[name][key]:
                raise ValueError(f"{key} of {name} has other values than were saved")


def write_stage(store: HostStore, arrays: Mapping[str, Mapping[str, Any]]) -> None:
    """Set all parameters of a stage and their optimizer state."""

    def write(item: tuple[str, Mapping[str, Any]]) -> None:
        name, values = item
        store.write(name, values[MASTER])
        for number in range(len(store.state_specs(name))):
            store.write_state(name, number, values[state_key(number)])

    with ThreadPoolExecutor(READERS) as writers:
        list(writers.map(write, arrays.items()))


def state_key(number: int) -> str:
    """Name of a parameter's `number`-th optimizer state array."""
    return f"state_{number}"


def ahead(make: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[tuple[_T, _R]]:
    """Each item with what is made of it; the next one is made while the caller uses one."""
    with ThreadPoolExecutor(1) as maker:
        waiting: tuple[_T, Future[_R]] | None = None
        for item in items:
            coming = item, maker.submit(make, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _read(store: HostStore, stage: Stage, readers: Executor) -> StageArrays:
    jobs: dict[str, dict[str, Future[np.ndarray]]] = {
        name: {MASTER: readers.submit(store.read, name)}
        | {
            state_key(number): readers.submit(store.read_state, name, number)
            for number in range(len(store.state_specs(name)))
        }
        for name in stage.parameter_names()
    }
    return {
        name: {key: job.result().view(_Unchanging) for key, job in arrays.items()}
        for name, arrays in jobs.items()
    }


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


class _Unchanging(np.ndarray):
    """An array that nobody writes to any more: Orbax, which copies arrays first, need not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unchanging:
        return self
