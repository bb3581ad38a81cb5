"""How a chunk's weights reach every compute device and how its gradients come back.

The host layout does not depend on the route. Pieces: the flat array lies in K pieces on the host
devices; G compute devices, K a multiple of G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.jax_internals import is_ready
from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT, GradientRoute, WeightRoute
from slidedp_jax.state.host_share import WHOLE, HostShare
from slidedp_jax.state.layout import ChunkLayout, FlatLayout
from slidedp_jax.transfer.copies import (
    download,
    first_of_this_host,
    of_this_host,
    on_host_devices,
    upload,
)
from slidedp_jax.transfer.device_groups import DATA_AXIS, DeviceGroups

FetchedFields = tuple[tuple[jax.Array, ...], ...]
"""What the weight route fetched of `high` and, in fp32 compute, of `low`."""

FetchedChunk = tuple[FetchedFields, ...]
"""The same per part of a chunk."""


class WeightPath(Protocol):
    """A weight route at work: pieces in host memory -> the flat array inside a trace."""

    spec: PartitionSpec

    def fetch(self, pieces: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Start the copies of one flat array; returns the arrays that `assemble` takes."""
        ...

    def assemble(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Inside `shard_map` over the data axis: the whole flat array on each device."""
        ...


class Replicate:
    """Every device pulls every piece."""

    spec = PartitionSpec()

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, self.spec)

    def fetch(self, pieces: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """One replicated array per piece."""
        return tuple(
            upload([piece] * self._mesh.size, self._sharding, piece.shape) for piece in pieces
        )

    def assemble(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Concatenate the pieces."""
        return _concatenate(arrays)


class ShardAllGather:
    """Every device pulls its share of the pieces; a collective gathers the rest."""

    spec = PartitionSpec(DATA_AXIS)

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, self.spec)
        self._first, self._own_devices = first_of_this_host(mesh)
        self._groups = DeviceGroups.of(mesh)

    def fetch(self, pieces: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """K / G arrays; the n-th holds the n-th piece of each device's share.

        Of several hosts, each gives the pieces that it has.
        """
        share = len(pieces) // self._own_devices
        shape = (self._mesh.size * pieces[0].shape[0],)
        return tuple(
            upload(pieces[n::share], self._sharding, shape, self._first) for n in range(share)
        )

    def assemble(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Concatenate the own share, then gather the shares in device order."""
        return self._groups.gather(_concatenate(arrays))


def weight_path(route: WeightRoute, mesh: Mesh) -> WeightPath:
    """The named weight route on a mesh of compute devices."""
    if route == "replicate":
        return Replicate(mesh)
    if route == "shard_all_gather":
        return ShardAllGather(mesh)
    raise ValueError(f"weight_route={route!r}; allowed: 'replicate', 'shard_all_gather'")


class GradientPath:
    """A gradient route at work.

    `reduce_scatter`: the devices sum in fp32, each rounds and sends 1/G. `host_sum`: each device
    rounds and sends its own gradient, and the host sums them in fp32 while it updates; in bf16
    compute that rounds G times instead of once.

    Args:
      route: which.
      mesh: compute devices.
      host_sharding: sharding of the host state.
      own_sharding: over the compute devices of this host.
      wire_dtype: dtype in which gradients travel: bfloat16, or float32 in fp32 compute.
    """

    def __init__(
        self,
        route: GradientRoute,
        mesh: Mesh,
        host_sharding: NamedSharding,
        wire_dtype: jnp.dtype,
        own_sharding: NamedSharding | None = None,
    ):
        if route not in ("reduce_scatter", "host_sum"):
            raise ValueError(f"gradient_route={route!r}; allowed: 'reduce_scatter', 'host_sum'")
        self.sums_on_host = route == "host_sum" and mesh.size > 1
        self.sums_on_devices = route == "reduce_scatter" and mesh.size > 1
        self.wire_dtype = wire_dtype
        self._mesh = mesh
        self._groups = DeviceGroups.of(mesh)
        self._host_sharding = host_sharding
        self._own_sharding = own_sharding or NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        self._leaving: list[Leaving | ArrivingGradient] = []

    def to_wire(self, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Inside `shard_map`: own gradient [n] -> (what this device sends, its sum of squares [1]).

        The sum of squares is of the rounded values, in fp32; NaN-free zero where the host sums.
        """
        if self.sums_on_host:
            return gradient.astype(self.wire_dtype), jnp.zeros(1, jnp.float32)
        if self.sums_on_devices:
            gradient = self._sum_scattered(gradient)
        wire = gradient.astype(self.wire_dtype)
        return wire, jnp.sum(jnp.square(wire.astype(jnp.float32)))[None]

    def _sum_scattered(self, gradient: jax.Array) -> jax.Array:
        """[n] on each device -> its share [n / G] of the sum in fp32.

        What has been rounded for the wire already travels between the devices like that, which
        costs nothing in precision and half the bytes of a reduce-scatter in fp32.
        """
        if gradient.dtype != self.wire_dtype or self.wire_dtype == jnp.float32:
            return self._groups.scatter_sum(gradient.astype(jnp.float32))
        return self._groups.exchange_sum(gradient)

    def start(self, wire: jax.Array) -> Leaving:
        """Start the copy to the host of a slice of a part's gradient; the rest follows."""
        leaving = Leaving(pinned=(download(wire),))
        self._leaving.append(leaving)
        return leaving

    def send(self, wires: Sequence[jax.Array | SentSlices], layout: ChunkLayout) -> Gradient:
        """Start the copy to the host of what `to_wire` made of each trained part.

        Each is [n], or [G * n] over the data axis. Of a resident chunk it stays where it is.
        """
        if layout.resident:
            return StayingGradient(
                wires=tuple(
                    of_this_host(wire, self._own_sharding)
                    for wire in wires
                    if not isinstance(wire, SentSlices)
                )
            )
        whole = {
            number: download(wire)
            for number, wire in enumerate(wires)
            if not isinstance(wire, SentSlices)
        }
        arrays = tuple(
            wire.arrays if isinstance(wire, SentSlices) else (whole[number],)
            for number, wire in enumerate(wires)
        )
        gradient = ArrivingGradient(
            arrays=arrays,
            num_summands=self._mesh.size if self.sums_on_host else 1,
            layouts=layout.trained_parts,
            host_sharding=self._host_sharding,
        )
        if whole:
            self._leaving.append(gradient)
        return gradient

    def make_room(self) -> None:
        """Wait until one gradient more may be on its way off the devices.

        The planner counts `GRADIENTS_IN_FLIGHT`; where copies are slower than backward, more would
        pile up. Copies end in the order in which they were started.
        """
        self._leaving = [gradient for gradient in self._leaving if not gradient.has_arrived()]
        while len(self._leaving) >= GRADIENTS_IN_FLIGHT:
            self._leaving.pop(0).wait()


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Arrays on their way off the devices."""

    pinned: tuple[jax.Array, ...]

    def has_arrived(self) -> bool:
        """Whether the bytes are there."""
        return all(map(is_ready, self.pinned))

    def wait(self) -> None:
        """Block until the bytes have arrived."""
        jax.block_until_ready(self.pinned)


@dataclass(frozen=True, kw_only=True)
class SentSlices:
    """A part's gradient whose slices have been started by `GradientPath.start`, in their order."""

    slices: tuple[Leaving, ...]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """In page-locked memory; they follow one another."""
        return tuple(array for leaving in self.slices for array in leaving.pinned)


class Gradient(Protocol):
    """A chunk's gradient where its update will find it."""

    def has_arrived(self) -> bool:
        """Whether the update need not wait for it."""
        ...

    def wait(self) -> None:
        """Block until it has arrived."""
        ...

    def summands(self) -> list[list[jax.Array]]:
        """Per trained part, arrays [padded_size / H] that add up to its gradient on this host."""
        ...


@dataclass(frozen=True, kw_only=True)
class StayingGradient:
    """A gradient that is updated from on the devices, one array per part, of this host's devices.

    There it is sharded over them.
    """

    wires: tuple[jax.Array, ...]

    def has_arrived(self) -> bool:
        """The devices keep the order of what they are given."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def summands(self) -> list[list[jax.Array]]:
        """One per part."""
        return [[wire] for wire in self.wires]


@dataclass(frozen=True, kw_only=True)
class ArrivingGradient:
    """A chunk's gradient on its way into pinned host memory.

    Attributes:
      arrays: per trained part one array, or one per slice.
      num_summands: arrays of the part's size that each holds per device.
      layouts: of the trained parts.
      host_sharding: of the arrays that the update takes.
    """

    arrays: tuple[tuple[jax.Array, ...], ...]
    num_summands: int
    layouts: tuple[FlatLayout, ...]
    host_sharding: NamedSharding

    @property
    def pinned(self) -> tuple[jax.Array, ...]:
        """All arrays."""
        return tuple(array for part in self.arrays for array in part)

    def has_arrived(self) -> bool:
        """Whether the bytes are there."""
        return all(map(is_ready, self.pinned))

    def wait(self) -> None:
        """Block until the bytes have arrived."""
        jax.block_until_ready(self.pinned)

    def summands(self) -> list[list[jax.Array]]:
        """Per part, arrays over the host devices that share the gradient's memory."""
        return [
            self._summands_of(arrays, layout)
            for arrays, layout in zip(self.arrays, self.layouts, strict=True)
        ]

    def _summands_of(self, arrays: Sequence[jax.Array], layout: FlatLayout) -> list[jax.Array]:
        size = layout.piece_size
        pieces: list[list[np.ndarray]] = [[] for _ in range(self.num_summands)]
        for array in arrays:
            shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
            views = [np.asarray(shard.data) for shard in shards]
            parts = [
                view[start : start + size] for view in views for start in range(0, len(view), size)
            ]
            count = len(parts) // self.num_summands
            for number, own in enumerate(pieces):
                own += parts[number * count : (number + 1) * count]
        return [on_host_devices(own, self.host_sharding, size * len(own)) for own in pieces]


def gradients_by_name(
    layout: ChunkLayout, gradient: Gradient, share: HostShare = WHOLE
) -> dict[str, np.ndarray]:
    """A chunk's gradient that has arrived, float32 by full name; frozen parameters have none.

    Of several hosts, what lies on this one, flat.
    """
    found = {}
    for part, summands in zip(layout.trained_parts, gradient.summands(), strict=True):
        total = np.sum([np.asarray(summand, np.float32) for summand in summands], axis=0)
        for slot in part.slots:
            own = share.owned(part.padded_size, slot.offset, slot.size)
            start = slot.offset + own.start - share.first(part.padded_size)
            values = total[start : start + own.stop - own.start] if own.stop > own.start else _NONE
            found[slot.name] = values if share.num_hosts > 1 else values.reshape(slot.shape)
    return found


_NONE = np.empty(0, np.float32)


def _concatenate(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]
