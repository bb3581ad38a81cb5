"""The host update of one chunk: clip, optimizer step and split into halves, in place.

One kernel serves every policy: the norm and its limit are run-time arguments in optax's order of
operations, because a kernel with the factor and one without differ in the last bit. Two forms
compute the same update:

- `blocked`: every host device walks over its piece in blocks that stay in cache. The barrier before
  the writes keeps XLA from fusing them with the arithmetic, which would copy whole pieces. The
  fastest form where XLA then updates the loop's buffers in place (JAX >= 0.11, without multi-output
  fusion), a hundred times slower elsewhere.
- `whole`: the piece as one array expression; multi-output fusion halves its memory traffic.

Which is faster is measured (`choose_form`), not guessed from a version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from slidedp_jax.chunk import ChunkLayout, block_groups_array
from slidedp_jax.elementwise import ElementwiseOptimizer
from slidedp_jax.host_store import HOST_AXIS
from slidedp_jax.split_float import join, split

KernelForm = Literal["blocked", "whole"]

_SHARDED, _REPLICATED = PartitionSpec(HOST_AXIS), PartitionSpec()


class UpdateKernels:
    """Compiled updates, one per size of chunk.

    Args:
      optimizer: the transformation on blocks.
      sharding: sharding of the host state's arrays.
      block_size: elements per block.
      form: which form to compile.
    """

    def __init__(
        self,
        optimizer: ElementwiseOptimizer,
        sharding: NamedSharding,
        *,
        block_size: int,
        form: KernelForm,
    ):
        if form not in get_args(KernelForm):
            raise ValueError(f"form={form!r}; allowed: {get_args(KernelForm)}")
        self.form = form
        self._optimizer = optimizer
        self._sharding = sharding
        self._block_size = block_size
        self._replicated = NamedSharding(sharding.mesh, _REPLICATED, memory_kind="pinned_host")
        self._block_groups: dict[str, jax.Array] = {}
        num_state = len(optimizer.state_dtypes)
        self._update = self._compile(self._update_piece, num_arrays=2 + num_state)
        self._init = self._compile(self._init_piece, num_arrays=2 + num_state)
        self._square = jax.jit(
            jax.shard_map(
                _sum_of_squares,
                mesh=sharding.mesh,
                in_specs=(_SHARDED,),
                out_specs=_SHARDED,
                check_vma=False,
            )
        )
        self._advance = jax.jit(optimizer.advance_shared)

    def _compile(self, piece: Callable[..., Any], num_arrays: int) -> Callable[..., Any]:
        mapped = jax.shard_map(
            piece,
            mesh=self._sharding.mesh,
            in_specs=(_SHARDED, _SHARDED, _REPLICATED, _SHARDED),
            out_specs=(_SHARDED,) * num_arrays,
            check_vma=False,
        )
        return jax.jit(
            lambda arrays, gradients, scalars, groups: mapped(arrays, gradients, scalars, groups),
            donate_argnums=(0,),
            keep_unused=True,
            out_shardings=(self._sharding,) * num_arrays,
        )

    def place_shared(self, shared: Sequence[Any]) -> list[jax.Array]:
        """Scalars on every host device, in the kernel's memory kind."""
        return [jax.device_put(np.asarray(leaf), self._replicated) for leaf in shared]

    def advance(self, shared: Sequence[Any]) -> list[np.ndarray]:
        """Shared optimizer state after one step, as NumPy scalars."""
        device = self._sharding.mesh.devices.flat[0]
        placed = [jax.device_put(np.asarray(leaf), device) for leaf in shared]
        return [np.asarray(leaf) for leaf in self._advance(placed)]

    def init(self, layout: ChunkLayout, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Starting optimizer state of a chunk whose master weights are set; arrays are donated."""
        return jax.block_until_ready(self._init(tuple(arrays), (), (), self._groups(layout)))

    def update(
        self,
        layout: ChunkLayout,
        arrays: Sequence[jax.Array],
        gradients: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        norm: float,
        max_norm: float,
    ) -> tuple[jax.Array, ...]:
        """Update a chunk in place and wait for it.

        Args:
          layout: the chunk's layout.
          arrays: high, low, optimizer state, each [padded_size]; donated.
          gradients: summands of the gradient, each [padded_size]; one, or one per device.
          shared: shared optimizer state before this step (`place_shared`).
          norm: global norm of the gradients, 0 when there is no limit.
          max_norm: limit of the norm, infinity for none.
        """
        scalars = (tuple(shared), *self.place_shared([np.float32(norm), np.float32(max_norm)]))
        groups = self._groups(layout)
        return jax.block_until_ready(self._update(tuple(arrays), tuple(gradients), scalars, groups))

    def sum_of_squares(self, gradients: Sequence[jax.Array]) -> np.ndarray:
        """Sums of squares of the summed gradient, float32 [K], one per host device."""
        return np.asarray(self._square(tuple(gradients)))

    def _groups(self, layout: ChunkLayout) -> jax.Array:
        if layout.name not in self._block_groups:
            groups = jax.device_put(block_groups_array(layout), self._sharding)
            self._block_groups[layout.name] = groups
        return self._block_groups[layout.name]

    def _update_piece(self, arrays: Any, gradients: Any, scalars: Any, groups: Any) -> Any:
        arrays, gradients, scalars, groups = _in_device_space((arrays, gradients, scalars, groups))
        shared, norm, max_norm = scalars

        def step(arrays: Any, gradients: Any, groups: jax.Array) -> Any:
            gradient = _clip(_sum(gradients), norm, max_norm)
            master = join(arrays[0], arrays[1])
            candidates = [
                self._optimizer.update_block(group, master, gradient, arrays[2:], shared)
                for group in range(self._optimizer.num_groups)
            ]
            values = _select(groups, [candidate[0] for candidate in candidates])
            states = [
                _select(groups, list(state))
                for state in zip(*(candidate[1] for candidate in candidates), strict=True)
            ]
            return (*split(values), *states)

        return self._over_blocks(step, arrays, gradients, groups)

    def _init_piece(self, arrays: Any, gradients: Any, scalars: Any, groups: Any) -> Any:
        arrays, groups = _in_device_space((arrays, groups))

        def step(arrays: Any, gradients: Any, groups: jax.Array) -> Any:
            master = join(arrays[0], arrays[1])
            per_group = [
                self._optimizer.init_block(group, master)
                for group in range(self._optimizer.num_groups)
            ]
            states = [_select(groups, list(state)) for state in zip(*per_group, strict=True)]
            return (arrays[0], arrays[1], *states)

        return step(arrays, gradients, groups)

    def _over_blocks(self, step: Any, arrays: Any, gradients: Any, groups: jax.Array) -> Any:
        if self.form == "whole":
            return step(arrays, gradients, groups)
        size = self._block_size

        def cut(array: jax.Array, number: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(array, (number * size,), (size,))

        def body(number: jax.Array, arrays: Any) -> Any:
            block = step(
                tuple(cut(array, number) for array in arrays),
                tuple(cut(gradient, number) for gradient in gradients),
                jax.lax.dynamic_slice(groups, (number,), (1,)),
            )
            block = jax.lax.optimization_barrier(block)
            return tuple(
                jax.lax.dynamic_update_slice(array, part, (number * size,))
                for array, part in zip(arrays, block, strict=True)
            )

        return jax.lax.fori_loop(0, groups.shape[0], body, tuple(arrays))


def choose_form(
    optimizer: ElementwiseOptimizer,
    sharding: NamedSharding,
    *,
    block_size: int,
    elements_per_device: int = 1 << 20,
) -> KernelForm:
    """Time both forms on a small state on this machine and return the faster one."""
    num_devices = sharding.mesh.size
    blocks = max(1, elements_per_device // block_size) * num_devices
    layout = ChunkLayout(
        name="timing",
        slots=(),
        trees=(),
        block_size=block_size,
        num_pieces=num_devices,
        block_groups=(0,) * blocks,
    )
    times: dict[KernelForm, float] = {}
    for form in get_args(KernelForm):
        kernels = UpdateKernels(optimizer, sharding, block_size=block_size, form=form)
        times[form] = _time_update(kernels, layout, sharding, optimizer)
    return min(times, key=lambda form: times[form])


def _time_update(
    kernels: UpdateKernels,
    layout: ChunkLayout,
    sharding: NamedSharding,
    optimizer: ElementwiseOptimizer,
) -> float:
    """Seconds of the best of three updates after one that compiles."""
    size = layout.padded_size
    dtypes = (jnp.bfloat16, jnp.int16, *optimizer.state_dtypes)
    arrays: Sequence[jax.Array] = [
        jax.jit(lambda dtype=dtype: jnp.zeros(size, dtype), out_shardings=sharding)()
        for dtype in dtypes
    ]
    gradient = jax.jit(lambda: jnp.ones(size, jnp.bfloat16), out_shardings=sharding)()
    shared = kernels.place_shared(optimizer.initial_shared())
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        arrays = kernels.update(layout, arrays, [gradient], shared, 0.0, np.inf)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _in_device_space(tree: Any) -> Any:
    """Tell the tracer that host arrays are ordinary operands; on CPU devices this moves nothing."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def _sum(gradients: Sequence[jax.Array]) -> jax.Array:
    """Sum of the summands in float32, first to last."""
    total = gradients[0].astype(jnp.float32)
    for gradient in gradients[1:]:
        total = total + gradient.astype(jnp.float32)
    return total


def _sum_of_squares(gradients: Sequence[jax.Array]) -> jax.Array:
    gradients = _in_device_space(gradients)
    return jnp.sum(jnp.square(_sum(gradients)))[None]


def _clip(gradient: jax.Array, norm: jax.Array, max_norm: jax.Array) -> jax.Array:
    """As `optax.clip_by_global_norm`: untouched below the limit, else (g / norm) * limit."""
    return jnp.where(norm < max_norm, gradient, (gradient / norm) * max_norm)


def _select(groups: jax.Array, candidates: list[jax.Array]) -> jax.Array:
    """Per block, the candidate of its group: groups [blocks], candidates [blocks * block] each."""
    chosen = candidates[0]
    for group in range(1, len(candidates)):
        mask = jnp.broadcast_to(
            (groups == group)[:, None], (groups.shape[0], chosen.size // groups.shape[0])
        )
        chosen = jnp.where(mask.reshape(-1), candidates[group], chosen)
    return chosen
