"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slidedp_jax.checkpoint.copy_buffer import CopyBuffer
from slidedp_jax.planner.host_memory import available_host_memory

SMALLEST_BUFFER_BYTES = 1 << 29
"""So much must be there for what has been copied: a piece for each thread that writes."""

_MAKERS = 2
"""Threads that make memory ahead, beside steps that want the cores."""

_LEFT_FREE = 0.2
"""Share of the free host memory that a buffer of no stated size leaves alone."""


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What a save took.

    Attributes:
      num_bytes: of the checkpoint's arrays.
      buffer_bytes: most memory for what was copied and not yet written.
      seconds: from its beginning until the folder had its name.
      held_s: seconds in which updates of later steps could not begin, as what they change had not
        been copied.
    """

    num_bytes: int
    buffer_bytes: int
    seconds: float
    held_s: float


class SaveBeside:
    """A save that has begun.

    Args:
      path: of the checkpoint.
      write: writes it and tells what it took.

    Attributes:
      path: the same; it is there when the save is done and has not failed.
    """

    def __init__(self, path: pathlib.Path, write: Callable[[], SaveTimes]):
        self.path = path
        self._write = write
        self._times: SaveTimes | None = None
        self._failure: BaseException | None = None
        self._said = False
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._times = self._write()
        except BaseException as error:
            self._failure = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until it has ended, well or not."""
        self._thread.join()

    def result(self) -> SaveTimes:
        """Wait until it has ended.

        Raises:
          Exception: it has failed; nothing is left of it.
        """
        self.wait()
        if self._failure is not None:
            self._said = True
            raise self._failure
        assert self._times is not None
        return self._times

    def say_failure(self) -> None:
        """Raise if it has ended by a failure that nobody has been told; never waits."""
        if self.done and self._failure is not None and not self._said:
            self.result()


class SaveMemory:
    """The buffer of the next save, made ahead or when the save begins; its caller's thread's alone.

    Args:
      state_bytes: of what is saved.
    """

    def __init__(self, state_bytes: int):
        self._state_bytes = state_bytes
        self._ahead: CopyBuffer | None = None

    def make_ahead(self, num_bytes: int | None) -> None:
        """Have the system find the memory in the background; None: four fifths of what is free.

        Twice is once, unless another size is stated.
        """
        if self._ahead is None or not self._is_ahead(num_bytes):
            self.drop()
            self._ahead = self._made(num_bytes)
            for number in range(_MAKERS):
                name = f"save-memory-{number}"
                threading.Thread(target=self._ahead.make_ahead, name=name, daemon=True).start()

    def take(self, num_bytes: int | None) -> CopyBuffer:
        """For one save; None: what was made ahead, or four fifths of what is free."""
        if not self._is_ahead(num_bytes):
            self.drop()
        buffer, self._ahead = self._ahead, None
        return self._made(num_bytes) if buffer is None else buffer

    def drop(self) -> None:
        """Free what was made ahead."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _is_ahead(self, num_bytes: int | None) -> bool:
        ahead = self._ahead
        if num_bytes is not None:
            num_bytes = max(num_bytes, SMALLEST_BUFFER_BYTES)
        return ahead is not None and num_bytes in (None, ahead.num_bytes)

    def _made(self, num_bytes: int | None) -> CopyBuffer:
        stated = default_buffer_bytes(self._state_bytes) if num_bytes is None else num_bytes
        return CopyBuffer(max(stated, SMALLEST_BUFFER_BYTES))


def default_buffer_bytes(state_bytes: int) -> int:
    """Four fifths of what host memory is free now, no more than there is to copy."""
    free = available_host_memory().available_bytes
    return min(state_bytes, max(SMALLEST_BUFFER_BYTES, int((1 - _LEFT_FREE) * free)))


def timed(work: Callable[[], float], *, num_bytes: int, buffer_bytes: int) -> SaveTimes:
    """Times of work that gives the seconds for which it held up updates."""
    start = time.perf_counter()
    held_s = work()
    return SaveTimes(
        num_bytes=num_bytes,
        buffer_bytes=buffer_bytes,
        seconds=time.perf_counter() - start,
        held_s=held_s,
    )
