"""How a function of one device's arrays becomes a program of all compute devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from slidedp_jax.transfer.device_groups import DATA_AXIS

ROWS, SAME = PartitionSpec(DATA_AXIS), PartitionSpec()
"""Split over the devices by the leading dimension; the same on every device."""


class DeviceMap:
    """Compiles functions for a mesh, to run in `shard_map` over the data axis.

    Args:
      mesh: compute devices, one axis `data`.
      compute_dtype: float32 asks for full precision in products.
    """

    def __init__(self, mesh: Mesh, compute_dtype: Any):
        self.mesh = mesh
        self.compute_dtype = jnp.dtype(compute_dtype)

    def __call__(
        self, function: Callable[..., Any], inputs: Any, outputs: Any, donate: Sequence[int] = ()
    ) -> jax.stages.Wrapped:
        """The program of `function`, whose arguments and results are split as the specs say."""
        if self.compute_dtype == jnp.float32:
            function = _in_full_precision(function)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=tuple(donate))


def _in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """On GPUs JAX multiplies float32 matrices in TF32, with a mantissa of 10 bits, by default."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments)

    return wrapped
