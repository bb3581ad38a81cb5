"""The update of one chunk: clip, optimizer step and split into halves, in place.

One kernel serves every policy: the norm and its limit are run-time arguments in optax's order of
operations, because a kernel with the factor and one without differ in the last bit. Three forms
compute the same update:

- `blocked`: every host device walks over its piece in blocks that stay in cache. A barrier before
  the writes keeps XLA from fusing them with the arithmetic, which in JAX 0.12 would copy whole
  pieces: the fastest form there.
- `fused`: the same walk without the barrier. The fastest form of JAX 0.11 with multi-output fusion;
  a hundred times slower wherever XLA does not update the loop's buffers in place.
- `whole`: the piece as one array expression, the fastest form of JAX 0.10, where multi-output
  fusion halves its memory traffic.

Their results may differ in the last bit, because XLA contracts multiplications and additions per
fusion; `kernel_form` says which one runs, and a run keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from slidedp_jax.state.host_share import WHOLE, HostShare
from slidedp_jax.state.layout import FlatLayout, block_groups_array
from slidedp_jax.state.split_float import join
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.update.block_dithers import (
    block_dithers,
    dither_of_block,
    dither_of_piece,
    dither_or_nearest,
)
from slidedp_jax.update.elementwise import ElementwiseOptimizer
from slidedp_jax.update.kernel_form import KernelForm, check_form

_REPLICATED = PartitionSpec()

_Arrays = tuple[jax.Array, ...]
_Scalars = tuple[_Arrays, jax.Array, jax.Array]
"""Shared optimizer state, the norm and its limit."""
_Blocks = tuple[jax.Array, ...]
"""Group of each block, then what makes the dithers (`block_dithers`), if anything."""

_Tree = TypeVar("_Tree")


class UpdateKernels:
    """Compiled updates, one per size of chunk.

    Args:
      optimizer: the transformation on blocks.
      sharding: of the state's arrays, over this host's host devices or compute devices.
      block_size: elements per block.
      form: which form to compile.
      rounding: how masters become `high`.
      share: the part of flat arrays that lies on this host.
    """

    def __init__(
        self,
        optimizer: ElementwiseOptimizer,
        sharding: NamedSharding,
        *,
        block_size: int,
        form: KernelForm,
        rounding: WeightRounding,
        share: HostShare = WHOLE,
    ):
        check_form(form)
        self.form = form
        self._walks = form != "whole"
        self._rounding = rounding
        self._share = share
        self._optimizer = optimizer
        self._sharding = sharding
        self._block_size = block_size
        self._replicated = NamedSharding(
            sharding.mesh, _REPLICATED, memory_kind=sharding.memory_kind
        )
        self._blocks: dict[str, _Blocks] = {}
        self._limits: tuple[Any, list[jax.Array]] = (None, [])
        num_state = len(optimizer.state_dtypes)
        self._update = self._compile(self._update_piece, num_arrays=2 + num_state)
        self._init = self._compile(self._init_piece, num_arrays=2 + num_state)
        self._square = jax.jit(
            jax.shard_map(
                _sum_of_squares,
                mesh=sharding.mesh,
                in_specs=(sharding.spec,),
                out_specs=sharding.spec,
                check_vma=False,
            )
        )
        self._advance = jax.jit(optimizer.advance_shared)

    def _compile(self, piece: Callable[..., Any], num_arrays: int) -> Callable[..., Any]:
        sharded = self._sharding.spec
        mapped = jax.shard_map(
            piece,
            mesh=self._sharding.mesh,
            in_specs=(sharded, sharded, _REPLICATED, sharded),
            out_specs=(sharded,) * num_arrays,
            check_vma=False,
        )
        return jax.jit(
            lambda arrays, gradients, scalars, blocks: mapped(arrays, gradients, scalars, blocks),
            donate_argnums=(0,),
            keep_unused=True,
            out_shardings=(self._sharding,) * num_arrays,
        )

    def place_shared(self, shared: Sequence[Any]) -> list[jax.Array]:
        """Scalars on every host device, in the kernel's memory kind."""
        return [jax.device_put(np.asarray(leaf), self._replicated) for leaf in shared]

    def _place_limits(self, norm: float, max_norm: float) -> list[jax.Array]:
        """Norm and its limit on every host device; placed once for all chunks of a step."""
        if self._limits[0] != (norm, max_norm):
            placed = self.place_shared([np.float32(norm), np.float32(max_norm)])
            self._limits = ((norm, max_norm), placed)
        return self._limits[1]

    def advance(self, shared: Sequence[Any]) -> list[np.ndarray]:
        """Shared optimizer state after one step, as NumPy scalars."""
        device = self._sharding.mesh.devices.flat[0]
        placed = [jax.device_put(np.asarray(leaf), device) for leaf in shared]
        return [np.asarray(leaf) for leaf in self._advance(placed)]

    def init(self, layout: FlatLayout, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Starting optimizer state of a chunk whose master weights are set; arrays are donated."""
        made: tuple[jax.Array, ...] = self._init(tuple(arrays), (), (), self._blocks_of(layout))
        jax.block_until_ready(made)
        return made

    def start_update(
        self,
        layout: FlatLayout,
        arrays: Sequence[jax.Array],
        gradients: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        norm: float,
        max_norm: float,
    ) -> tuple[jax.Array, ...]:
        """Begin to update a chunk in place; its results, which may not be there yet.

        Args:
          layout: the chunk's layout.
          arrays: high, low, optimizer state, each [padded_size]; donated.
          gradients: summands of the gradient, each [padded_size]; one, or one per device.
          shared: shared optimizer state before this step (`place_shared`).
          norm: global norm of the gradients, 0 when there is no limit.
          max_norm: limit of the norm, infinity for none.
        """
        scalars = (tuple(shared), *self._place_limits(norm, max_norm))
        updated: tuple[jax.Array, ...] = self._update(
            tuple(arrays), tuple(gradients), scalars, self._blocks_of(layout)
        )
        return updated

    def sum_of_squares(self, gradients: Sequence[jax.Array]) -> np.ndarray:
        """Sums of squares of the summed gradient, float32 [K], one per host device."""
        return np.asarray(self._square(tuple(gradients)))

    def _blocks_of(self, layout: FlatLayout) -> _Blocks:
        if layout.name not in self._blocks:
            groups = block_groups_array(layout)
            assert (np.diff(groups) >= 0).all(), "the kernel walks over one group after another"
            devices = self._sharding.mesh.size * self._share.num_hosts
            arrays = (groups, *block_dithers(layout, self._rounding, devices, self.form))
            own = tuple(map(self._share.of, arrays))
            placed = tuple(jax.device_put(own, self._sharding))
            if self._walks and len(placed) > 1:  # the table twice, see `block_dithers`
                placed = (*placed, placed[-1])
            self._blocks[layout.name] = placed
        return self._blocks[layout.name]

    def _update_piece(
        self, arrays: _Arrays, gradients: _Arrays, scalars: _Scalars, blocks: _Blocks
    ) -> _Arrays:
        arrays, gradients, scalars, blocks = _in_device_space((arrays, gradients, scalars, blocks))
        shared, norm, max_norm = scalars
        groups, *dithers = blocks
        size = self._block_size

        def updated(
            group: int, arrays: _Arrays, gradients: _Arrays, dither: jax.Array | None
        ) -> list[jax.Array]:
            """Master weights and state after the step, all as one group's."""
            gradient = clip(sum_in_order(gradients), norm, max_norm)
            master = _join_numbers(arrays[0], arrays[1], dither)
            values, state = self._optimizer.update_block(
                group, master, gradient, arrays[2:], shared
            )
            return [values, *state]

        if self.form == "whole":
            dither = dither_of_piece(dithers, size)
            candidates = [
                updated(group, arrays, gradients, dither)
                for group in range(self._optimizer.num_groups)
            ]
            values, *state = (_select(groups, list(c)) for c in zip(*candidates, strict=True))
            return (*_split_result(values, dither_of_piece(dithers, size, second=True)), *state)

        def step(
            group: int, place: jax.Array | None, arrays: _Arrays, gradients: _Arrays
        ) -> _Arrays:
            joined = split = None
            if place is not None:
                joined, split = (dither_of_block(table, place, size) for table in dithers[2:])
            values, *state = updated(group, arrays, gradients, joined)
            return (*_split_result(values, split), *state)

        return self._over_blocks(step, arrays, gradients, groups, dithers[1] if dithers else None)

    def _init_piece(
        self, arrays: _Arrays, gradients: _Arrays, scalars: _Arrays, blocks: _Blocks
    ) -> _Arrays:
        arrays, (groups, *dithers) = _in_device_space((arrays, blocks))
        dither = dither_of_piece(dithers, self._block_size)
        master = join(arrays[0], arrays[1], dither_or_nearest(dither))
        per_group = [
            self._optimizer.init_block(group, master) for group in range(self._optimizer.num_groups)
        ]
        states = [_select(groups, list(state)) for state in zip(*per_group, strict=True)]
        return (arrays[0], arrays[1], *states)

    def _over_blocks(
        self,
        step: Callable[[int, jax.Array | None, _Arrays, _Arrays], _Arrays],
        arrays: _Arrays,
        gradients: _Arrays,
        groups: jax.Array,
        runs: jax.Array | None,
    ) -> _Arrays:
        """Walk over the blocks of each group in turn; `groups` is sorted.

        With dithers, over `runs` of blocks, and `step` gets a block's place in the table.

        One loop per group rather than one that computes all groups' candidates and selects: half
        the arithmetic, and JAX 0.11 then vectorises it.
        """
        size = self._block_size

        def cut(array: jax.Array, number: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(array, (number * size,), (size,))

        def body(
            group: int, to_place: jax.Array | None, number: jax.Array, arrays: _Arrays
        ) -> _Arrays:
            block = step(
                group,
                None if to_place is None else number * size + to_place,
                tuple(cut(array, number) for array in arrays),
                tuple(cut(gradient, number) for gradient in gradients),
            )
            if self.form == "blocked":
                block = jax.lax.optimization_barrier(block)
            return tuple(
                jax.lax.dynamic_update_slice(array, part, (number * size,))
                for array, part in zip(arrays, block, strict=True)
            )

        def over_run(group: int, number: jax.Array, arrays: _Arrays) -> _Arrays:
            assert runs is not None
            first, end, to_place, _ = runs[number]
            of_block = functools.partial(body, group, to_place)
            walked: _Arrays = jax.lax.fori_loop(first, end, of_block, arrays)
            return walked

        groups = groups if runs is None else runs[:, 3]
        start: int | jax.Array = 0
        for group in range(self._optimizer.num_groups):
            last = group == self._optimizer.num_groups - 1
            end = groups.shape[0] if last else jnp.sum(groups <= group, dtype=jnp.int32)
            each: Callable[..., _Arrays] = functools.partial(over_run, group)
            if runs is None:
                each = functools.partial(body, group, None)
            arrays = jax.lax.fori_loop(start, end, each, arrays)
            start = end
        return arrays


def _in_device_space(tree: _Tree) -> _Tree:
    """Tell the tracer that host arrays are ordinary operands; on CPU devices this moves nothing."""
    moved: _Tree = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)
    return moved


def sum_in_order(gradients: Sequence[jax.Array]) -> jax.Array:
    """Sum of the summands in float32, first to last."""
    total = gradients[0].astype(jnp.float32)
    for gradient in gradients[1:]:
        total = total + gradient.astype(jnp.float32)
    return total


def _sum_of_squares(gradients: Sequence[jax.Array]) -> jax.Array:
    gradients = _in_device_space(gradients)
    return jnp.sum(jnp.square(sum_in_order(gradients)))[None]


def clip(gradient: jax.Array, norm: jax.Array, max_norm: jax.Array) -> jax.Array:
    """As `optax.clip_by_global_norm`: untouched below the limit, else (g / norm) * limit."""
    return jnp.where(norm < max_norm, gradient, (gradient / norm) * max_norm)


def _join_numbers(high: jax.Array, low: jax.Array, dither: jax.Array | None) -> jax.Array:
    """`split_float.join` but for the payload of a NaN, which stays a NaN.

    Arithmetic on a NaN keeps nothing that matters, and without the distinction XLA vectorises.
    (A carry may take from a NaN's upper half, but only where the lower half is not zero.)
    """
    upper = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    if dither is None:  # the carry is the sign of the lower half
        bits = upper.astype(jnp.int32) + low.astype(jnp.int32)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    lower = jax.lax.bitcast_convert_type(low, jnp.uint16).astype(jnp.uint32)
    carry = (lower + dither) & jnp.uint32(0x10000)
    return jax.lax.bitcast_convert_type((upper | lower) - carry, jnp.float32)


def _split_result(master: jax.Array, dither: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`split_float.split` of what arithmetic made, so without a NaN whose upper half is infinity.

    Hardware quiets the NaN that it makes or passes on, and `_join_numbers` makes no other.
    """
    bits = jax.lax.bitcast_convert_type(master, jnp.int32)
    is_nan = jnp.isnan(master)
    # Rounding up would carry a NaN with all upper bits set (as CUDA makes) into the sign.
    if dither is None:
        carried = jnp.where(is_nan, bits & jnp.int32(-0x10000), bits)
        high = ((carried + jnp.int32(0x8000)) >> 16).astype(jnp.uint16)
    else:
        # From unsigned bits, which are others to XLA:CPU: what two outputs share goes by memory.
        unsigned = jax.lax.bitcast_convert_type(master, jnp.uint32)
        unsigned = jnp.where(is_nan, unsigned & jnp.uint32(0xFFFF0000), unsigned)
        high = ((unsigned + dither) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(high, jnp.bfloat16), bits.astype(jnp.int16)


def _select(groups: jax.Array, candidates: list[jax.Array]) -> jax.Array:
    """Per block, the candidate of its group: groups [blocks], candidates [blocks * block] each."""
    chosen = candidates[0]
    for group in range(1, len(candidates)):
        mask = jnp.broadcast_to(
            (groups == group)[:, None], (groups.shape[0], chosen.size // groups.shape[0])
        )
        chosen = jnp.where(mask.reshape(-1), candidates[group], chosen)
    return chosen
