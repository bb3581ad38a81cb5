"""Types inside `jax.shard_map`: which mesh axes a value varies over.

Under `check_vma=True` JAX tracks, per value, the axes along which devices hold different data, and
a custom derivative must return cotangents that vary exactly as its inputs do. Weights are the same
on every device, activations are not. Making the weights varying *before* a custom derivative puts
the sum over devices into the transpose of that cast, where JAX knows to do it. Outside `shard_map`,
or under `check_vma=False`, everything here is the identity.
"""

from __future__ import annotations

import jax

from slidedp_jax.jax_internals import varying_axes


def vary_like(array: jax.Array, *others: jax.Array) -> jax.Array:
    """The same value, typed as varying also over the axes of `others`."""
    wanted = {axis for other in others for axis in varying_axes(other)}
    missing = tuple(sorted(wanted - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
