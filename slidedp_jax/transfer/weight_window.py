"""Weights on the compute devices: fetched ahead, unpacked when needed, dropped after use.

A chunk is fetched for step n + 1 only when its version n is committed (`fences`). At most
`prefetch_depth` chunks are fetched ahead of the one in use.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.state.device_state import DevicePartState
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_store import AnyPartState, HostStore
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.routes import FetchedChunk, WeightPath
from slidedp_jax.transfer.wire_programs import DitherKeys


class WeightSource(Protocol):
    """Where the pipeline gets a chunk's weights from."""

    def prefetch(self, chunk: int) -> bool:
        """Start bringing the chunk if that needs no waiting; whether it is on its way."""
        ...

    def take(self, chunk: int) -> Any:
        """One parameter tree per stage of the chunk, on every compute device."""
        ...

    def release(self, chunk: int) -> None:
        """The device is done with what `take` gave: programs that read it have completed."""
        ...


class StreamedWeights:
    """Weights of the version that `require` names, from the host state.

    Args:
      store: the state.
      fences: versions of its chunks.
      path: weight route.
      unpack: from what was fetched to trees.
      everywhere: on all compute devices alike.
      with_low: whether both halves of the masters are fetched (fp32 compute).
      tracer: takes note of copies.
    """

    def __init__(
        self,
        store: HostStore,
        fences: Fences,
        path: WeightPath,
        unpack: Callable[[ChunkLayout, FetchedChunk, DitherKeys], Any],
        *,
        everywhere: NamedSharding,
        with_low: bool,
        tracer: Tracer,
    ):
        self._store = store
        self._fences = fences
        self._path = path
        self._unpack = unpack
        self._everywhere = everywhere
        self._keys: tuple[WeightRounding | None, dict[int, DitherKeys]] = (None, {})
        self._fields = (0, 1) if with_low else (0,)
        self._tracer = tracer
        self._arriving: dict[int, FetchedChunk] = {}
        self._open: collections.Counter[int] = collections.Counter()
        self._version = 0
        self.bytes_fetched = 0

    def require(self, version: int) -> None:
        """From now on fetch only chunks that have reached `version`."""
        self._fences.check()
        assert not self._arriving, "chunks of the last pass were fetched and never taken"
        self._version = version

    def prefetch(self, chunk: int) -> bool:
        """Start the copy if the chunk's version is committed; never waits."""
        if chunk in self._arriving:
            return True
        if not self._fences.is_committed(chunk, self._version):
            return False
        self._fetch(chunk)
        return True

    def take(self, chunk: int) -> Any:
        """Wait for the version if need be, copy if that has not begun, and unpack."""
        layout = self._store.layouts[chunk]
        if chunk not in self._arriving:
            with self._tracer.span("wait", f"wait for {layout.name}"):
                self._fences.wait_committed(chunk, self._version)
            self._fetch(chunk)
        with self._tracer.span("compute", f"unpack {layout.name}"):
            return self._unpack(layout, self._arriving.pop(chunk), self._keys_of(chunk))

    def release(self, chunk: int) -> None:
        """The chunk's copy is known to be complete, since programs that used it are."""
        self._open[chunk] -= 1
        self._fences.end_copy(chunk)

    def abandon(self) -> None:
        """End a pass that failed and that changes nothing, so that others can go on.

        Nobody uses what it had fetched, so updates may write where copies that are not complete yet
        read. If even this is interrupted, the fences fail, and nobody waits for ever.
        """
        try:
            with contextlib.suppress(RuntimeError, ValueError):  # copies that failed themselves
                jax.block_until_ready(list(self._arriving.values()))
            self._arriving.clear()
            for chunk in +self._open:
                while self._open[chunk]:
                    self.release(chunk)
        except BaseException as error:
            self._fences.fail(error)
            raise

    def _keys_of(self, chunk: int) -> DitherKeys:
        """What joining the halves of a chunk's weights needs; placed once."""
        rounding = self._store.rounding
        if len(self._fields) == 1 or rounding.seed is None:
            return None
        if self._keys[0] != rounding:
            self._keys = (rounding, {})
        placed = self._keys[1]
        if chunk not in placed:
            parts = self._store.layouts[chunk].parts
            keys = tuple(
                np.array([rounding.key(slot.name) for slot in part.slots], np.uint32)
                for part in parts
            )
            placed[chunk] = jax.device_put(keys, self._everywhere)
        return placed[chunk]

    def _fetch(self, chunk: int) -> None:
        self._fences.begin_copy(chunk)
        self._open[chunk] += 1
        with self._tracer.span("h2d", f"upload {self._store.layouts[chunk].name}"):
            self._arriving[chunk] = tuple(
                tuple(self._fetch_field(part, field) for field in self._fields)
                for part in self._store.chunks[chunk]
            )
        if self._store.layouts[chunk].resident:
            return
        self.bytes_fetched += sum(
            shard.data.nbytes
            for array in jax.tree.leaves(self._arriving[chunk])
            for shard in array.addressable_shards
        )

    def _fetch_field(self, part: AnyPartState, field: int) -> tuple[jax.Array, ...]:
        if isinstance(part, DevicePartState):
            return (part.arrays[field],)
        return self._path.fetch(part.views[field])


class ResidentWeights:
    """Weights that stay on the devices, for measuring what streaming costs."""

    def __init__(self, trees: dict[int, Any]):
        self._trees = trees

    def prefetch(self, chunk: int) -> bool:
        """Everything is there."""
        return True

    def take(self, chunk: int) -> Any:
        """The resident trees."""
        return self._trees[chunk]

    def release(self, chunk: int) -> None:
        """Nothing is freed."""
