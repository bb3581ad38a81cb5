"""Work side by side: as much as fits, in order, and errors come through."""

import threading
import time

import pytest

from slidedp_jax.checkpoint.bounded_work import side_by_side


class Watch:
    """Notes what is worked on at once; each piece of work takes a while."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running = []
        self.begun = []
        self.together = []

    def __call__(self, item):
        with self._lock:
            self._running.append(item)
            self.begun.append(item)
            self.together.append(tuple(self._running))
        time.sleep(0.02)
        with self._lock:
            self._running.remove(item)
        return -item


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_no_more_at_once_than_fits(workers):
    watch, items = Watch(), [7, 1, 2, 3, 9, 1, 1, 1, 1, 1, 1, 2]
    results = [*side_by_side(watch, items, cost=float, limit=8, workers=workers)]
    assert sorted(results) == sorted(-item for item in items)
    assert watch.begun == items or workers > 1
    most = max(watch.together, key=len)
    assert len(most) == workers
    assert all(sum(group) <= 8 or group == (9,) for group in watch.together)
    assert (9,) in watch.together


def test_work_is_begun_before_earlier_work_has_ended():
    both = threading.Barrier(2, timeout=30)
    results = side_by_side(lambda _: both.wait(), range(4), cost=lambda _: 1, limit=2, workers=4)
    assert len([*results]) == 4


@pytest.mark.parametrize(("limit", "workers"), [(2, 2), (9, 2), (2, 9)])
def test_an_error_ends_it_and_what_runs_is_waited_for(limit, workers):
    ended = []

    def work(item):
        if item == 1:
            raise OSError("no more")
        time.sleep(0.1)
        ended.append(item)

    with pytest.raises(OSError, match="no more"):
        [*side_by_side(work, range(9), cost=lambda _: 1, limit=limit, workers=workers)]
    assert ended == [0]


def test_an_error_of_the_caller_comes_through():
    with pytest.raises(KeyError):
        for _ in side_by_side(str, range(3), cost=lambda _: 1, limit=9, workers=2):
            raise KeyError("from the caller")


def test_nothing_of_nothing():
    assert [*side_by_side(str, [], cost=len, limit=1, workers=2)] == []
