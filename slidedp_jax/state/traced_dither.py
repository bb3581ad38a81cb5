"""The dithers of `weight_rounding` in programs, computed instead of looked up."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from slidedp_jax.state.weight_rounding import (
    FIRST_FACTOR,
    NEAREST,
    ROUNDS,
    SECOND_FACTOR,
    SECTION,
    SPREAD,
)

_MASK = SECTION - 1


def permuted(places: jax.Array) -> jax.Array:
    """What the table holds at `places` modulo 2**16: uint32 [...] -> uint32 [...]."""
    x = places & _MASK
    for shift, factor in ROUNDS:
        x = x ^ (x >> shift)
        if factor > 1:
            x = (x * jnp.uint32(factor)) & _MASK
    return x


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
    begins = _begins(key + jax.lax.iota(jnp.uint32, -(-size // SECTION)))
    shape = (len(begins), min(size, SECTION))
    lanes = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return permuted(begins[:, None] + lanes).reshape(-1)[:size]


def dither_of_range(
    key: jax.Array | None, section: jax.Array, offset: jax.Array, size: int
) -> jax.Array:
    """Dithers of consecutive elements of a parameter, the first of them `section * 2**16 + offset`.

    Args:
      key: `WeightRounding.key` of the parameter, uint32.
      section: uint32 scalar.
      offset: uint32 scalar below 2**16.
      size: elements, below 2**32 - 2**16.

    Returns:
      uint32 [size], or one for all.
    """
    if key is None:
        return jnp.asarray(NEAREST)
    element = offset + jax.lax.iota(jnp.uint32, size)
    return permuted(_begins(key + section + (element >> 16)) + (element & _MASK))


def _begins(sections: jax.Array) -> jax.Array:
    """Where sections begin in the table, modulo 2**16, from their numbers plus a key."""
    x = sections * jnp.uint32(SPREAD)
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST_FACTOR)
    x = (x ^ (x >> 15)) * jnp.uint32(SECOND_FACTOR)
    begins: jax.Array = x ^ (x >> 16)
    return begins
