"""An fp32 master weight as a bf16 half that computes and a 16-bit half that completes it.

`high` is the master rounded to bf16 with ties away from zero, `low` is what rounding took, so that
`bits(master) == (bits(high) << 16) + low` with `low` in [-2**15, 2**15). A tie rounded to even, as
`astype(bfloat16)` does, can need low = +2**15, which int16 cannot hold.

Exact for every finite value and infinity (the largest finite masters have `high` infinite and come
back finite). A NaN has a NaN `high`: there the upper bits are cut instead of rounded, and a payload
that sits in the lower 16 bits alone gets the quiet bit as well; every other payload is kept.

Source of the layout: two's-complement arithmetic on IEEE 754 bit patterns, whose order is monotone
in magnitude, so that adding half a unit of the upper half rounds the magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_BLOCK = 1 << 17
_QUIET = 0x0040
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HIGH_MAGNITUDE = 0x7FFF
_HIGH_INFINITY = 0x7F80


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split float32 [...] into `high` bfloat16 [...] and `low` int16 [...], in or out of jit."""
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
    high, low = _split_bits(bits, jnp)
    return (
        jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16),
        jax.lax.bitcast_convert_type(low.astype(jnp.uint16), jnp.int16),
    )


def join(high: jax.Array, low: jax.Array) -> jax.Array:
    """Join what `split` made: bfloat16 [...] and int16 [...] -> float32 [...]."""
    upper = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32)
    lower = jax.lax.bitcast_convert_type(low, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(_join_bits(upper, lower, jnp), jnp.float32)


def split_numpy(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`split` on NumPy arrays: floats of any dtype -> (bfloat16, int16), same shape."""
    flat = master.reshape(-1)
    high, low = np.empty((2, flat.size), np.uint16)
    for block in _blocks(flat.size):
        bits = flat[block].astype(np.float32).view(np.uint32)
        high[block], low[block] = _split_bits(bits, np)
    return (
        high.view(ml_dtypes.bfloat16).reshape(master.shape),
        low.view(np.int16).reshape(master.shape),
    )


def join_numpy(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """`join` on NumPy arrays: (bfloat16, int16) -> float32, same shape."""
    upper, lower = (half.reshape(-1).view(np.uint16) for half in (high, low))
    bits = np.empty(upper.size, np.uint32)
    for block in _blocks(bits.size):
        halves = upper[block].astype(np.uint32), lower[block].astype(np.uint32)
        bits[block] = _join_bits(*halves, np)
    return bits.view(np.float32).reshape(high.shape)


def _blocks(size: int) -> Iterator[slice]:
    """Slices whose intermediate arrays stay in a core's cache."""
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


def _split_bits(bits: Any, xp: Any) -> tuple[Any, Any]:
    """uint32 patterns -> the low 16 bits of (high, low), each in a uint32."""
    cut = bits >> xp.uint32(16)
    lower = bits & xp.uint32(0xFFFF)
    is_nan = (bits & xp.uint32(_MAGNITUDE)) > xp.uint32(_INFINITY)
    hidden = (cut & xp.uint32(_HIGH_MAGNITUDE)) == xp.uint32(_HIGH_INFINITY)
    nan_high = xp.where(hidden, cut | xp.uint32(_QUIET), cut)
    rounded = cut + (lower >> xp.uint32(15))
    return xp.where(is_nan, nan_high, rounded), lower


def _join_bits(upper: Any, lower: Any, xp: Any) -> Any:
    """uint32-widened halves -> uint32 pattern; `lower` counts as signed unless `upper` is a NaN."""
    is_nan = (upper & xp.uint32(_HIGH_MAGNITUDE)) > xp.uint32(_HIGH_INFINITY)
    borrow = xp.where(is_nan, xp.uint32(0), lower >> xp.uint32(15))
    return ((upper - borrow) << xp.uint32(16)) | lower
