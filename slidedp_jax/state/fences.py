"""Per-chunk versions: the only synchronisation between uploads and updates.

Version n of a chunk is its state after n committed updates. A fetch for step n + 1 waits until
version n is committed; an update waits until no copy of the chunk is in flight, and nobody holds an
earlier version. Nothing else is ordered, so a step has no drain at its end.

A snapshot holds a version, too, but lets go of one chunk after the other, as each has been copied.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Collection

from slidedp_jax.errors import TrainingStopped


class Fences:
    """Versions and copies in flight of chunks, for pipeline and updates.

    Args:
      num_chunks: chunks of the model.
      frozen: chunks that are never updated; they have every version.

    Attributes:
      held_s: seconds in which an update could not begin for a snapshot.
    """

    def __init__(self, num_chunks: int, frozen: Collection[int] = ()):
        self.trained = tuple(chunk for chunk in range(num_chunks) if chunk not in frozen)
        self._condition = threading.Condition()
        self._versions = [0] * num_chunks
        self._copies = [0] * num_chunks
        self._holds: collections.Counter[int] = collections.Counter()
        self._uncopied: dict[int, set[int]] = {}
        self.held_s = 0.0
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._versions)

    def check(self) -> None:
        """Raise if a step or an update has failed.

        Raises:
          TrainingStopped: with the first cause attached.
        """
        with self._condition:
            self._check()

    def is_committed(self, chunk: int, version: int) -> bool:
        """Whether `chunk` has reached `version`; raises if an update has failed."""
        with self._condition:
            self._check()
            return self._has(chunk, version)

    def wait_committed(self, chunk: int, version: int) -> None:
        """Block until `chunk` reaches `version`.

        Raises:
          TrainingStopped: an update failed; its cause is attached.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._failure or self._has(chunk, version))
            self._check()

    def wait_kept(self, chunk: int, version: int) -> None:
        """Block until `chunk` reaches `version`, which it keeps if a later step fails.

        Raises:
          TrainingStopped: something has failed, and it never will.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._failure or self._has(chunk, version))
            if not self._has(chunk, version):
                self._check()

    def begin_copy(self, chunk: int) -> None:
        """A copy out of the chunk's host arrays has been issued."""
        with self._condition:
            self._copies[chunk] += 1

    def end_copy(self, chunk: int) -> None:
        """A copy announced by `begin_copy` is known to be complete."""
        with self._condition:
            assert self._copies[chunk] > 0, f"no copy of chunk {chunk} is in flight"
            self._copies[chunk] -= 1
            self._condition.notify_all()

    def hold(self, version: int) -> None:
        """No chunk goes beyond `version` until `let_go`; none may have begun to."""
        with self._condition:
            assert all(self._versions[chunk] <= version for chunk in self.trained)
            self._holds[version] += 1

    def let_go(self, version: int) -> None:
        """End a `hold`."""
        with self._condition:
            self._holds[version] -= 1
            self._condition.notify_all()

    def begin_snapshot(self, version: int, chunks: Collection[int]) -> None:
        """Each of `chunks` stays at `version` until `copied`; none may have gone beyond it.

        Frozen ones are among them: no update changes those, but a writer of the whole state does.
        """
        with self._condition:
            assert all(self._versions[chunk] <= version for chunk in self.trained)
            assert version not in self._uncopied
            self._uncopied[version] = set(chunks)

    def copied(self, chunk: int, version: int) -> None:
        """The snapshot of `version` does without the chunk from now on; twice is once."""
        with self._condition:
            left = self._uncopied.get(version, set())
            left.discard(chunk)
            if not left:
                self._uncopied.pop(version, None)
            self._condition.notify_all()

    def wait_snapshots(self) -> None:
        """Block until every snapshot has been copied.

        Raises:
          TrainingStopped: something has failed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._failure or not self._uncopied)
            self._check()

    def wait_copied(self) -> None:
        """Block until every snapshot has been copied or abandoned, whatever has failed."""
        with self._condition:
            self._condition.wait_for(lambda: not self._uncopied)

    def is_free(self, chunk: int, version: int) -> bool:
        """Whether nobody reads what an update of `chunk` to `version` would change.

        Raises if something has failed.
        """
        with self._condition:
            self._check()
            return self._is_free(chunk, version)

    def wait_readers(self, chunk: int, version: int) -> None:
        """Block until nobody reads what an update of `chunk` to `version` changes."""
        with self._condition:
            began = time.perf_counter() if self._is_uncopied(chunk, version) else None
            self._condition.wait_for(lambda: self._failure or self._is_free(chunk, version))
            if began is not None:
                self.held_s += time.perf_counter() - began
            self._check()

    def commit(self, chunk: int, version: int) -> None:
        """The chunk's arrays now hold `version`."""
        with self._condition:
            assert version == self._versions[chunk] + 1, (chunk, version, self._versions[chunk])
            self._versions[chunk] = version
            self._condition.notify_all()

    def reset(self, version: int) -> None:
        """Start counting from `version` (a restored state)."""
        with self._condition:
            assert not any(self._copies), "copies are in flight"
            self._versions = [version] * len(self._versions)
            self._condition.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Wake every waiter with an error; the first cause is kept."""
        with self._condition:
            self._failure = self._failure or cause
            self._condition.notify_all()

    def _is_free(self, chunk: int, version: int) -> bool:
        held = any(count and held < version for held, count in self._holds.items())
        return self._copies[chunk] == 0 and not held and not self._is_uncopied(chunk, version)

    def _is_uncopied(self, chunk: int, version: int) -> bool:
        return any(kept < version and chunk in left for kept, left in self._uncopied.items())

    def _has(self, chunk: int, version: int) -> bool:
        return chunk not in self.trained or self._versions[chunk] >= version

    def _check(self) -> None:
        if isinstance(self._failure, TrainingStopped):
            raise self._failure
        if self._failure is not None:
            cause = str(self._failure) or type(self._failure).__name__
            raise TrainingStopped(
                f"a step failed: {cause}. The state in memory is no longer of one step; go on from "
                "the last checkpoint."
            ) from self._failure
