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
from typing import Literal, NamedTuple

Lane = Literal["h2d", "compute", "d2h", "host_update"]
LANES: tuple[Lane, ...] = ("h2d", "compute", "d2h", "host_update")

_BY_PRIORITY: frozenset[Lane] = frozenset({"host_update"})
"""Lanes that take the first task in order among those that can start; others wait their turn."""


class Task(NamedTuple):
    """Work for one lane; a tuple, since a search makes hundreds of thousands of them.

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


_LANE_INDEX = {lane: index for index, lane in enumerate(LANES)}
_COMPUTE, _IDLE, _DONE_S = _LANE_INDEX["compute"], -1, 1e-12


class _Simulation:
    """State of one run. Lanes are numbers here, in the order of `LANES`."""

    def __init__(self, tasks: Sequence[Task], capacities: Mapping[str, float]):
        self._tasks = tasks
        self._capacities = capacities
        self._lanes = [_LANE_INDEX[task.lane] for task in tasks]
        self._blockers = [len(task.after) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._queues: list[list[int]] = [[] for _ in LANES]
        self._kinds = [id(task.demands) for task in tasks]  # many tasks share them
        self._demands = dict(zip(self._kinds, (task.demands for task in tasks), strict=True))
        for index, (task, lane) in enumerate(zip(tasks, self._lanes, strict=True)):
            for before in task.after:
                self._followers[before].append(index)
            self._queues[lane].append(index)
        self._by_priority = [lane in _BY_PRIORITY for lane in LANES]
        self._ready: list[tuple[tuple[int, ...], int]] = []
        for lane, queue in enumerate(self._queues):
            if self._by_priority[lane]:
                self._ready += [(tasks[i].order, i) for i in queue if not self._blockers[i]]
            queue.sort(key=lambda index: tasks[index].order, reverse=True)
        heapq.heapify(self._ready)
        self._running = [_IDLE] * len(LANES)
        self._left = [task.work_s for task in tasks]
        self._starts = [0.0] * len(tasks)
        self._ends = [-1.0] * len(tasks)
        self._waits: list[tuple[float, float, Lane]] = []
        self._speeds: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._now = 0.0

    def run(self) -> Timeline:
        remaining = len(self._tasks)
        while remaining:
            self._start_tasks()
            remaining -= self._advance()
        return Timeline(
            starts=tuple(self._starts), ends=tuple(self._ends), waits=tuple(self._waits)
        )

    def _start_tasks(self) -> None:
        running, blockers = self._running, self._blockers
        for lane, queue in enumerate(self._queues):
            if running[lane] >= 0:
                continue
            if self._by_priority[lane]:
                if not self._ready:
                    continue
                index = heapq.heappop(self._ready)[1]
            elif queue and not blockers[queue[-1]]:
                index = queue.pop()
            else:
                continue
            running[lane] = index
            self._starts[index] = self._now

    def _advance(self) -> int:
        """To the end of the task that ends first; returns the number of tasks that ended."""
        kinds, left = self._kinds, self._left
        running = [index for index in self._running if index >= 0]
        if not running:
            raise ValueError("tasks wait for one another; check `after` against `order`.")
        key = tuple([kinds[index] for index in running])
        speeds = self._speeds.get(key)
        if speeds is None:
            speeds = self._speeds[key] = self._speeds_of([self._demands[kind] for kind in key])
        step = min([left[index] / speed for index, speed in zip(running, speeds, strict=True)])
        if self._running[_COMPUTE] < 0 and step > 0:
            self._note_wait(self._now + step)
        self._now += step
        ended = 0
        for index, speed in zip(running, speeds, strict=True):
            left[index] -= step * speed
            if left[index] <= _DONE_S:
                self._end(index)
                ended += 1
        return ended

    def _end(self, index: int) -> None:
        self._ends[index] = self._now
        self._running[self._lanes[index]] = _IDLE
        blockers = self._blockers
        for follower in self._followers[index]:
            blockers[follower] -= 1
            if not blockers[follower] and self._by_priority[self._lanes[follower]]:
                heapq.heappush(self._ready, (self._tasks[follower].order, follower))

    def _speeds_of(self, running: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
        """Share of full speed for each of the demands: what its scarcest resource leaves."""
        demanded: dict[str, float] = {}
        for demands in running:
            for resource, rate in demands.items():
                demanded[resource] = demanded.get(resource, 0.0) + rate
        shares = {
            resource: min(1.0, self._capacities[resource] / rate)
            for resource, rate in demanded.items()
            if rate > 0
        }
        return tuple(
            min((shares[r] for r, rate in demands.items() if rate > 0), default=1.0)
            for demands in running
        )

    def _note_wait(self, until: float) -> None:
        queue = self._queues[_COMPUTE]
        if queue:
            self._waits.append((self._now, until, LANES[self._blamed(queue[-1])]))

    def _blamed(self, index: int) -> int:
        """The lane whose running task holds up a waiting one."""
        while True:
            before = next((i for i in self._tasks[index].after if self._ends[i] < 0), None)
            if before is None:  # its turn has not come: its own lane is busy
                return self._lanes[index]
            lane = self._lanes[before]
            if self._running[lane] >= 0:
                return lane
            index = before if self._by_priority[lane] else self._queues[lane][-1]
