"""A stage's arrays out of and into the training state, several at a time, the next stage ahead."""

from __future__ import annotations

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


def read_stages(store: HostStore, stages: Iterable[Stage]) -> Iterator[tuple[Stage, StageArrays]]:
    """Fresh arrays of one stage after the other; the next is read while one is in use."""
    with ThreadPoolExecutor(READERS) as readers:
        yield from ahead(lambda stage: _read(store, stage, readers), stages)


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


class _Unchanging(np.ndarray):
    """An array that nobody writes to any more: Orbax, which copies arrays first, need not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unchanging:
        return self
