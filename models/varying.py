"""Types inside `jax.shard_map`: which mesh axes a value varies over.

Under `check_vma=True` JAX tracks, per value, the axes along which devices hold different data, and
a custom derivative must return cotangents that vary exactly as its inputs do. Weights are the same
on every device, activations are not. Making the weights varying *before* a custom derivative puts
the sum over devices into the transpose of that cast, where JAX knows to do it. Outside `shard_map`,
or under `check_vma=False`, everything here is the identity.
"""

from __future__ import annotations

import jax


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Mesh axes over which at least one of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        axes |= frozenset(jax.typeof(array).mat.varying)
    return axes


def vary_like(array: jax.Array, *others: jax.Array) -> jax.Array:
    """The same value, typed as varying also over the axes of `others`."""
    missing = tuple(sorted(varying_axes(*others) - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
