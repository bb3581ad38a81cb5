"""Sorting visits by expert, and products with each row's own matrix, against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slidedp_jax.models.expert_groups import (
    LARGEST_BLOCK,
    block_rows,
    collect,
    dispatch,
    group_visits,
    num_rows,
    of_rows,
)
from slidedp_jax.models.grouped_products import grouped_product

EXPERTS, WIDTH = 5, 3
sorted_visits = jax.jit(group_visits, static_argnums=(1, 2))


def choices(kind):
    """Experts of each token, [T, k]."""
    rng = np.random.default_rng(0)
    match kind:
        case "spread":
            return np.stack([rng.permutation(EXPERTS)[:2] for _ in range(30)])
        case "one_takes_all":
            return np.full((21, 1), 3)
        case "last_without_tokens":
            return rng.integers(0, EXPERTS - 1, (17, 1))
        case "one_token":
            return np.array([[4, 1, 0]])


CASES = [
    (kind, block)
    for kind in ("spread", "one_takes_all", "last_without_tokens", "one_token")
    for block in (1, 4)
]


@pytest.mark.parametrize(("kind", "block"), CASES)
def test_every_visit_has_a_row_among_its_experts(kind, block):
    chosen = choices(kind)
    groups = sorted_visits(jnp.asarray(chosen, jnp.int32), EXPERTS, block)
    slots, sources, sizes = map(np.asarray, groups)
    assert sources.shape == (num_rows(chosen.size, EXPERTS, block),)
    assert sizes.sum() == sources.size
    assert not (sizes % block).any()
    # A visit's row says whose it is, and lies in its expert's group; all other rows are padding.
    np.testing.assert_array_equal(sources[slots].reshape(-1), np.arange(chosen.size))
    owners = np.repeat(np.arange(EXPERTS), sizes)
    np.testing.assert_array_equal(owners[slots], chosen)
    assert (sources == chosen.size).sum() == sources.size - chosen.size
    # Within an expert tokens keep their order.
    for expert in range(EXPERTS):
        of_expert = sources[owners == expert]
        of_expert = of_expert[of_expert < chosen.size]
        assert (np.diff(of_expert) > 0).all()


@functools.partial(jax.jit, static_argnums=0)
def value_and_pulled_back(function, value, groups, back):
    got, pullback = jax.vjp(lambda v: function(v, groups), value)
    return got, pullback(back)[0]


@pytest.mark.parametrize("kind", ["spread", "one_takes_all"])
def test_rows_of_tokens_and_back_with_their_derivatives(kind):
    chosen = choices(kind)
    groups = sorted_visits(jnp.asarray(chosen, jnp.int32), EXPERTS, 4)
    rng = np.random.default_rng(1)
    num_rows_, num_tokens = groups.sources.size, chosen.shape[0]
    x = rng.standard_normal((num_tokens, WIDTH)).astype(np.float32)
    y = rng.standard_normal((num_rows_, WIDTH)).astype(np.float32)
    values = rng.standard_normal(chosen.shape).astype(np.float32)
    # Each is linear: a matrix made of NumPy indices, and its transpose for the derivative.
    to_rows = np.zeros((num_rows_, num_tokens), np.float32)
    to_rows[np.asarray(groups.slots), np.arange(num_tokens)[:, None]] = 1
    visits = np.zeros((num_rows_, chosen.size), np.float32)
    visits[np.asarray(groups.slots).reshape(-1), np.arange(chosen.size)] = 1
    for function, matrix, value in (
        (dispatch, to_rows, x),
        (collect, to_rows.T, y),
        (of_rows, visits, values),
    ):
        flat = value.reshape(matrix.shape[1], -1)
        shape = jax.eval_shape(function, value, groups).shape
        back = rng.standard_normal(shape).astype(np.float32)
        got, found = value_and_pulled_back(function, value, groups, back)
        np.testing.assert_allclose(got.reshape(matrix.shape[0], -1), matrix @ flat, rtol=1e-6)
        expected = matrix.T @ back.reshape(matrix.shape[0], -1)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def product_and_gradients(product, x, weights, dy):
    @jax.jit
    def run(x, weights, dy):
        y, pullback = jax.vjp(product, x, weights)
        return (y, *pullback(dy.astype(y.dtype)))

    return run(x, weights, dy)


@pytest.mark.parametrize(("kind", "block"), CASES)
def test_grouped_products_are_each_rows_own(kind, block):
    chosen = choices(kind)
    groups = sorted_visits(jnp.asarray(chosen, jnp.int32), EXPERTS, block)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((groups.sources.size, WIDTH)).astype(np.float32)
    x[np.asarray(groups.sources) == chosen.size] = 0
    weights = rng.standard_normal((EXPERTS, 7, WIDTH)).astype(np.float32)
    dy = rng.standard_normal((x.shape[0], 7)).astype(np.float32)
    owners = np.repeat(np.arange(EXPERTS), np.asarray(groups.sizes))
    y, dx, dw = product_and_gradients(
        lambda x, w: grouped_product(x, w, groups.sizes, block=block), x, weights, dy
    )
    np.testing.assert_allclose(y, np.einsum("pk,pnk->pn", x, weights[owners]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        dx, np.einsum("pn,pnk->pk", dy, weights[owners]), rtol=1e-5, atol=1e-5
    )
    for expert in range(EXPERTS):
        own = owners == expert
        np.testing.assert_allclose(dw[expert], dy[own].T @ x[own], rtol=1e-5, atol=1e-5)


def test_weight_gradients_add_up_in_float32():
    """A bfloat16 sum of ones stalls at 256; blocks of 4 rows are 1024 summands here."""
    x, dy = jnp.ones((4096, 1), jnp.bfloat16), jnp.ones((4096, 2), jnp.bfloat16)
    weights = jnp.ones((2, 2, 1), jnp.bfloat16)
    sizes = jnp.asarray([4096, 0], jnp.int32)
    _, _, dw = product_and_gradients(
        lambda x, w: grouped_product(x, w, sizes, block=4), x, weights, dy
    )
    assert dw.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(dw, np.float32)[:, :, 0], [[4096, 4096], [0, 0]])


@pytest.mark.parametrize(
    ("visits", "experts", "block"),
    [(8, 128, 8), (160, 6, 8), (262_144, 64, 512), (524_288, 128, 512), (2**24, 8, LARGEST_BLOCK)],
)
def test_blocks_pad_by_an_eighth_at_most_where_there_is_much(visits, experts, block):
    assert block_rows(visits, experts) == block
    if visits > 8 * 8 * experts:
        assert num_rows(visits, experts, block) <= 1.125 * visits
