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
from slidedp_jax.transfer.copies import over_hosts, place
from slidedp_jax.transfer.device_map import ROWS
from slidedp_jax.transfer.routes import FetchedChunk, FetchedFields, WeightPath
from slidedp_jax.transfer.vocabulary_slices import SlicePrograms
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

    def prefetch_slice(self, number: int) -> bool:
        """`prefetch` of a slice of the projection (`transfer.vocabulary_slices`)."""
        ...

    def take_slice(self, number: int, *, again: bool = False) -> jax.Array:
        """Rows of the slice [R, D] on every compute device; `again`: they will be taken again."""
        ...

    def take_others(self) -> Any:
        """As `take` of the chunk that owns the projection, with None in its place."""
        ...

    def release_slices(self) -> None:
        """As `release`, of all that the three functions above gave."""
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
      slices: how the projection is unpacked in slices, if it is.
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
        slices: SlicePrograms | None = None,
    ):
        self._store = store
        self._fences = fences
        self._path = path
        self._unpack = unpack
        self._everywhere = everywhere
        self._shares = NamedSharding(everywhere.mesh, ROWS)
        self._keys: tuple[WeightRounding | None, dict[int, DitherKeys]] = (None, {})
        self._fields = (0, 1) if with_low else (0,)
        self._tracer = tracer
        self._slices = slices
        self._arriving: dict[int, FetchedChunk] = {}
        self._arriving_slices: dict[int, FetchedFields] = {}
        self._open_slices = 0
        self._open: collections.Counter[int] = collections.Counter()
        self._version = 0
        self.bytes_fetched = 0

    def require(self, version: int) -> None:
        """From now on fetch only chunks that have reached `version`."""
        self._fences.check()
        assert not self._arriving and not self._arriving_slices, (
            "chunks of the last pass were fetched and never taken"
        )
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

    def prefetch_slice(self, number: int) -> bool:
        """Start the copy if the version of the chunk is committed; never waits."""
        if number in self._arriving_slices:
            return True
        if not self._fences.is_committed(self._sliced.slices.chunk, self._version):
            return False
        self._fetch_slice(number)
        return True

    def take_slice(self, number: int, *, again: bool = False) -> jax.Array:
        """Wait for the version if need be, copy if that has not begun, and unpack."""
        fetched = self._fetched_slice(number)
        if not again:
            del self._arriving_slices[number]
        keys = self._keys_of(self._sliced.slices.chunk)
        own = None if keys is None else keys[self._sliced.slices.part_number]
        with self._tracer.span("compute", f"unpack slice {number}"):
            return self._sliced.rows(number, fetched, own)

    def take_others(self) -> Any:
        """The shared slices stay for `take_slice`."""
        slices = self._sliced.slices
        self._fetched_slice(slices.shared[0] if slices.shared else 0)  # of the right version
        shared = [self._fetched_slice(number) for number in slices.shared]
        parts = [
            self._fetch_part(part)
            for number, part in enumerate(self._store.chunks[slices.chunk])
            if number != slices.part_number
        ]
        return self._sliced.others(shared, parts, self._keys_of(slices.chunk))

    def release_slices(self) -> None:
        """End all copies of slices."""
        self._arriving_slices.clear()
        while self._open_slices:
            self._open_slices -= 1
            self.release(self._sliced.slices.chunk)

    def abandon(self) -> None:
        """End a pass that failed and that changes nothing, so that others can go on.

        Nobody uses what it had fetched, so updates may write where copies that are not complete yet
        read. If even this is interrupted, the fences fail, and nobody waits for ever.
        """
        try:
            with contextlib.suppress(RuntimeError, ValueError):  # copies that failed themselves
                jax.block_until_ready([*self._arriving.values(), *self._arriving_slices.values()])
            self._arriving.clear()
            self._arriving_slices.clear()
            self._open_slices = 0
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
            placed[chunk] = place(keys, self._everywhere)
        return placed[chunk]

    def _fetch(self, chunk: int) -> None:
        self._fences.begin_copy(chunk)
        self._open[chunk] += 1
        with self._tracer.span("h2d", f"upload {self._store.layouts[chunk].name}"):
            self._arriving[chunk] = tuple(
                self._fetch_part(part) for part in self._store.chunks[chunk]
            )

    def _fetch_part(self, part: AnyPartState) -> FetchedFields:
        if isinstance(part, DevicePartState):
            arrays = part.arrays
            return tuple((over_hosts(arrays[field], self._shares),) for field in self._fields)
        return self._counted(tuple(self._path.fetch(part.views[field]) for field in self._fields))

    def _fetched_slice(self, number: int) -> FetchedFields:
        """On its way, which it stays."""
        if number not in self._arriving_slices:
            chunk = self._sliced.slices.chunk
            with self._tracer.span("wait", f"wait for {self._store.layouts[chunk].name}"):
                self._fences.wait_committed(chunk, self._version)
            self._fetch_slice(number)
        return self._arriving_slices[number]

    def _fetch_slice(self, number: int) -> None:
        slices = self._sliced.slices
        self._fences.begin_copy(slices.chunk)
        self._open[slices.chunk] += 1
        self._open_slices += 1
        part = self._store.chunks[slices.chunk][slices.part_number]
        assert not isinstance(part, DevicePartState), "the strategy refuses it"
        own = slice(number * slices.pieces, (number + 1) * slices.pieces)
        name = self._store.layouts[slices.chunk].name
        with self._tracer.span("h2d", f"upload {name} slice {number}"):
            self._arriving_slices[number] = self._counted(
                tuple(self._path.fetch(part.views[field][own]) for field in self._fields)
            )

    def _counted(self, fetched: FetchedFields) -> FetchedFields:
        self.bytes_fetched += sum(
            shard.data.nbytes
            for array in jax.tree.leaves(fetched)
            for shard in array.addressable_shards
        )
        return fetched

    @property
    def _sliced(self) -> SlicePrograms:
        assert self._slices is not None
        return self._slices


class ResidentWeights:
    """Weights that stay on the devices, for measuring what streaming costs."""

    def __init__(self, trees: dict[int, Any], slices: dict[int, jax.Array] | None = None):
        self._trees, self._slices = trees, slices or {}

    def prefetch(self, chunk: int) -> bool:
        """Everything is there."""
        return True

    def take(self, chunk: int) -> Any:
        """The resident trees."""
        return self._trees[chunk]

    def release(self, chunk: int) -> None:
        """Nothing is freed."""

    def prefetch_slice(self, number: int) -> bool:
        """Everything is there."""
        return True

    def take_slice(self, number: int, *, again: bool = False) -> jax.Array:
        """The resident rows."""
        return self._slices[number]

    def take_others(self) -> Any:
        """The trees under the number of no chunk, -1."""
        return self._trees[-1]

    def release_slices(self) -> None:
        """Nothing is freed."""
