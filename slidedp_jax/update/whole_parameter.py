"""The update of whole parameters, for transformations that are not element-wise.

Muon's orthogonalisation or Adafactor's factored moments need all of a matrix. Each parameter is
joined from its halves, updated by one program on one host device and split again; as many
parameters as there are host devices are under way at once. The state lies beside the flat arrays,
in whatever shapes the transformation keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from slidedp_jax.state.host_store import HostStore, PartState
from slidedp_jax.state.layout import FlatLayout, Slot
from slidedp_jax.state.split_float import join, split
from slidedp_jax.state.traced_dither import dither_of_parameter
from slidedp_jax.update.decompose import DecomposedOptimizer
from slidedp_jax.update.update_kernel import clip, sum_in_order


class WholeParameterOptimizer:
    """Update programs of groups of whole parameters.

    Args:
      optimizer: the transformation taken apart.
      members: its groups that this object updates, in the order of their numbers here.
    """

    state_dtypes: tuple[np.dtype, ...] = ()
    """Of flat state arrays; there are none."""

    def __init__(self, optimizer: DecomposedOptimizer, members: Sequence[int]):
        self._optimizer = optimizer
        self._members = tuple(members)

    def init(self, group: int, values: jax.Array) -> list[jax.Array]:
        """Starting state of a parameter's master weights."""
        return self._optimizer.init(self._members[group], values)

    def update(
        self,
        group: int,
        values: jax.Array,
        gradients: jax.Array,
        state: Sequence[jax.Array],
        shared: Sequence[jax.Array],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """One step of a parameter: float32 values and gradients, its state -> the same."""
        return self._optimizer.update(self._members[group], values, gradients, state, shared)


class WholeParameterUpdates:
    """Compiled updates of whole parameters, one per group and shape.

    Args:
      optimizer: the programs.
      store: the host state; it keeps the optimizer's state in `whole_state`.
    """

    def __init__(self, optimizer: WholeParameterOptimizer, store: HostStore):
        self._optimizer = optimizer
        self._store = store
        self._devices = list(store.mesh.devices.flat)
        self._init = jax.jit(optimizer.init, static_argnums=0)
        self._step = jax.jit(self._stepped, static_argnums=(0, 1), donate_argnums=(2,))

    def init(self, part: PartState) -> None:
        """Make the starting state of a part's parameters."""
        for number, slot in enumerate(part.layout.slots):
            device = self._device(number)
            with jax.default_device(device):  # of what does not depend on the values
                state = self._init(slot.group, jax.device_put(self._store.read(slot.name), device))
            self._store.whole_state[slot.name] = jax.device_put(state, device)

    def update(
        self,
        part: PartState,
        gradients: Sequence[jax.Array],
        shared: Sequence[np.ndarray],
        norm: float,
        max_norm: float,
    ) -> None:
        """Update a part's parameters in place and wait for it; arguments as for the blocked kernel.

        `shared` are NumPy values.
        """
        scalars = [*shared, np.float32(norm), np.float32(max_norm)]
        slots = part.layout.slots
        summands = [_pieces(array) for array in gradients]
        for start in range(0, len(slots), len(self._devices)):
            window = slots[start : start + len(self._devices)]
            results = [
                self._dispatch(number, slot, part, summands, scalars)
                for number, slot in enumerate(window, start)
            ]
            for slot, (high, low, state) in zip(window, results, strict=True):
                _scatter(part.layout, slot, np.asarray(high), part.views[0])
                _scatter(part.layout, slot, np.asarray(low), part.views[1])
                self._store.whole_state[slot.name] = jax.block_until_ready(state)

    def _dispatch(
        self,
        number: int,
        slot: Slot,
        part: PartState,
        summands: Sequence[Sequence[np.ndarray]],
        scalars: Sequence[Any],
    ) -> Any:
        flats = [
            _gather(part.layout, slot, pieces)
            for pieces in (part.views[0], part.views[1], *summands)
        ]
        high, low, *gradients = jax.device_put(flats, self._device(number))
        placed = jax.device_put(list(scalars), self._device(number))
        key = self._store.rounding.key(slot.name)
        own = None if key is None else jax.device_put(np.uint32(key), self._device(number))
        state = self._store.whole_state[slot.name]
        return self._step(slot.group, slot.shape, state, high, low, own, gradients, placed)

    def _device(self, number: int) -> jax.Device:
        return self._devices[number % len(self._devices)]

    def _stepped(
        self,
        group: int,
        shape: tuple[int, ...],
        state: list[jax.Array],
        high: jax.Array,
        low: jax.Array,
        key: jax.Array | None,
        gradients: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        *shared, norm, max_norm = scalars
        gradient = clip(sum_in_order(gradients), norm, max_norm).reshape(shape)
        dither = dither_of_parameter(key, high.size)
        master = join(high, low, dither).reshape(shape)
        values, state = self._optimizer.update(group, master, gradient, state, shared)
        return *split(values.reshape(-1), dither), state


def _pieces(array: jax.Array) -> list[np.ndarray]:
    """The pieces of a flat array over the host devices, without a copy."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


def _gather(layout: FlatLayout, slot: Slot, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """A parameter's elements, flat, a fresh array."""
    out = np.empty(slot.size, pieces[0].dtype)
    for piece, inner, outer in layout.spans(slot.offset, slot.size):
        out[outer] = pieces[piece][inner]
    return out


def _scatter(
    layout: FlatLayout, slot: Slot, values: np.ndarray, pieces: Sequence[np.ndarray]
) -> None:
    for piece, inner, outer in layout.spans(slot.offset, slot.size):
        pieces[piece][inner] = values[outer]
