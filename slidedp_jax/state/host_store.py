"""The one authoritative copy of the training state, in host memory.

Per part of a chunk, flat arrays over the host devices (`PartitionSpec('host')`, memory kind
`pinned_host`): `high` bfloat16 and `low` int16 together are the fp32 master (`split_float`),
followed by the optimizer's per-parameter state. The update kernel takes these arrays donated and
gives them back in place, so their addresses never change: GPUs copy straight from them, and
`read`/`write` work on views. Optimizer state of parameters that are updated as a whole is kept in
its own shapes beside them. Who may touch a chunk when is not decided here but by `fences`.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.jax_internals import addresses, raw_view
from slidedp_jax.state.device_state import DevicePartState
from slidedp_jax.state.host_share import WHOLE, HostShare
from slidedp_jax.state.layout import FROZEN, ChunkLayout, FlatLayout, Slot
from slidedp_jax.state.pinned_memory import PageLock
from slidedp_jax.state.split_float import DitherOf, join_into, split_numpy
from slidedp_jax.state.weight_rounding import WeightRounding

HOST_AXIS = "host"

_ELEMENTS_AT_ONCE = 1 << 20
"""Of a parameter, cut into halves or joined at once."""


class _Halves(threading.local):
    """Memory that each thread uses again: fresh pages cost as much as the work."""

    def __init__(self) -> None:
        self._memory = np.empty((2, _ELEMENTS_AT_ONCE), np.uint16)

    def __call__(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """For `high` and `low` of so many elements."""
        memory = self._memory if size <= _ELEMENTS_AT_ONCE else np.empty((2, size), np.uint16)
        return memory[0, :size].view(jnp.bfloat16), memory[1, :size].view(np.int16)


class PartState:
    """Arrays of one part of a chunk: index 0 is `high`, 1 is `low`, the rest optimizer state."""

    elements_at_once = _ELEMENTS_AT_ONCE

    def __init__(self, layout: FlatLayout, arrays: Sequence[jax.Array], share: HostShare = WHOLE):
        self.layout = layout
        self.share = share
        self._first_piece = share.first(layout.num_pieces)
        self.dtypes = [array.dtype for array in arrays]
        self.arrays = list(arrays)
        self._pointers = [addresses(array) for array in self.arrays]
        self.views: list[list[np.ndarray]] = [
            [raw_view(pointer, layout.piece_size, array.dtype) for pointer in pointers]
            for array, pointers in zip(self.arrays, self._pointers, strict=True)
        ]

    def replace(self, arrays: Sequence[jax.Array]) -> None:
        """Take the results of an update, which must lie where the inputs lay.

        Raises:
          RuntimeError: the update was not done in place; views and page locks would be stale.
        """
        for old, array in zip(self._pointers, arrays, strict=True):
            if addresses(array) != old:
                raise RuntimeError(
                    f"the update of {self.layout.name} moved its state instead of writing in "
                    "place; something still holds a view of the donated arrays"
                )
        self.arrays = list(arrays)

    def write(self, index: int, offset: int, values: np.ndarray) -> None:
        """Set a range of array `index`; several threads may write different ranges.

        What lies on other hosts is left to them.
        """
        first, views = self._first_piece, self.views[index]
        for piece, inner, outer in self.layout.spans(offset, len(values)):
            if 0 <= piece - first < len(views):
                views[piece - first][inner] = values[outer]

    def read_into(self, index: int, offset: int, out: np.ndarray) -> None:
        """Copy the range of array `index` that begins at `offset` and is as long as `out`.

        All of it lies on this host.
        """
        first, views = self._first_piece, self.views[index]
        if not len(out):
            return
        for piece, inner, outer in self.layout.spans(offset, len(out)):
            assert 0 <= piece - first < len(views), f"{self.layout.name}: on another host"
            out[outer] = views[piece - first][inner]

    def read(self, index: int, offset: int, size: int) -> np.ndarray:
        """A fresh copy of a range of array `index`."""
        out = np.empty(size, self.dtypes[index])
        self.read_into(index, offset, out)
        return out

    def ranges(self, index: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of each piece of array `index`."""
        num_bytes = self.layout.piece_size * self.arrays[index].dtype.itemsize
        return ((pointer, num_bytes) for pointer in self._pointers[index])


AnyPartState = PartState | DevicePartState


def host_sharding(host_devices: Sequence[jax.Device]) -> NamedSharding:
    """That of the flat arrays of the state, over CPU devices."""
    mesh = Mesh(np.array(host_devices), (HOST_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(HOST_AXIS), memory_kind="pinned_host")


class HostStore:
    """Training state of all chunks; that of resident ones stays on the compute devices.

    Args:
      layouts: chunks in forward order.
      host_devices: CPU devices over which every array is sharded.
      state_dtypes: for each kind of update, dtypes of the optimizer's flat state arrays.
      device_sharding: of the arrays of chunks whose state stays on the compute devices; one of
        these is needed for page-locking too.
      upload_low: whether `low` is uploaded too (fp32 compute) and so page-locked.
      rounding: how masters become `high`.
      share: the part of every flat array that lies on this host.

    Attributes:
      share: the same.
      rounding: the same. To go on with another, write every parameter anew after changing it.
    """

    def __init__(
        self,
        layouts: Sequence[ChunkLayout],
        host_devices: Sequence[jax.Device],
        state_dtypes: Sequence[Sequence[Any]],
        *,
        device_sharding: NamedSharding,
        upload_low: bool,
        rounding: WeightRounding,
        share: HostShare = WHOLE,
    ):
        self.share = share
        self.sharding = host_sharding(host_devices)
        self.mesh = self.sharding.mesh
        self._halves = _Halves()
        self.layouts = tuple(layouts)
        self.rounding = rounding
        self.chunks = self._allocate(state_dtypes, device_sharding)
        self.whole_state: dict[str, list[jax.Array]] = {}
        self._lock = PageLock(device_sharding.mesh.devices.flat[0])
        # A range that is still registered when its memory is freed breaks later allocations, so a
        # store that nobody closes lets go of them too.
        weakref.finalize(self, self._lock.release).atexit = False
        for part in self.host_parts:
            for index in (0, 1) if upload_low else (0,):
                self._lock.lock(part.ranges(index))
        owners = {slot.name: (part, slot) for part in self.parts for slot in part.layout.slots}
        self._slots: dict[str, tuple[AnyPartState, Slot]] = {
            slot.name: owners[slot.name] for layout in self.layouts for slot in layout.slots
        }

    def _allocate(
        self, state_dtypes: Sequence[Sequence[Any]], device_sharding: NamedSharding
    ) -> list[tuple[AnyPartState, ...]]:
        zeros = {
            resident: jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
            for resident, sharding in ((False, self.sharding), (True, device_sharding))
        }

        def allocate(layout: FlatLayout, resident: bool) -> AnyPartState:
            state = () if layout.kind == FROZEN else state_dtypes[layout.kind]
            dtypes = map(jnp.dtype, (jnp.bfloat16, jnp.int16, *state))
            size = self.share.size(layout.padded_size)
            arrays = [zeros[resident](size, dtype) for dtype in dtypes]
            made = DevicePartState if resident else PartState
            return made(layout, jax.block_until_ready(arrays), self.share)

        return [
            tuple(allocate(part, layout.resident) for part in layout.parts)
            for layout in self.layouts
        ]

    @property
    def parts(self) -> list[AnyPartState]:
        """Parts of all chunks, in forward order."""
        return [part for chunk in self.chunks for part in chunk]

    @property
    def host_parts(self) -> list[PartState]:
        """Those in host memory."""
        return [part for part in self.parts if isinstance(part, PartState)]

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters, in forward order."""
        return list(self._slots)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by name."""
        return {name: slot.shape for name, (_, slot) in self._slots.items()}

    @property
    def num_parameters(self) -> int:
        """Parameters without padding."""
        return sum(layout.num_parameters for layout in self.layouts)

    @property
    def owned_bytes(self) -> int:
        """Bytes of all arrays on this host, padding included."""
        return self._bytes(self.parts)

    @property
    def host_bytes(self) -> int:
        """Of these, bytes in host memory."""
        return self._bytes(self.host_parts)

    def _bytes(self, parts: Sequence[AnyPartState]) -> int:
        flat = sum(array.nbytes for part in parts for array in part.arrays)
        return flat + sum(leaf.nbytes for leaves in self.whole_state.values() for leaf in leaves)

    def write(self, name: str, values: np.ndarray) -> None:
        """Set a parameter's master weights from an array of its shape and any float dtype.

        Raises:
          KeyError: no such parameter.
          ValueError: another shape.
        """
        _, slot = self._find(name)
        if tuple(values.shape) != slot.shape:
            raise ValueError(f"parameter {name} has shape {slot.shape}, got {tuple(values.shape)}")
        self.write_at(name, 0, values.reshape(-1))

    def write_at(self, name: str, start: int, values: np.ndarray) -> None:
        """Set elements of a parameter's flattened master weights, from `start` on.

        What lies on other hosts is left to them.
        """
        part, slot = self._find(name)
        own = self._owned(part, slot.offset + start, len(values))
        for done in range(own.start, own.stop, _ELEMENTS_AT_ONCE):
            first = start + done
            high, low = split_numpy(
                values[done : min(done + _ELEMENTS_AT_ONCE, own.stop)],
                self._dither_from(name, first),
            )
            part.write(0, slot.offset + first, high)
            part.write(1, slot.offset + first, low)

    def read(self, name: str) -> np.ndarray:
        """The fp32 master weights of a parameter, a fresh array of its shape."""
        _, slot = self._find(name)
        out = np.empty(slot.size, np.float32)
        self.read_into(name, 0, out)
        return out.reshape(slot.shape)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Elements of a parameter's flattened master weights, from `start` on, as many as `out`."""
        part, slot = self._find(name)
        for done in range(0, len(out), part.elements_at_once):
            some, first = out[done : done + part.elements_at_once], start + done
            high, low = self._halves(len(some))
            part.read_into(0, slot.offset + first, high)
            part.read_into(1, slot.offset + first, low)
            join_into(some, high, low, self._dither_from(name, first))

    def read_halves_into(self, name: str, start: int, high: np.ndarray, low: np.ndarray) -> None:
        """The two halves of these elements, as many as both arrays are long."""
        part, slot = self._find(name)
        part.read_into(0, slot.offset + start, high)
        part.read_into(1, slot.offset + start, low)

    def read_rounded(self, name: str) -> np.ndarray:
        """The bf16 weights of a parameter that devices compute with, a fresh array of its shape."""
        part, slot = self._find(name)
        return part.read(0, slot.offset, slot.size).reshape(slot.shape)

    def read_rounded_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Elements of the flattened parameter as devices compute with them, from `start` on."""
        part, slot = self._find(name)
        part.read_into(0, slot.offset + start, out)

    def state_specs(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each optimizer state array of a parameter; none if it is frozen."""
        part, slot = self._find(name)
        if name in self.whole_state:
            return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.whole_state[name]]
        return [jax.ShapeDtypeStruct(slot.shape, dtype) for dtype in part.dtypes[2:]]

    def write_state(self, name: str, number: int, values: np.ndarray) -> None:
        """Set the `number`-th optimizer state array of a parameter."""
        spec = self.state_specs(name)[number]
        if tuple(values.shape) != spec.shape:
            raise ValueError(
                f"optimizer state {number} of {name} has shape {spec.shape}, "
                f"got {tuple(values.shape)}"
            )
        if name in self.whole_state:
            old = self.whole_state[name][number]
            # Into a buffer of JAX's own: one that NumPy owns cannot be donated.
            own = jax.jit(jnp.copy, out_shardings=old.sharding)(values.astype(old.dtype))
            self.whole_state[name][number] = own
            return
        part, slot = self._find(name)
        part.write(2 + number, slot.offset, values.reshape(-1))

    def read_state(self, name: str, number: int) -> np.ndarray:
        """The `number`-th optimizer state array of a parameter, in its dtype, a fresh array."""
        if name in self.whole_state:
            return np.array(self.whole_state[name][number])
        part, slot = self._find(name)
        return part.read(2 + number, slot.offset, slot.size).reshape(slot.shape)

    def read_state_into(self, name: str, number: int, start: int, out: np.ndarray) -> None:
        """The same, of elements of the flattened array from `start` on, as many as `out`.

        Not of parameters that are updated as a whole: their state is not flat.
        """
        part, slot = self._find(name)
        part.read_into(2 + number, slot.offset + start, out)

    def write_state_at(self, name: str, number: int, start: int, values: np.ndarray) -> None:
        """Set elements of the flattened array, from `start` on; not of those either."""
        part, slot = self._find(name)
        part.write(2 + number, slot.offset + start, values)

    def resident_part(self, name: str) -> tuple[DevicePartState, int] | None:
        """Where a parameter's state is, and its first element there.

        None if it is in host memory, not on the compute devices.
        """
        part, slot = self._find(name)
        return (part, slot.offset) if isinstance(part, DevicePartState) else None

    def owned(self, name: str, host: int | None = None) -> slice:
        """Elements of a flattened parameter that lie on a host; None: on this one."""
        part, slot = self._find(name)
        share = self.share if host is None else self.share.on_host(host)
        return share.owned(part.layout.padded_size, slot.offset, slot.size)

    def _owned(self, part: AnyPartState, offset: int, size: int) -> slice:
        return self.share.owned(part.layout.padded_size, offset, size)

    def is_resident(self, name: str) -> bool:
        """Whether a parameter's state stays on the compute devices."""
        return self.resident_part(name) is not None

    def fill(self, value: Callable[[str, tuple[int, ...]], np.ndarray]) -> None:
        """Write every parameter from `value(name, shape)`, several at a time."""
        workers = min(8, len(os.sched_getaffinity(0)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda item: self.write(item[0], value(*item)), self.shapes.items()))

    def close(self) -> None:
        """Unregister and drop all state; the store cannot be used afterwards."""
        self._lock.release()
        self.chunks = []
        self._slots = {}
        self.whole_state = {}

    def _dither_from(self, name: str, first: int) -> DitherOf:
        """Dithers of a parameter's elements, counted from `first`."""
        return lambda start, size: self.rounding.dither(name, first + start, size)

    def _find(self, name: str) -> tuple[AnyPartState, Slot]:
        if name not in self._slots:
            raise KeyError(f"no parameter {name!r}; the model has {len(self._slots)} others")
        return self._slots[name]
