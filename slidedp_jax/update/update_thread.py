"""The update thread: turns arriving gradients into committed chunk versions.

*Deferred*: gradients wait until the norm over all of them is known, then chunks are updated in the
order in which the next forward needs them, beside that forward. *Eager* (no clipping): a chunk is
updated as soon as its gradient has arrived, the lowest waiting chunk first. Both run one kernel.

A resident chunk is committed as soon as the compute devices have been given its update, since they
keep the order of their work. Of the others two are in flight: while the host devices work on one
chunk, the thread prepares and hands over the next, so no device waits for Python or for the slowest
of the others.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from slidedp_jax.errors import TrainingStopped
from slidedp_jax.planner.strategy import UpdatePolicy
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_share import HostShare
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.routes import Gradient, gradients_by_name
from slidedp_jax.update.part_updates import PartUpdates, StepScalars
from slidedp_jax.update.step_guard import StepEnd, StepGuard

_NORM = -1  # sorts before every chunk of its step
_MAX_RUNNING = 2


@dataclass(frozen=True, kw_only=True)
class _RunningUpdate:
    """An update that the host devices have been given; each of `finish` ends that of one part."""

    step: int
    chunk: int
    finish: list[Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class StepUpdate:
    """What became of a step's gradients: their norm before clipping, and whether it was skipped."""

    grad_norm: float
    skipped: bool


class HostOptimizer:
    """Owns the update thread and the optimizer state shared by all parameters.

    Args:
      store: the host state.
      fences: versions of its chunks.
      updates: the compiled updates.
      shared: starting optimizer state that no parameter owns.
      policy: when chunks are updated; `eager` allows neither clipping nor skipping.
      max_grad_norm: limit of the global norm; None switches clipping off.
      guard: which steps are bad, and whether those stop training or are skipped.
      sums_on_host: whether gradients arrive as one summand per device.
      tracer: takes note of updates.
    """

    def __init__(
        self,
        store: HostStore,
        fences: Fences,
        updates: PartUpdates,
        shared: Sequence[np.ndarray],
        *,
        policy: UpdatePolicy,
        max_grad_norm: float | None,
        guard: StepGuard,
        sums_on_host: bool,
        tracer: Tracer,
    ):
        self.deferred = policy == "deferred"
        self.shared = list(shared)
        self._store = store
        self._fences = fences
        self._updates = updates
        self._max_norm = np.inf if max_grad_norm is None else max_grad_norm
        self._guard = guard
        self._sums_on_host = sums_on_host
        self._tracer = tracer
        self._condition = threading.Condition()
        self._jobs: list[tuple[int, int]] = []
        self._running: collections.deque[_RunningUpdate] = collections.deque()
        self._gradients: dict[tuple[int, int], Gradient] = {}
        self._ends: dict[int, tuple[StepEnd, Future[StepUpdate]]] = {}
        self._squares: dict[tuple[int, int], np.ndarray] = {}
        self._norm = 0.0
        self._scalars: StepScalars | None = None
        self._scalars_step = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="host_update", daemon=True)
        self._thread.start()

    def submit(self, step: int, chunk: int, gradient: Gradient) -> None:
        """Hand over the gradient of a chunk; `step` counts from 1."""
        with self._condition:
            self._gradients[step, chunk] = gradient
            if not self.deferred:
                self._jobs.append((step, chunk))
                self._condition.notify_all()

    def end_backward(self, step: int, end: StepEnd) -> Callable[[], StepUpdate]:
        """All gradients of `step` are submitted.

        Returns:
          A function that waits for the norm. With eager updates and gradients summed by the host
          that is the end of the step's updates.
        """
        noted_while_updating = self._sums_on_host and not self.deferred
        future: Future[StepUpdate] = Future()
        with self._condition:
            if self._failure is not None:  # no thread is left to end the step
                future.set_exception(self._failure)
                return future.result
            self._ends[step] = (end, future)
            self._jobs.append((step, len(self._fences) if noted_while_updating else _NORM))
            self._condition.notify_all()
        return future.result

    def wait_judged(self, version: int) -> None:
        """Block until the norm and the loss of every step up to `version` have been found good.

        Eager updates whose gradients the host sums are committed before.

        Raises:
          TrainingStopped: one was not, or cannot be judged any more; its cause is attached.
        """
        with self._condition:

            def pending() -> bool:
                return any(step <= version for step in self._ends)

            self._condition.wait_for(lambda: self._failure or not pending())
            if pending():
                self._fences.check()

    def resume(self, shared: Sequence[np.ndarray]) -> None:
        """Go on from `shared`, the state that no parameter owns; no update may be pending."""
        self.shared = list(shared)
        self._scalars_step = 0  # those of a step of that number are of another state

    def close(self) -> None:
        """Finish what has been submitted and end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                with self._condition:
                    self._condition.wait_for(lambda: self._jobs or self._running or self._closed)
                    if not self._jobs and not self._running:
                        return
                    job = self._next_job()
                if job is None:
                    self._finish()
                elif 0 <= job[1] < len(self._fences):
                    self._start(*job)
                else:
                    self._end_step(job[0])
            except BaseException as error:
                self._fail(error)
                return

    def _next_job(self) -> tuple[int, int] | None:
        """What to do next; None: finish the oldest running update first.

        The first job that can start, else the one that was submitted first. Gradients arrive from
        the top chunk down, while jobs are sorted from the bottom up, and readers hold versions, so
        the first job is not always one that can run. The end of a step keeps its place among them.
        Nothing that might have to wait begins beside a running update, whose commit it would hold
        up.
        """
        if not self._jobs or len(self._running) == _MAX_RUNNING:
            return None
        self._jobs.sort()
        job = self._jobs[0]
        if job in self._gradients:
            updates = [key for key in self._jobs if key in self._gradients]
            ready = next((key for key in updates if self._can_start(key)), None)
            if self._running and ready is None:
                return None
            # A snapshot lets go of the lowest first; what has not arrived comes from the top.
            arrived = [key for key in updates if self._gradients[key].has_arrived()]
            waits = min(arrived) if arrived else min(updates, key=lambda key: (key[0], -key[1]))
            job = ready or waits
        elif self._running:
            return None
        self._jobs.remove(job)
        return job

    def _can_start(self, job: tuple[int, int]) -> bool:
        step, chunk = job
        return self._gradients[job].has_arrived() and self._fences.is_free(chunk, step)

    def _fail(self, error: BaseException) -> None:
        self._fences.fail(error)
        self._finish_what_runs()
        with self._condition:
            self._failure = error
            for _, future in self._ends.values():
                future.set_exception(error)
            self._gradients.clear()
            self._jobs.clear()
            self._condition.notify_all()

    def _end_step(self, step: int) -> None:
        """Know the norm; then, if updates waited for it, release them or skip the step."""
        end, _ = self._ends[step]
        with self._tracer.span("wait", "wait for the norm"):
            squares = self._host_squares(step) if self._sums_on_host else end.squares
            norm = _global_norm(squares)
        if differ := end.hosts_differ():
            raise TrainingStopped(f"step {step}: {differ}")
        problem = self._guard.problem(float(norm), end.loss)
        skipped = problem is not None and self._guard.may_skip()
        if problem is not None and not skipped:
            error = TrainingStopped(self._describe(step, problem, end))
            self._fences.fail(error)
            raise error
        if skipped:
            self._skip(step)
        elif self.deferred:
            self._norm = float(norm)
            with self._condition:
                for key in self._gradients:
                    if key[0] == step:
                        self._jobs.append(key)
        with self._condition:
            _, future = self._ends.pop(step)
            self._condition.notify_all()
        future.set_result(StepUpdate(grad_norm=float(norm), skipped=skipped))

    def _host_squares(self, step: int) -> list[np.ndarray]:
        if not self.deferred:  # noted while updating
            return [self._squares.pop((step, chunk)) for chunk in self._fences.trained]
        with self._condition:
            gradients = [self._gradients[step, chunk] for chunk in self._fences.trained]
        return [self._updates.sum_of_squares(gradient.summands()) for gradient in gradients]

    def _skip(self, step: int) -> None:
        for chunk in self._fences.trained:
            with self._condition:
                self._gradients.pop((step, chunk))
            self._fences.commit(chunk, step)

    def _start(self, step: int, chunk: int) -> None:
        """Hand a chunk's update to the host devices."""
        with self._condition:
            gradient = self._gradients.pop((step, chunk))
        gradient.wait()
        self._fences.wait_readers(chunk, step)
        with self._tracer.span("host_update", f"start {self._store.layouts[chunk].name}"):
            if self._scalars is None or self._scalars_step != step:
                self._scalars, self._scalars_step = self._updates.scalars(self.shared), step
                self.shared = self._updates.advance(self.shared)
            summands = gradient.summands()
            if self._sums_on_host and not self.deferred:
                self._squares[step, chunk] = self._updates.sum_of_squares(summands)
            trained = [part for part in self._store.chunks[chunk] if part.layout.trained]
            norm = self._norm if self.deferred else 0.0
            # Known to run from here on: what has been started must end even if a later part fails.
            running = _RunningUpdate(step=step, chunk=chunk, finish=[])
            resident = self._store.layouts[chunk].resident
            if not resident:
                self._running.append(running)
            for part, gradients in zip(trained, summands, strict=True):
                finish = self._updates.start(part, gradients, self._scalars, norm, self._max_norm)
                if finish is not None:
                    running.finish.append(finish)
        if resident:
            self._fences.commit(chunk, step)

    def _finish(self) -> None:
        """Wait for the oldest running update and commit it."""
        update = self._running[0]
        name = self._store.layouts[update.chunk].name
        with self._tracer.span("host_update", f"update {name}"):
            while update.finish:
                update.finish.pop(0)()
        self._running.popleft()
        with self._tracer.span("host_update", f"commit {name}"):
            self._fences.commit(update.chunk, update.step)

    def _finish_what_runs(self) -> None:
        """After a failure: let running updates end, so that each chunk is of one version."""
        for update in self._running:
            for finish in update.finish:
                with contextlib.suppress(Exception):
                    finish()
        self._running.clear()

    def _describe(self, step: int, problem: str, end: StepEnd) -> str:
        """Why training stops, the first bad parameter, the rows, and how the state is."""
        state = (
            "No parameter was updated in this step."
            if self.deferred
            else "Updates run before the norm is known when clipping is off, so the parameters "
            "already hold it: go on from the last checkpoint."
        )
        with self._condition:
            waiting = sorted(item for item in self._gradients.items() if item[0][0] == step)
        share = self._store.share
        names = (
            _first_nonfinite(self._store.layouts[chunk], g, share) for (_, chunk), g in waiting
        )
        name = next((name for name in names if name is not None), None)
        here = " on this host" if share.num_hosts > 1 else ""
        first = f" The first parameter with a non-finite gradient{here} is {name}." if name else ""
        return f"step {step}: {problem}.{first}{end.name_rows()} {state} {self._guard.advice()}"


def check_policy(policy: UpdatePolicy, max_grad_norm: float | None, guard: StepGuard) -> None:
    """Whether updates can be made by `policy`.

    Raises:
      ValueError: they cannot, or the limit is no limit.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm}; a positive number, or None for none")
    if policy == "eager" and (max_grad_norm is not None or guard.skips):
        raise ValueError(
            f"eager updates run before the norm is known, so max_grad_norm={max_grad_norm} and "
            f"on_nonfinite={'skip' if guard.skips else 'stop'!r} cannot both hold; use "
            "update_policy='deferred', or max_grad_norm=None with on_nonfinite='stop'"
        )


def _global_norm(squares: Sequence[Any]) -> np.float32:
    """Root of the chunks' sums of squares, added in float64 in the order of the chunks."""
    return np.float32(np.sqrt(sum(float(np.sum(np.asarray(s, np.float64))) for s in squares)))


def _first_nonfinite(layout: ChunkLayout, gradient: Gradient, share: HostShare) -> str | None:
    """Name of the first parameter of a chunk, in model order, whose gradient is not finite."""
    found = gradients_by_name(layout, gradient, share)
    bad = {name for name, values in found.items() if not np.isfinite(values).all()}
    return next((slot.name for slot in layout.slots if slot.name in bad), None)
