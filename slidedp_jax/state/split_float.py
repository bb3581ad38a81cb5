"""An fp32 master weight as a bf16 half that computes and a 16-bit half that completes it.

`low` is the lower 16 bits of the master. `high` is its upper 16 bits, plus one where adding the
element's dither (`weight_rounding`) to the lower bits carries:

    high = (bits(master) + dither) >> 16,   bits(master) == ((high - carry) << 16) | low

with carry = (low + dither) >> 16, which the two halves show again. Bits count as unsigned, so it
is magnitudes that are rounded, of either sign and through subnormals alike. With a dither of 0x8000
that is rounding to nearest with ties away from zero. (A tie rounded to even, as `astype(bfloat16)`
does, could not be told from the halves.)

Exact for every finite value and infinity. A master above the largest bf16 may have an infinite
`high`, as it has when it is rounded to nearest, and comes back finite; were it held at the largest
bf16 instead, it could not be told from the number below it that was rounded up. Infinity has no
lower bits and stays. A NaN has a NaN `high`: there the upper bits are cut whatever the dither, and
a payload that sits in the lower 16 bits alone gets the quiet bit as well; every other payload is
kept.

Source of the layout: two's-complement arithmetic on IEEE 754 bit patterns, whose order is monotone
in magnitude.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from slidedp_jax.state.weight_rounding import WeightRounding

_BLOCK = 1 << 19
"""Elements that NumPy takes at once. Larger than a core's cache, which costs a tenth more; but of
many threads each has to wake up for the interpreter between two operations, which takes longer
than an operation on what a cache holds."""
_QUIET = 0x0040
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HIGH_MAGNITUDE = 0x7FFF
_HIGH_INFINITY = 0x7F80

DitherOf = Callable[[int, int], np.ndarray]
"""(start, size) -> dithers of these elements, unsigned [size] or one for all."""


def split(master: jax.Array, dither: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split float32 [...] into `high` bfloat16 [...] and `low` int16 [...], in or out of jit.

    `dither`: uint32 [...] below 2**16, or one for all.
    """
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
    high, low = _split_bits(bits, dither, jnp)
    return (
        jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16),
        jax.lax.bitcast_convert_type(low.astype(jnp.uint16), jnp.int16),
    )


def join(high: jax.Array, low: jax.Array, dither: jax.Array) -> jax.Array:
    """Join what `split` made with that dither: bfloat16 [...] and int16 [...] -> float32 [...]."""
    upper = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32)
    lower = jax.lax.bitcast_convert_type(low, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(_join_bits(upper, lower, dither, jnp), jnp.float32)


def split_numpy(master: np.ndarray, dither_of: DitherOf) -> tuple[np.ndarray, np.ndarray]:
    """`split` on NumPy arrays: floats of any dtype -> (bfloat16, int16), same shape.

    `dither_of` is asked for ranges of the flattened array, where the master has lower bits at all.
    """
    flat = master.reshape(-1)
    high, low = np.empty((2, flat.size), np.uint16)
    for block in _blocks(flat.size):
        bits = flat[block].astype(np.float32).view(np.uint32)
        upper, lower = high[block], low[block]
        np.copyto(lower, bits, casting="unsafe")  # the lower 16 bits
        np.copyto(upper, bits >> np.uint32(16), casting="unsafe")
        if not lower.any():  # as in weights that were stored in bf16
            continue
        carry = _carries(lower, dither_of(block.start, len(bits)))
        if _may_hold_nan(upper):
            dither = dither_of(block.start, len(bits)).astype(np.uint32)
            upper[:], _ = _split_bits(bits, dither, np)
        else:
            np.add(upper, carry, out=upper)
    return (
        high.view(ml_dtypes.bfloat16).reshape(master.shape),
        low.view(np.int16).reshape(master.shape),
    )


def join_numpy(high: np.ndarray, low: np.ndarray, dither_of: DitherOf) -> np.ndarray:
    """`join` on NumPy arrays: (bfloat16, int16) -> float32, same shape."""
    out = np.empty(high.size, np.float32)
    join_into(out, high.reshape(-1), low.reshape(-1), dither_of)
    return out.reshape(high.shape)


def join_into(out: np.ndarray, high: np.ndarray, low: np.ndarray, dither_of: DitherOf) -> None:
    """The same into an array that is there: bfloat16 [n] and int16 [n] -> float32 [n]."""
    halves = out.view(np.uint16).reshape(-1, 2)  # of a number, the lower one first
    for block in _blocks(out.size):
        upper, lower = high[block].view(np.uint16), low[block].view(np.uint16)
        carry = _carries(lower, dither_of(block.start, len(upper)))
        if _may_hold_nan(upper):  # NaNs were cut without a carry
            carry &= (upper & np.uint16(_HIGH_MAGNITUDE)) <= np.uint16(_HIGH_INFINITY)
        np.subtract(upper, carry, out=halves[block, 1])
        halves[block, 0] = lower


def _carries(lower: np.ndarray, dither: np.ndarray) -> np.ndarray:
    """Whether adding the dithers to these lower bits carries, bool."""
    total = lower + dither.astype(np.uint16, copy=False)  # modulo 2**16
    carry: np.ndarray = total < lower
    return carry


def _may_hold_nan(upper: np.ndarray) -> bool:
    """Whether some upper bits are a NaN's, or an infinity's, which lower bits may make a NaN."""
    positive = upper.view(np.int16).max(initial=0) >= _HIGH_INFINITY
    return bool(positive or upper.max(initial=0) >= 0x8000 | _HIGH_INFINITY)


def rounded(master: np.ndarray, rounding: WeightRounding, name: str) -> np.ndarray:
    """The `high` of a whole parameter: floats of any dtype -> bfloat16, same shape."""
    return split_numpy(master, functools.partial(rounding.dither, name))[0]


def _blocks(size: int) -> Iterator[slice]:
    """Slices that bound intermediate arrays."""
    return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))


def _split_bits(bits: Any, dither: Any, xp: Any) -> tuple[Any, Any]:
    """uint32 patterns -> the low 16 bits of (high, low), each in a uint32."""
    cut = bits >> xp.uint32(16)
    is_nan = (bits & xp.uint32(_MAGNITUDE)) > xp.uint32(_INFINITY)
    hidden = (cut & xp.uint32(_HIGH_MAGNITUDE)) == xp.uint32(_HIGH_INFINITY)
    nan_high = xp.where(hidden, cut | xp.uint32(_QUIET), cut)
    rounded = (bits + dither) >> xp.uint32(16)
    return xp.where(is_nan, nan_high, rounded), bits & xp.uint32(0xFFFF)


def _join_bits(upper: Any, lower: Any, dither: Any, xp: Any) -> Any:
    """uint32-widened halves -> uint32 pattern; a NaN was cut without a carry."""
    is_nan = (upper & xp.uint32(_HIGH_MAGNITUDE)) > xp.uint32(_HIGH_INFINITY)
    carry = xp.where(is_nan, xp.uint32(0), (lower + dither) >> xp.uint32(16))
    return ((upper - carry) << xp.uint32(16)) | lower
