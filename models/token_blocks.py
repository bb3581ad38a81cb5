"""Functions that treat each token by itself, in blocks of tokens.

Of a long row, what a layer computes between its attention and its ends (norms, projections, the
MLP) is many times as large as its inputs. In blocks it exists for some tokens at a time, forward
and backward: backward computes a block again from its inputs. Gradients of the parameters add up
over blocks in float32 and are rounded once.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Arrays = tuple[jax.Array, ...]

TokenFn = Callable[[Any, Arrays, Arrays], Arrays]
"""(params, arrays [B, T, ...], constants [B, T, ...]) -> arrays [B, T, ...]; any T."""


def in_blocks(
    function: TokenFn, block_tokens: int, params: Any, arrays: Arrays, constants: Arrays = ()
) -> Arrays:
    """`function(params, arrays, constants)`, so many tokens of each row at a time.

    Args:
      function: what it gives of a token depends on that token alone. It must decide nothing that
        backward may not decide again (`models.named_results`).
      block_tokens: tokens of a block; the last one of a row may be shorter.
      params: pytree of arrays.
      arrays: what is differentiated.
      constants: what is not.
    """
    if block_tokens >= arrays[0].shape[1]:
        return function(params, arrays, constants)
    outputs: Arrays = _in_blocks(function, block_tokens, params, arrays, constants)
    return outputs


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_blocks(
    function: TokenFn, size: int, params: Any, arrays: Arrays, constants: Arrays
) -> Arrays:
    like = jax.eval_shape(function, params, arrays, constants)
    start = tuple(jnp.zeros(one.shape, one.dtype) for one in like)

    def visit(carried: Arrays, inputs: tuple[Arrays, Arrays], first: jax.Array) -> Arrays:
        return _written(carried, function(params, *inputs), first)

    outputs: Arrays = _over_blocks(visit, start, (arrays, constants), size)
    return outputs


def _forward(
    function: TokenFn, size: int, params: Any, arrays: Arrays, constants: Arrays
) -> tuple[Arrays, tuple[Any, Arrays, Arrays]]:
    outputs = _in_blocks(function, size, params, arrays, constants)
    return outputs, (params, arrays, constants)


def _backward(
    function: TokenFn, size: int, inputs: tuple[Any, Arrays, Arrays], d_outputs: Arrays
) -> tuple[Any, Arrays, tuple[None, ...]]:
    params, arrays, constants = inputs

    def visit(
        carried: tuple[Any, Arrays], inputs: tuple[Arrays, Arrays, Arrays], first: jax.Array
    ) -> tuple[Any, Arrays]:
        own, own_constants, d_own = inputs
        d_params, d_arrays = carried
        pullback = jax.vjp(lambda p, a: function(p, a, own_constants), params, own)[1]
        more, d_some = pullback(d_own)
        d_params = jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), d_params, more
        )
        return d_params, _written(d_arrays, d_some, first)

    start = (
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
        tuple(jnp.zeros_like(array) for array in arrays),
    )
    d_params, d_arrays = _over_blocks(visit, start, (arrays, constants, d_outputs), size)
    rounded = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), d_params, params)
    return rounded, d_arrays, (None,) * len(constants)


_in_blocks.defvjp(_forward, _backward)


def _over_blocks(
    visit: Callable[[Any, Any, jax.Array], Any], carried: Any, inputs: Any, size: int
) -> Any:
    """`visit(carried, blocks of all inputs, first token)` in turn; written in place by XLA."""
    num_tokens = jax.tree.leaves(inputs)[0].shape[1]
    num_full, remainder = divmod(num_tokens, size)

    def cut(first: jax.Array, count: int) -> Any:
        return jax.tree.map(
            lambda array: lax.dynamic_slice_in_dim(array, first, count, axis=1), inputs
        )

    def step(carried: Any, number: jax.Array) -> tuple[Any, None]:
        first = number * size
        return visit(carried, cut(first, size), first), None

    carried, _ = lax.scan(step, carried, jnp.arange(num_full, dtype=jnp.int32))
    if remainder:
        first = jnp.int32(num_full * size)
        carried = visit(carried, cut(first, remainder), first)
    return carried


def _written(whole: Arrays, blocks: Arrays, first: jax.Array) -> Arrays:
    return tuple(
        lax.dynamic_update_slice_in_dim(array, block, first, axis=1)
        for array, block in zip(whole, blocks, strict=True)
    )
