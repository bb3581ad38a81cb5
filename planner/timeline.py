"""Tasks on lanes that share resources, simulated in time.

A recurrence of starts and ends would do if a task always ran at full speed. But copies in both
directions share the link, and copies and the host update share the host's memory; measured, they
all slow down in proportion. So time advances from one task's end to the next, and in between every
running task proceeds at the speed that its scarcest resource leaves it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Lane = Literal["h2d", "compute", "d2h", "host_update"]
LANES: tuple[Lane, ...] = ("h2d", "compute", "d2h", "host_update")

_BY_PRIORITY: frozenset[Lane] = frozenset({"host_update"})
"""Lanes that take the first task in order among those that can start; others wait their turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Work for one lane.

    Attributes:
      lane: where it runs.
      work_s: seconds at full speed.
      after: indices of tasks that must have ended before it starts.
      order: turn within its lane.
      demands: resource name -> units per second taken at full speed.
    """

    lane: Lane
    work_s: float
    after: tuple[int, ...]
    order: tuple[int, ...]
    demands: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When everything happened.

    Attributes:
      starts: seconds, per task.
      ends: seconds, per task.
      waits: spans in which the compute lane waited: (start, end, lane that it waited for).
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    waits: tuple[tuple[float, float, Lane], ...]

    def waited_s(self, lane: Lane, start_s: float, end_s: float) -> float:
        """Seconds between two times that compute waited for `lane`."""
        return sum(
            max(0.0, min(end, end_s) - max(start, start_s))
            for start, end, blamed in self.waits
            if blamed == lane
        )


def simulate(tasks: Sequence[Task], capacities: Mapping[str, float]) -> Timeline:
    """Run all tasks.

    Args:
      tasks: dependencies point anywhere but in a circle.
      capacities: units per second of each resource that tasks demand.

    Raises:
      ValueError: tasks wait for one another, in a circle or through the order of a lane.
    """
    return _Simulation(tasks, capacities).run()


class _Simulation:
    """State of one run."""

    def __init__(self, tasks: Sequence[Task], capacities: Mapping[str, float]):
        self._tasks = tasks
        self._capacities = capacities
        self._blockers = [len(set(task.after)) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for before in set(task.after):
                self._followers[before].append(index)
        self._queues: dict[Lane, list[int]] = {lane: [] for lane in LANES}
        for index in sorted(range(len(tasks)), key=lambda i: tasks[i].order, reverse=True):
            self._queues[tasks[index].lane].append(index)
        self._ready: list[tuple[tuple[int, ...], int]] = []
        for index, task in enumerate(tasks):
            if task.lane in _BY_PRIORITY and not self._blockers[index]:
                heapq.heappush(self._ready, (task.order, index))
        self._running: dict[Lane, int] = {}
        self._left = [task.work_s for task in tasks]
        self._starts = [0.0] * len(tasks)
        self._ends = [-1.0] * len(tasks)
        self._waits: list[tuple[float, float, Lane]] = []
        self._now = 0.0

    def run(self) -> Timeline:
        remaining = len(self._tasks)
        while remaining:
            self._start_tasks()
            if not self._running:
                raise ValueError("tasks wait for one another; check `after` against `order`.")
            remaining -= self._advance()
        return Timeline(
            starts=tuple(self._starts), ends=tuple(self._ends), waits=tuple(self._waits)
        )

    def _start_tasks(self) -> None:
        for lane in LANES:
            if lane in self._running:
                continue
            if lane in _BY_PRIORITY:
                if not self._ready:
                    continue
                index = heapq.heappop(self._ready)[1]
            else:
                queue = self._queues[lane]
                if not queue or self._blockers[queue[-1]]:
                    continue
                index = queue.pop()
            self._running[lane] = index
            self._starts[index] = self._now

    def _advance(self) -> int:
        """To the end of the task that ends first; returns the number of tasks that ended."""
        running = list(self._running.values())
        speeds = self._speeds(running)
        step = min(self._left[i] / speeds[i] for i in running)
        self._note_wait(self._now + step)
        self._now += step
        ended = 0
        for index in running:
            self._left[index] -= step * speeds[index]
            if self._left[index] <= 1e-12:
                self._end(index)
                ended += 1
        return ended

    def _end(self, index: int) -> None:
        self._ends[index] = self._now
        del self._running[self._tasks[index].lane]
        for follower in self._followers[index]:
            self._blockers[follower] -= 1
            task = self._tasks[follower]
            if not self._blockers[follower] and task.lane in _BY_PRIORITY:
                heapq.heappush(self._ready, (task.order, follower))

    def _speeds(self, running: Sequence[int]) -> dict[int, float]:
        """Share of full speed of each running task: what its scarcest resource leaves."""
        demanded: dict[str, float] = {}
        for index in running:
            for resource, rate in self._tasks[index].demands.items():
                demanded[resource] = demanded.get(resource, 0.0) + rate
        shares = {
            resource: min(1.0, self._capacities[resource] / rate)
            for resource, rate in demanded.items()
            if rate > 0
        }
        return {
            index: min(
                (shares[r] for r, rate in self._tasks[index].demands.items() if rate > 0),
                default=1.0,
            )
            for index in running
        }

    def _note_wait(self, until: float) -> None:
        queue = self._queues["compute"]
        if "compute" not in self._running and queue and until > self._now:
            self._waits.append((self._now, until, self._blamed(queue[-1])))

    def _blamed(self, index: int) -> Lane:
        """The lane whose running task holds up a waiting one."""
        while True:
            before = next((i for i in self._tasks[index].after if self._ends[i] < 0), None)
            if before is None:  # its turn has not come: its own lane is busy
                return self._tasks[index].lane
            lane = self._tasks[before].lane
            if before in self._running.values() or (lane in self._running):
                return lane
            index = before if lane in _BY_PRIORITY else self._queues[lane][-1]
