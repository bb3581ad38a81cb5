"""The dithers of `weight_rounding` in programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from slidedp_jax.state.weight_rounding import (
    FIRST_FACTOR,
    NEAREST,
    SECOND_FACTOR,
    SPREAD,
    UNIT,
)


def factors_and_starts(units: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys plus numbers of units, uint32 [...] -> factor and start of each, uint32 [...]."""
    starts = _mixed(units)
    return _mixed(starts), starts


def dither_of_parameter(key: jax.Array | None, size: int) -> jax.Array:
    """Dithers of a whole parameter: what `WeightRounding.dither` gives.

    Args:
      key: `WeightRounding.key` of the parameter, uint32.
      size: of the parameter.

    Returns:
      uint32 [size], or one for all.
    """
    if key is None:
        return jnp.asarray(NEAREST)
    units = key + jax.lax.iota(jnp.uint32, -(-size // UNIT))
    factors, starts = factors_and_starts(units)
    lanes = jax.lax.broadcasted_iota(jnp.uint32, (len(units), UNIT), 1)
    return ((factors[:, None] * lanes + starts[:, None]) >> 16).reshape(-1)[:size]


def _mixed(numbers: jax.Array) -> jax.Array:
    mixed = numbers * jnp.uint32(SPREAD)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(FIRST_FACTOR)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(SECOND_FACTOR)
    result: jax.Array = mixed ^ (mixed >> 16)
    return result
