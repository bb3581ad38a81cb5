"""The state of one version, copied chunk by chunk while later steps go on.

Chunks are updated in place, so no chunk is updated further before it has been copied: a snapshot is
never a mixture of steps. They come in the order in which they are updated, from the lowest up where
updates wait for the norm, else from the top down, so each is copied as late as it can be had and as
soon as it is missed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from slidedp_jax.planner.pinned_pool import resident_copy_bytes
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.split_float import join_into
from slidedp_jax.state.starting_state import resident_sizes
from slidedp_jax.update.resident_copies import ResidentCopies
from slidedp_jax.update.update_thread import HostOptimizer


class StateSnapshot:
    """A version of the state that is being copied; every chunk must be let go of in the end.

    Args:
      store: the state.
      fences: versions of its chunks, at this version or before it.
      updates: the optimizer state that no parameter owns.
      version: steps done.

    Attributes:
      version: the same.
    """

    def __init__(self, store: HostStore, fences: Fences, updates: HostOptimizer, version: int):
        self.version = version
        self._store = store
        self._fences = fences
        self._updates = updates
        self._rounding = store.rounding
        self._chunks = {
            slot.name: number
            for number, layout in enumerate(store.layouts)
            for slot in layout.slots
        }
        sizes = resident_sizes(store.layouts, store.share.num_hosts)
        self._resident = ResidentCopies(resident_copy_bytes(sizes))
        self._held_before_s = fences.held_s
        fences.begin_snapshot(version, set(self._chunks.values()))

    @property
    def order(self) -> Sequence[int]:
        """Chunks, the one first that is updated first."""
        chunks = range(len(self._fences))
        return chunks if self._updates.deferred else chunks[::-1]

    @property
    def held_s(self) -> float:
        """Seconds in which an update of a later step could not begin for this snapshot."""
        return self._fences.held_s - self._held_before_s

    def chunk_of(self, name: str) -> int:
        """The chunk in which a parameter lies."""
        return self._chunks[name]

    def wait(self, chunk: int) -> None:
        """Block until the chunk has reached this version; it is kept though a later step fails.

        Raises:
          TrainingStopped: a step up to this version has failed.
        """
        self._fences.wait_kept(chunk, self.version)

    def wait_judged(self) -> None:
        """Block until the steps up to this version have been found good.

        Raises:
          TrainingStopped: one was not.
        """
        self._updates.wait_judged(self.version)

    def shared(self) -> list[np.ndarray]:
        """Optimizer state that no parameter owns; before any chunk is let go of.

        Raises:
          TrainingStopped: a step up to this version has failed.
        """
        trained = [chunk for chunk in self.order if chunk in self._fences.trained]
        for chunk in trained[:1]:  # once it is updated, what its update began with has moved on
            self.wait(chunk)
        return [np.asarray(leaf) for leaf in self._updates.shared]

    def let_go(self, chunk: int) -> None:
        """The chunk has been copied; twice is once."""
        self._fences.copied(chunk, self.version)
        for parts in self._store.chunks[chunk : chunk + 1]:  # none if the store was closed
            self._resident.forget(parts)

    def abandon(self) -> None:
        """Let go of everything."""
        for chunk in range(len(self._fences)):
            self.let_go(chunk)

    def copy(self, name: str, number: int | None, start: int, out: np.ndarray) -> None:
        """Copy elements of the flattened master (None), or of a state array, from `start` on.

        `out`: uint8; of a master, what `join` takes.
        """
        place = self._store.resident_part(name)
        if number is not None:
            values = out.view(self._store.state_specs(name)[number].dtype)
            if place is None:
                self._store.read_state_into(name, number, start, values)
            else:
                part, offset = place
                self._resident.read_into(part, offset + start, {2 + number: values})
            return
        half = len(out) // 2
        high, low = out[:half].view(ml_dtypes.bfloat16), out[half:].view(np.int16)
        if place is None:
            self._store.read_halves_into(name, start, high, low)
        else:
            part, offset = place
            self._resident.read_into(part, offset + start, {0: high, 1: low})

    def copy_whole(self, name: str, number: int) -> np.ndarray:
        """A state array that is not flat, a fresh array."""
        return self._store.read_state(name, number)

    def join(self, name: str, start: int, copied: np.ndarray, first: int, out: np.ndarray) -> None:
        """Masters of elements that were copied.

        Args:
          name: of the parameter.
          start: element from which on `copied` was copied.
          copied: what `copy` has filled.
          first: element from which on masters are wanted.
          out: float32, as many as are wanted.
        """
        half, skipped = len(copied) // 2, first - start
        own = slice(skipped, skipped + len(out))
        high = copied[:half].view(ml_dtypes.bfloat16)[own]
        low = copied[half:].view(np.int16)[own]
        dither = functools.partial(self._rounding.dither, name)
        join_into(out, high, low, lambda begin, size: dither(first + begin, size))
