"""Pieces of work side by side, as many as their memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def side_by_side(
    work: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    cost: Callable[[_T], float],
    limit: float,
    workers: int,
) -> Iterator[_R]:
    """`work(item)` in threads, begun in the order of the items; results as they come.

    Args:
      work: what to do.
      items: of what.
      cost: what an item takes while it is worked on, such as bytes.
      limit: most of it that may be taken at once; an item that takes more is worked on alone.
      workers: most items at once.

    Raises:
      Exception: the first one of `work`; no item is begun after it, and none is left unfinished.
    """
    running: dict[Future[_R], float] = {}
    with ThreadPoolExecutor(workers) as pool:  # which at its end waits for what runs
        for item in items:
            own = cost(item)
            while len(running) == workers or (running and sum(running.values()) + own > limit):
                yield from _finished(running)
            running[pool.submit(work, item)] = own
        while running:
            yield from _finished(running)


def _finished(running: dict[Future[_R], float]) -> Iterator[_R]:
    """Wait for the next results, at least one."""
    for job in wait(running, return_when=FIRST_COMPLETED).done:
        del running[job]
        yield job.result()
