"""Products of rows with the matrix of their group: y[p] = W[expert of p] x[p].

Which realisation computes each of the three products (forward, its derivative by the rows, that by
the weights) is `models.product_forms`' to say. `portable` needs rows in blocks that belong to one
expert (`models.expert_groups`); the others take groups of any size. Operations are those of the
rows; nothing is multiplied with every expert.

Letters: P rows, E experts, K columns in, N columns out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from slidedp_jax.models.expert_groups import row_owners
from slidedp_jax.models.product_forms import PORTABLE, Form, Forms
from slidedp_jax.models.varying import vary_like


def grouped_product(
    x: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    block: int,
    forms: Forms = PORTABLE,
) -> jax.Array:
    """Each row times the transposed matrix of its group.

    Args:
      x: [P, K], rows sorted by group.
      weights: [E, N, K], the same dtype.
      sizes: int32 [E], rows of each group, multiples of `block` that add up to P.
      block: rows of a block.
      forms: the realisation of each product.

    Returns:
      [P, N] in the dtype of `x`; products are added up in float32.
    """
    return _product(block, forms, x, vary_like(weights, x), sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    block: int, forms: Forms, x: jax.Array, weights: jax.Array, sizes: jax.Array
) -> jax.Array:
    return row_products(forms.forward, x, weights, sizes, block, contracted=2)


def _product_forward(
    block: int, forms: Forms, x: jax.Array, weights: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _product(block, forms, x, weights, sizes), (x, weights, sizes)


def _product_backward(
    block: int, forms: Forms, residuals: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes = residuals
    dx = row_products(forms.dgrad, dy, weights, sizes, block, contracted=1)
    return dx, weight_gradient(forms.wgrad, x, dy, sizes, block), None


_product.defvjp(_product_forward, _product_backward)


def row_products(
    form: Form, rows: jax.Array, weights: jax.Array, sizes: jax.Array, block: int, contracted: int
) -> jax.Array:
    """Every row times its group's matrix.

    Args:
      form: the realisation.
      rows: [P, K] or, for the derivative by the rows, [P, N].
      weights: [E, N, K].
      sizes: int32 [E].
      block: rows of a block.
      contracted: dimension of `weights` that is summed over, 2 or 1.

    Returns:
      [P, N] or [P, K] in the dtype of `rows`.
    """
    if form == "portable":
        return _block_products(rows, weights, sizes, block, contracted - 1)
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (contracted,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    return _ragged(form, rows, weights, sizes, dims)


def weight_gradient(
    form: Form, x: jax.Array, dy: jax.Array, sizes: jax.Array, block: int
) -> jax.Array:
    """Sums of outer products of each group's rows, x [P, K] and dy [P, N] -> [E, N, K]."""
    if form == "portable":
        return _block_weight_gradient(x, dy, sizes, block)
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    return _ragged(form, dy, x, sizes, dims)


def _ragged(form: Form, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, dims: Any) -> jax.Array:
    if form == "ragged_dot":
        product = lax.ragged_dot_general
    else:
        import tokamax

        product = partial(tokamax.ragged_dot_general, implementation=form)
    y: jax.Array = product(
        lhs,
        rhs,
        group_sizes=sizes,
        ragged_dot_dimension_numbers=dims,
        preferred_element_type=lhs.dtype,
    )
    return y


def _blocks(rows: jax.Array, block: int) -> jax.Array:
    return rows.reshape(-1, block, rows.shape[-1])


def _block_experts(sizes: jax.Array, num_blocks: int, block: int) -> jax.Array:
    return row_owners(sizes, block * jnp.arange(num_blocks, dtype=jnp.int32))


def _block_products(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, block: int, contracted: int
) -> jax.Array:
    """Every block times its expert's matrix, over the matrix's dimension `contracted`."""
    blocks = _blocks(rows, block)

    def one(_: None, block_and_expert: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        own, expert = block_and_expert
        matrix = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        return None, lax.dot_general(own, matrix, (((1,), (contracted,)), ((), ())))

    experts = _block_experts(sizes, blocks.shape[0], block)
    products = lax.scan(one, None, (blocks, experts))[1]
    return products.reshape(rows.shape[0], -1)


_Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Gradients so far, the sum for the expert at hand, and which one that is."""


def _block_weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    """Added up in float32: an expert's blocks follow each other, so one float32 matrix will do."""
    num_experts, columns = sizes.shape[0], (dy.shape[1], x.shape[1])
    x_blocks, dy_blocks = _blocks(x, block), _blocks(dy, block)

    def one(carry: _Sums, blocks: tuple[jax.Array, ...]) -> tuple[_Sums, None]:
        gradients, total, last = carry
        own_x, own_dy, expert = blocks
        product = lax.dot_general(
            own_dy, own_x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        total = jnp.where(expert == last, total, 0.0) + product
        gradients = lax.dynamic_update_index_in_dim(gradients, total.astype(x.dtype), expert, 0)
        return (gradients, total, expert), None

    start = (
        vary_like(jnp.zeros((num_experts, *columns), x.dtype), x, dy),
        vary_like(jnp.zeros(columns, jnp.float32), x, dy),
        vary_like(jnp.int32(-1), sizes),
    )
    experts = _block_experts(sizes, x_blocks.shape[0], block)
    (gradients, _, _), _ = lax.scan(one, start, (x_blocks, dy_blocks, experts))
    return gradients
