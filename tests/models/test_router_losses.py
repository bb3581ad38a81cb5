"""Router losses against a count by hand, and which tokens count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from slidedp_jax.models.router_losses import (
    RouterLosses,
    counted_tokens,
    loss_of_sums,
    router_sums,
)

IGNORED = -100


def sums_of(logits, chosen, counted):
    @jax.jit
    def run(logits):
        shares = jax.nn.softmax(logits, axis=-1)
        return router_sums(logits, shares, jnp.asarray(chosen, jnp.int32), jnp.asarray(counted))

    return run(logits)


def loss_of(losses, sums):
    return plain_model.quick_jit(functools.partial(loss_of_sums, losses))(sums)


def test_a_step_of_two_layers_by_hand():
    """Two tokens count, the third is padding; two experts of which each token visits one."""
    counted = [[True, True, False]]
    even = sums_of(jnp.zeros((1, 3, 2)), [[[0], [1], [1]]], counted)
    uneven = sums_of(jnp.log(jnp.asarray([[[3.0, 1.0]] * 3])), [[[0], [0], [1]]], counted)
    loss, figures = loss_of(RouterLosses(load_balance=0.1, z=0.01), (even, uneven))
    # Visits 3 and 1 and shares 2.5 and 1.5 of four tokens and layers: 2 (3 x 2.5 + 1 x 1.5) / 16.
    assert figures["load_balance_loss"] == pytest.approx(2 * 9 / 16)
    squares = (np.log(2) ** 2 + np.log(4) ** 2) / 2
    assert figures["router_z_loss"] == pytest.approx(squares, rel=1e-6)
    assert loss == pytest.approx(0.1 * 2 * 9 / 16 + 0.01 * squares, rel=1e-6)
    assert figures["busiest_expert_share"] == 1.0
    entropy = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert figures["router_entropy"] == pytest.approx((np.log(2) + entropy) / 2, rel=1e-6)


def test_counts_have_no_derivative():
    logits = jnp.asarray([[[2.0, 1.0, 0.0]]])
    counted = jnp.asarray([[True]])

    def balance(logits, visits):
        sums = sums_of(logits, [[[0, 1]]], counted)._replace(visits=visits)
        return loss_of_sums(RouterLosses(load_balance=1.0), (sums,))[0]

    def whole(logits):
        return loss_of_sums(
            RouterLosses(load_balance=1.0), (sums_of(logits, [[[0, 1]]], counted),)
        )[0]

    constant = jax.jit(jax.grad(balance))(logits, jnp.asarray([1.0, 1.0, 0.0]))
    np.testing.assert_array_equal(jax.jit(jax.grad(whole))(logits), constant)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"segment_ids": [[1, 1, 2, 0]], "targets": [[IGNORED] * 4]}, [1, 1, 1, 0]),
        ({"targets": [[IGNORED, 5, 7, IGNORED]]}, [1, 1, 1, 1]),
        ({"targets": [[5, IGNORED, IGNORED, IGNORED]]}, [1, 1, 0, 0]),
        ({"targets": [[IGNORED] * 4]}, [0, 0, 0, 0]),
    ],
    ids=["segments", "whole row", "padded on its right", "a row that fills up"],
)
def test_which_tokens_count(batch, expected):
    arrays = {name: jnp.asarray(values, jnp.int32) for name, values in batch.items()}
    np.testing.assert_array_equal(counted_tokens(arrays)[0], np.asarray(expected, bool))


def test_no_token_at_all_gives_no_nan():
    sums = sums_of(jnp.zeros((1, 2, 2)), [[[0], [1]]], [[False, False]])
    loss, figures = loss_of(RouterLosses(load_balance=1.0, z=1.0), (sums,))
    assert loss == 0
    assert all(np.isfinite(value) for value in figures.values())
