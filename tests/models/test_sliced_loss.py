"""The loss in two passes over slices of the vocabulary, against the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from slidedp_jax.models.sliced_loss import (
    add_to_statistics,
    log_probabilities,
    log_sums,
    no_statistics,
    slice_gradients,
)

HIDDEN, VOCAB, TOKENS, BLOCK = 12, 37, 19, 8


def draw(*, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), dtype)
    weight = jnp.asarray(scale * rng.standard_normal((VOCAB, HIDDEN)), dtype)
    targets = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    targets[::5] = -100
    return x, weight, jnp.asarray(targets)


def squared(x):
    """What stands for a norm: not linear, token by token."""
    return x * x


def in_slices(weight, rows):
    """(first row, rows) with zeros after the vocabulary's end."""
    padded = jnp.pad(weight, ((0, -VOCAB % rows), (0, 0)))
    return [(jnp.int32(first), padded[first : first + rows]) for first in range(0, VOCAB, rows)]


SIZES = {"vocab_size": VOCAB, "hidden_fn": squared, "block_tokens": BLOCK}
with_slice = plain_model.quick_jit(functools.partial(add_to_statistics, **SIZES))
gradients_of_slice = plain_model.quick_jit(functools.partial(slice_gradients, **SIZES))


def statistics_of(x, slices, targets):
    found = no_statistics(TOKENS)
    for first, rows in slices:
        found = with_slice(found, rows, first, x, targets)
    return found


def gradients_of(x, slices, targets, log_sum, coefficients):
    d_hidden, d_weight = jnp.zeros((TOKENS, HIDDEN), jnp.float32), []
    for first, rows in slices:
        zeros = jnp.zeros(rows.shape, jnp.float32)
        d_hidden, d_rows = gradients_of_slice(
            d_hidden, zeros, rows, first, x, targets, log_sum, coefficients
        )
        d_weight.append(d_rows)
    return d_hidden, np.concatenate(d_weight)


def plain_log_probabilities(hidden, weight, targets):
    logits = hidden.astype(jnp.float32) @ weight.astype(jnp.float32).T
    own = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(own, jnp.where(targets < 0, 0, targets)[:, None], axis=1)[:, 0]
    return jnp.where(targets == -100, 0.0, own)


@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize("rows", [37, 10, 1])
def test_both_passes_equal_the_plain_formula(rows, scale):
    """For an objective that is not linear in the log-probabilities: sum of -sqrt(1 - log p)."""
    x, weight, targets = draw(scale=scale)
    slices = in_slices(weight, rows)
    with jax.debug_nans(True):
        statistics = statistics_of(x, slices, targets)
    got = log_probabilities(statistics, targets)
    wanted = plain_log_probabilities(squared(x), weight, targets)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)

    def objective(hidden, weight):
        own = plain_log_probabilities(hidden, weight, targets)
        return -jnp.sum(jnp.where(targets == -100, 0.0, jnp.sqrt(1 - own)))

    coefficients = jnp.where(targets == -100, 0.0, 0.5 / jnp.sqrt(1 - got))
    d_hidden, d_weight = gradients_of(x, slices, targets, log_sums(statistics), coefficients)
    plain = plain_model.quick_jit(jax.grad(objective, argnums=(0, 1)))(squared(x), weight)
    for own, expected in zip((d_hidden, d_weight[:VOCAB]), plain, strict=True):
        assert np.linalg.norm(own - expected) <= 2e-5 * np.linalg.norm(expected)
    assert not d_weight[VOCAB:].any()


def test_bfloat16_keeps_sums_in_float32():
    """2^12 equal tokens: a bfloat16 sum over the blocks would stall far below the true value."""
    count = 4096
    x = jnp.ones((count, HIDDEN), jnp.bfloat16)
    weight, targets = jnp.zeros((VOCAB, HIDDEN), jnp.bfloat16), jnp.zeros(count, jnp.int32)
    _, d_rows = slice_gradients(
        jnp.zeros((count, HIDDEN), jnp.float32),
        jnp.zeros((VOCAB, HIDDEN), jnp.float32),
        weight,
        jnp.int32(0),
        x,
        targets,
        jnp.full(count, np.log(VOCAB), jnp.float32),
        jnp.full(count, -1.0, jnp.float32),
        vocab_size=VOCAB,
        hidden_fn=lambda x: x,
        block_tokens=2,
    )
    assert d_rows.dtype == jnp.float32
    np.testing.assert_allclose(d_rows[1], count / VOCAB, rtol=5e-3)


@pytest.mark.parametrize("wrong", [VOCAB, VOCAB + 2, -1])
def test_a_target_outside_the_vocabulary_is_loud(wrong):
    """Also one that the padding of the last slice has a row for."""
    x, weight, targets = draw()
    statistics = statistics_of(x, in_slices(weight, 10), targets.at[3].set(wrong))
    assert log_probabilities(statistics, targets.at[3].set(wrong))[3] == -np.inf
