"""What the wire looks like: flat pieces to parameter trees, gradient trees to flat pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.state.layout import ChunkLayout, FlatLayout
from slidedp_jax.state.split_float import join
from slidedp_jax.state.traced_dither import dither_of_parameter
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap
from slidedp_jax.transfer.routes import FetchedChunk, GradientPath, ShardAllGather, WeightPath

DitherKeys = tuple[jax.Array, ...] | None
"""Per part of a chunk, keys of its parameters (`WeightRounding.key`), uint32 [slots], on every
compute device; None where all dithers are the same, or none are needed."""

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

    def unpack(self, layout: ChunkLayout, arrays: FetchedChunk, keys: DitherKeys = None) -> Any:
        """Fetched arrays of a chunk -> one parameter tree per stage, in the compute dtype.

        `keys` are needed where `low` was fetched of masters that are rounded by dither.
        """
        program = self._unpack.get(layout.signature)
        if program is None:
            path = self._resident_weights if layout.resident else self._weights

            def body(arrays: Any, keys: DitherKeys) -> Any:
                keys_of = keys if keys is not None else (None,) * len(layout.parts)
                flats = [[path.assemble(field) for field in fields] for fields in arrays]
                parts = zip(layout.parts, flats, keys_of, strict=True)
                return layout.unpack([_parameters(*part) for part in parts])

            program = self._on_devices(body, (path.spec, SAME), SAME)
            self._unpack[layout.signature] = program
        return program(arrays, keys)

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


def _parameters(
    layout: FlatLayout, flats: list[jax.Array], keys: jax.Array | None
) -> list[jax.Array]:
    """Parameters of a part, from `high` alone in bf16, from both halves joined in fp32."""
    highs, *lows = [layout.cut(flat) for flat in flats]
    if not lows:
        return highs
    keys_of = keys if keys is not None else [None] * len(layout.slots)
    return [
        join(high, low, _dither(own, slot.shape))
        for slot, high, low, own in zip(layout.slots, highs, lows[0], keys_of, strict=True)
    ]


def _dither(key: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Dithers of a parameter in its shape, or one for all."""
    dither = dither_of_parameter(key, math.prod(shape))
    return dither if key is None else dither.reshape(shape)
