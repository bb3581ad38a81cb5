"""What the wire looks like: flat pieces to parameter trees, gradient trees to flat pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.state.split_float import join
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap
from slidedp_jax.transfer.routes import FetchedChunk, GradientPath, ShardAllGather, WeightPath

Packed = tuple[tuple[jax.Array, ...], jax.Array]
"""Wire array per trained part, and sums of squares [G]."""


class WirePrograms:
    """Unpacking and packing programs, one per distinct structure of a chunk.

    Args:
      on_devices: compiles for the compute devices.
      weights: weight route.
      gradients: gradient route.
    """

    def __init__(self, on_devices: DeviceMap, weights: WeightPath, gradients: GradientPath):
        self._on_devices = on_devices
        self._weights = weights
        # State that stays on the devices lies there in shares.
        self._resident_weights = ShardAllGather(on_devices.mesh)
        self._gradients = gradients
        self._unpack: dict[Any, Callable[..., Any]] = {}
        self._pack: dict[Any, Callable[..., Any]] = {}

    def unpack(self, layout: ChunkLayout, arrays: FetchedChunk) -> Any:
        """Fetched arrays of a chunk -> one parameter tree per stage, in the compute dtype."""
        program = self._unpack.get(layout.signature)
        if program is None:
            path = self._resident_weights if layout.resident else self._weights

            def part(fields: Any) -> jax.Array:
                flats = [path.assemble(field) for field in fields]
                return join(*flats) if len(flats) == 2 else flats[0]

            def body(arrays: Any) -> Any:
                return layout.unpack([part(fields) for fields in arrays])

            program = self._on_devices(body, (path.spec,), SAME)
            self._unpack[layout.signature] = program
        return program(arrays)

    def pack(self, layout: ChunkLayout, trees: Any) -> Packed:
        """Accumulated gradients of a chunk, trees without leaves for frozen parameters."""
        program = self._pack.get(layout.structure)
        if program is None:
            body = functools.partial(self.packed, layout)
            program = self._on_devices(body, (ROWS,), (ROWS, ROWS))
            self._pack[layout.structure] = program
        packed: Packed = program(trees)
        return packed

    def packed(self, layout: ChunkLayout, trees: Any) -> Packed:
        """The same within a program."""
        own = jax.tree.map(lambda leaf: leaf[0], trees)
        dtype = jnp.result_type(*jax.tree.leaves(own))
        sent = [self._gradients.to_wire(flat) for flat in layout.pack(own, dtype)]
        wires, squares = zip(*sent, strict=True)
        return wires, sum(squares[1:], start=squares[0])
