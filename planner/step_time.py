"""Predicted time of one training step: the runtime's schedule laid out on four lanes.

The schedule (one wave, every microbatch passes a chunk while it is there):

- compute: embedding, layer chunks forward, head forward and backward, layer chunks backward,
  embedding backward, and the step's end: the norm's way to the host and that of what follows from
  it back. Then the next step.
- h2d: each chunk once for forward and each layer chunk but the last once for backward. An upload
  is dispatched `prefetch_depth` uses ahead; a copy waits for compute dispatched before it, so it
  runs beside the compute of the chunks in between and no earlier. A forward upload also waits for
  the chunk's update of the step before.
  Inputs of chunks that wait in host memory come back beside the backward of the chunk above.
- d2h: each chunk's gradient after its backward. At most `GRADIENTS_IN_FLIGHT` are on their way. In
  forward, inputs that wait in host memory, beside the chunk's own compute, as many at a time.
- host_update: `eager`, when the gradient has arrived, the lowest waiting chunk first; `deferred`,
  after the step's end, when the norm over all is known, strictly in the order of the next forward.

Bounds as in Calculon (Isaev et al., SC'23) and the scaling book: a step takes at least as long as
its busiest lane or shared resource, and at most as long as all lanes one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slidedp_jax.planner.durations import ChunkDurations, chunk_durations
from slidedp_jax.planner.flops import utilization
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.strategy import BOUNDARIES_IN_FLIGHT, GRADIENTS_IN_FLIGHT, Strategy
from slidedp_jax.planner.timeline import LANES, Lane, Task, Timeline, simulate
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES
from slidedp_jax.planner.workload import BatchShape, Workload

NUM_SIMULATED_STEPS = 5
"""The first two warm up (the first has no updates to wait for); the others are averaged."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Prediction for one step in the steady state.

    Attributes:
      step_s: from one step's end of compute to the next's.
      single_step_s: one step alone, from its first upload to its last update.
      lower_bound_s: what no order of the same work can beat (see `lower_bound_s`).
      upper_bound_s: all lanes one after the other.
      busy_s: per lane, work of one step at full speed.
      exposed_s: per lane, time per step in which compute waited for it.
      model_flops: operations of the step over all devices without recomputation.
      executed_flops: the same with recomputation.
      mfu: model FLOPs against the devices' peak.
      hfu: executed FLOPs against the devices' peak.
      tokens_per_s: of all devices, padding included.
    """

    step_s: float
    single_step_s: float
    lower_bound_s: float
    upper_bound_s: float
    busy_s: Mapping[Lane, float]
    exposed_s: Mapping[Lane, float]
    model_flops: float
    executed_flops: float
    mfu: float
    hfu: float
    tokens_per_s: float

    @property
    def busy_fraction(self) -> dict[Lane, float]:
        """Per lane, share of the step in which it works at full speed."""
        return {lane: seconds / self.step_s for lane, seconds in self.busy_s.items()}

    @property
    def bottleneck(self) -> Lane:
        """The lane with most work: no schedule of the same work is faster than it."""
        return max(self.busy_s, key=lambda lane: self.busy_s[lane])


def step_time(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> StepTime:
    """Predict the time of a step.

    Args:
      workload: the model.
      batch: rows of a step; where they do not fill the microbatches, filler rows cost time too.
      strategy: how the step is run.
      hardware: rates.
      optimizer_state_bytes: optimizer state per parameter in bytes.
    """
    durations = chunk_durations(
        workload, batch, strategy, hardware, optimizer_state_bytes=optimizer_state_bytes
    )
    schedule = _Schedule(durations, strategy, hardware)
    timeline, ends = schedule.run(NUM_SIMULATED_STEPS)
    alone, _ = schedule.run(1)
    lower_s = lower_bound_s(durations, strategy, hardware)
    busy_s = _busy(durations, hardware)
    step_s = _period_s(ends, lower_s)
    model_flops = workload.model_flops_per_step(batch)
    executed = hardware.total_devices * sum(chunk.executed_flops for chunk in durations)
    peak = (hardware.total_devices, hardware.peak_flops_per_s)
    return StepTime(
        step_s=step_s,
        single_step_s=max(alone.ends),
        lower_bound_s=lower_s,
        upper_bound_s=sum(busy_s.values()),
        busy_s=busy_s,
        exposed_s={lane: timeline.waited_s(lane, ends[1], ends[-1]) / _PERIODS for lane in LANES},
        model_flops=model_flops,
        executed_flops=executed,
        mfu=utilization(model_flops, step_s, *peak),
        hfu=utilization(executed, step_s, *peak),
        tokens_per_s=batch.num_tokens / step_s,
    )


_PERIODS = NUM_SIMULATED_STEPS - 2

_SAME = 1e-9
"""Share by which equal times differ in rounding."""


def _repeats(ends: Sequence[float]) -> bool:
    """Whether the second step and the third take as long; then all others do."""
    second_s, third_s = ends[1] - ends[0], ends[2] - ends[1]
    return abs(third_s - second_s) <= _SAME * third_s


def _period_s(ends: Sequence[float], lower_s: float) -> float:
    """Seconds from step to step; rounding aside, the simulation cannot beat the bound."""
    if _repeats(ends):
        return max(ends[2] - ends[1], lower_s)
    return max((ends[-1] - ends[1]) / _PERIODS, lower_s)


def step_s(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> float:
    """`step_time(...).step_s` without all else."""
    durations = chunk_durations(
        workload, batch, strategy, hardware, optimizer_state_bytes=optimizer_state_bytes
    )
    schedule = _Schedule(durations, strategy, hardware)
    lower_s = lower_bound_s(durations, strategy, hardware)
    _, ends = schedule.run(3)
    if not _repeats(ends):  # hardly ever
        _, ends = schedule.run(NUM_SIMULATED_STEPS)
    return _period_s(ends, lower_s)


def running_s(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> dict[Lane, float]:
    """Per lane, seconds of a step in which something runs on it, slowed by what runs beside.

    Args are those of `step_time`.
    """
    durations = chunk_durations(
        workload, batch, strategy, hardware, optimizer_state_bytes=optimizer_state_bytes
    )
    schedule = _Schedule(durations, strategy, hardware)
    timeline, ends = schedule.run(NUM_SIMULATED_STEPS)
    start_s, end_s = ends[1], ends[-1]
    seconds = dict.fromkeys(LANES, 0.0)
    for lane, start, end in schedule.spans(timeline):
        seconds[lane] += max(0.0, min(end, end_s) - max(start, start_s))
    return {lane: sum_s / _PERIODS for lane, sum_s in seconds.items()}


def lower_bound_s(
    durations: Sequence[ChunkDurations], strategy: Strategy, hardware: HardwareProfile
) -> float:
    """Seconds that no order of the same work can beat.

    The busiest lane, the busiest shared resource, or the longest circle from a chunk's forward
    through the end of the step, its update and its upload to its next forward.
    """
    uploads, downloads = _copies(durations)
    link_bytes = sum(c.upload_bytes for c in uploads) + sum(c.download_bytes for c in downloads)
    link_bytes += 2 * sum(c.boundary_bytes for c in durations)
    host_bytes = link_bytes * hardware.num_devices + sum(c.update_bytes for c in durations)
    busy_s = _busy(durations, hardware)
    shares = _core_shares(hardware)
    return max(
        *busy_s.values(),
        sum(shares[lane] * seconds for lane, seconds in busy_s.items()),
        link_bytes / hardware.duplex_bytes_per_s,
        host_bytes / hardware.host_memory_bytes_per_s,
        _longest_circle_s(durations, strategy, hardware),
    )


def _core_shares(hardware: HardwareProfile) -> Mapping[Lane, float]:
    """Per lane, the share of the host's cores that its work takes at full speed.

    Where the devices compute on the host's cores (the CPU backend), compute and update take all of
    them, a copy one; elsewhere compute and copies take none.
    """
    if not hardware.unified_memory:
        return dict.fromkeys(LANES, 0.0)
    one = 1.0 / hardware.num_host_cores
    return {"h2d": one, "compute": 1.0, "d2h": one, "host_update": 1.0}


def _longest_circle_s(
    durations: Sequence[ChunkDurations], strategy: Strategy, hardware: HardwareProfile
) -> float:
    """The lowest trained chunk: compute from its forward on, then download, update, upload.

    Deferred, also any above it: compute from its forward on, the lowest one's download beside the
    step's end, the updates of all up to this one, and its upload.
    """
    compute_s = sum(chunk.forward_s + chunk.backward_s for chunk in durations)
    deferred = strategy.update_policy == "deferred"
    longest_s, updates_s = 0.0, None
    for chunk in durations:
        if chunk.trained:
            if updates_s is None:
                down_s = chunk.download_s
                updates_s = max(down_s, hardware.step_end_s) if deferred else down_s
            updates_s += chunk.update_s
            longest_s = max(longest_s, updates_s + chunk.upload_s + compute_s)
            if not deferred:
                break
        compute_s -= chunk.forward_s
    return longest_s


def _copies(
    durations: Sequence[ChunkDurations],
) -> tuple[list[ChunkDurations], list[ChunkDurations]]:
    """Chunks in order of their uploads (forward, then backward) and of their downloads.

    Those that are not trained have no bytes to download.
    """
    again = [chunk for chunk in reversed(durations[:-1]) if not chunk.stays]
    return [*durations, *again], list(reversed(durations))


def _busy(durations: Sequence[ChunkDurations], hardware: HardwareProfile) -> dict[Lane, float]:
    uploads, downloads = _copies(durations)
    return {
        "h2d": sum(c.upload_s for c in uploads) + sum(c.boundary_s for c in durations),
        "compute": sum(c.forward_s + c.backward_s for c in durations) + hardware.step_end_s,
        "d2h": sum(c.download_s for c in downloads) + sum(c.boundary_s for c in durations),
        "host_update": sum(chunk.update_s for chunk in durations),
    }


_NOTHING: Mapping[str, float] = {}


class _Schedule:
    """Builds the tasks of consecutive steps and runs them."""

    def __init__(
        self,
        durations: Sequence[ChunkDurations],
        strategy: Strategy,
        hardware: HardwareProfile,
    ):
        self._chunks = durations
        self._strategy = strategy
        self._num_devices = hardware.num_devices
        self._step_end_s = hardware.step_end_s
        self._capacities = {
            "link": hardware.duplex_bytes_per_s,
            "host": hardware.host_memory_bytes_per_s,
            "cores": 1.0,
        }
        self._demands: dict[tuple[float, float, bool], Mapping[str, float]] = {}
        self._core_shares = _core_shares(hardware)
        self._on_cores: dict[tuple[int, float], Mapping[str, float]] = {}
        self._tasks: list[Task] = []
        self._uses: list[int] = []
        self._downloads: list[int] = []
        self._ends: list[int] = []

    def run(self, num_steps: int) -> tuple[Timeline, list[float]]:
        """The timeline of `num_steps` steps and the end of each one's compute."""
        self._tasks, self._uses, self._downloads, self._ends = [], [], [], []
        updates: dict[int, int] = {}
        for step in range(num_steps):
            updates = self._add_step(step, updates)
        timeline = simulate(self._tasks, self._capacities)
        return timeline, [timeline.ends[end] for end in self._ends]

    def spans(self, timeline: Timeline) -> Iterator[tuple[Lane, float, float]]:
        """(lane, start, end) of every task of the last run."""
        for task, start, end in zip(self._tasks, timeline.starts, timeline.ends, strict=True):
            yield task.lane, start, end

    def _add_step(self, step: int, commits: Mapping[int, int]) -> dict[int, int]:
        """Adds one step whose forward waits for `commits`; returns its own updates by chunk."""
        head = len(self._chunks) - 1
        downloads: dict[int, int] = {}
        leaving: list[int] = []
        for chunk in range(head):
            leaves = self._boundary(chunk, "d2h", (self._uses[-1],)) if chunk else ()
            leaving += leaves
            room = leaving[-1 - BOUNDARIES_IN_FLIGHT : -BOUNDARIES_IN_FLIGHT] if leaves else []
            self._use(self._chunks[chunk].forward_s, (*self._upload(chunk, commits), *room))
        for chunk in range(head, -1, -1):
            if not self._chunks[chunk].goes_back:
                break
            stays = self._chunks[chunk].stays
            version = commits if chunk == head else {}
            upload = () if stays else self._upload(chunk, version)
            # Dispatched before the backward of the chunk above: it waits for the one before that.
            upload += self._boundary(chunk, "h2d", (*self._uses[-2:-1], *leaving))
            use = self._use(self._chunks[chunk].backward_s, (*upload, *self._gradient_room()))
            if self._chunks[chunk].is_updated_by_host:
                downloads[chunk] = self._download(chunk, use)
        deferred = self._strategy.update_policy == "deferred"
        # The norm is known at the step's end; then each update follows the one below.
        before = end = self._add("compute", self._step_end_s, (), _NOTHING)
        self._ends.append(end)
        updates: dict[int, int] = {}
        for chunk, download in sorted(downloads.items()):
            after = (download, before) if deferred else (download,)
            updates[chunk] = before = self._update(step, chunk, after)
        return updates

    def _use(self, seconds: float, after: tuple[int, ...]) -> int:
        index = self._add("compute", seconds, after, _NOTHING)
        self._uses.append(index)
        return index

    def _upload(self, chunk: int, commits: Mapping[int, int]) -> tuple[int, ...]:
        """A copy for the use that is added next."""
        work = self._chunks[chunk]
        if not work.upload_s:
            return (commits[chunk],) if chunk in commits else ()
        dispatched_before = len(self._uses) - 1 - self._strategy.prefetch_depth
        after = [self._uses[dispatched_before]] if dispatched_before >= 0 else []
        if chunk in commits:
            after.append(commits[chunk])
        return (self._add_copy("h2d", work.upload_s, work.upload_bytes, tuple(after)),)

    def _boundary(self, chunk: int, lane: Lane, after: tuple[int, ...]) -> tuple[int, ...]:
        """A copy of the chunk's input, if it waits in host memory."""
        work = self._chunks[chunk]
        if not work.boundary_bytes:
            return ()
        return (self._add_copy(lane, work.boundary_s, work.boundary_bytes, after),)

    def _download(self, chunk: int, use: int) -> int:
        work = self._chunks[chunk]
        index = self._add_copy("d2h", work.download_s, work.download_bytes, (use,))
        self._downloads.append(index)
        return index

    def _gradient_room(self) -> tuple[int, ...]:
        """The download that must have ended before one more gradient is computed."""
        if len(self._downloads) < GRADIENTS_IN_FLIGHT:
            return ()
        return (self._downloads[-GRADIENTS_IN_FLIGHT],)

    def _update(self, step: int, chunk: int, after: tuple[int, ...]) -> int:
        work = self._chunks[chunk]
        demands = self._demands_of(work.update_bytes, work.update_s, copies=False)
        return self._add("host_update", work.update_s, after, demands, order=(step, chunk))

    def _add_copy(
        self, lane: Lane, seconds: float, num_bytes: float, after: tuple[int, ...]
    ) -> int:
        return self._add(lane, seconds, after, self._demands_of(num_bytes, seconds, copies=True))

    def _demands_of(self, num_bytes: float, seconds: float, *, copies: bool) -> Mapping[str, float]:
        """What a copy, or an update, takes of link and host; the same object for the same."""
        key = num_bytes, seconds, copies
        if key not in self._demands:
            rate = num_bytes / seconds if seconds else 0.0
            of_link = {"link": rate, "host": rate * self._num_devices}
            self._demands[key] = of_link if copies else {"host": rate}
        return self._demands[key]

    def _with_cores(self, demands: Mapping[str, float], share: float) -> Mapping[str, float]:
        """The same with a share of the host's cores; the same object for the same."""
        key = id(demands), share  # they live as long as this
        if key not in self._on_cores:
            self._on_cores[key] = {**demands, "cores": share}
        return self._on_cores[key]

    def _add(
        self,
        lane: Lane,
        seconds: float,
        after: tuple[int, ...],
        demands: Mapping[str, float],
        *,
        order: tuple[int, ...] | None = None,
    ) -> int:
        index, share = len(self._tasks), self._core_shares[lane]
        if share:
            demands = self._with_cores(demands, share)
        self._tasks.append(Task(lane, seconds, after, order or (index,), demands))
        return index
