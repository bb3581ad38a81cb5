"""The dithers of `weight_rounding` in programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from slidedp_jax.state.weight_rounding import (
    FIRST_FACTOR,
    NEAREST,
    SECOND_FACTOR,
    SPREAD,
    sections,
)


def hashed(offsets: jax.Array) -> jax.Array:
    """Dithers of keys plus indices: uint32 [...] -> uint32 [...]."""
    mixed = offsets * jnp.uint32(SPREAD)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(FIRST_FACTOR)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(SECOND_FACTOR)
    dithers: jax.Array = (mixed ^ (mixed >> 16)) & 0xFFFF
    return dithers


def dither_of_parameter(keys: jax.Array | None, size: int) -> jax.Array:
    """Dithers of a whole parameter: what `WeightRounding.dither` gives.

    Args:
      keys: `WeightRounding.keys` of the parameter, uint32 [sections].
      size: of the parameter.

    Returns:
      uint32 [size], or one for all.
    """
    if keys is None:
        return jnp.asarray(NEAREST)
    parts = [
        hashed(keys[number] + jax.lax.iota(jnp.uint32, end - begin))
        for number, (begin, end) in enumerate(sections(0, size))
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
