import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from jax.extend.core import jaxprs_in_params
from lanes import mostly_thorough

from slidedp_jax.models.loss import cross_entropy_sum

CHUNK, HIDDEN, VOCAB = 8, 12, 37


def draw(num_tokens, *, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_tokens, HIDDEN)), jnp.float32)
    weight = jnp.asarray(scale * rng.standard_normal((VOCAB, HIDDEN)), jnp.float32)
    targets = rng.integers(0, VOCAB, num_tokens).astype(np.int32)
    targets[:: max(2, num_tokens // 3)] = -100
    return x, weight, targets


def compare(x, weight, targets, *, tolerance):
    targets = jnp.asarray(targets)
    ours = plain_model.quick_jit(
        jax.value_and_grad(
            lambda x, weight: 0.7 * cross_entropy_sum(x, weight, targets, chunk_tokens=CHUNK),
            argnums=(0, 1),
        )
    )(x, weight)
    plain = plain_model.quick_jit(
        jax.value_and_grad(
            lambda x, weight: 0.7 * plain_model.cross_entropy_sum(x, weight, targets),
            argnums=(0, 1),
        )
    )(x.astype(jnp.float32), weight.astype(jnp.float32))
    np.testing.assert_allclose(ours[0], plain[0], rtol=tolerance)
    for got, expected, like in zip(ours[1], plain[1], (x, weight), strict=True):
        assert got.dtype == like.dtype
        error = np.linalg.norm(got.astype(jnp.float32) - expected)
        assert error <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("scale", [50.0, pytest.param(1.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "num_tokens",
    mostly_thorough(
        [2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1], (CHUNK, 2 * CHUNK + 1)
    ),
)
def test_equals_full_logits_at_every_chunk_edge(num_tokens, scale):
    x, weight, targets = draw(num_tokens, scale=scale)
    compare(x, weight, targets, tolerance=1e-5)
    only_last = np.full_like(targets, -100)
    only_last[-1] = 5
    compare(x, weight, only_last, tolerance=1e-5)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_bfloat16_rounds_the_gradients_once(scale):
    x, weight, targets = draw(2 * CHUNK + 1, scale=scale)
    compare(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), targets, tolerance=6e-3)


def test_weight_gradient_sums_over_chunks_in_float32():
    """1,024 equal tokens: a bfloat16 sum over the chunks would stall far below the true value."""
    x = jnp.ones((1024, HIDDEN), jnp.bfloat16)
    weight = jnp.zeros((VOCAB, HIDDEN), jnp.bfloat16)
    targets = jnp.zeros((1024,), jnp.int32)
    one_at_a_time = functools.partial(cross_entropy_sum, chunk_tokens=1)
    gradient = plain_model.quick_jit(jax.grad(one_at_a_time, argnums=1))(x, weight, targets)
    # softmax is 1 / V everywhere; the product takes it in bfloat16.
    expected = 1024 * (1 / VOCAB)
    np.testing.assert_allclose(gradient[1].astype(jnp.float32), expected, rtol=5e-3)


def test_ignored_tokens_contribute_exactly_nothing():
    x, weight, targets = draw(11)
    ignored = jnp.full_like(jnp.asarray(targets), -100)
    with jax.debug_nans(True):
        loss, gradients = plain_model.quick_jit(
            jax.value_and_grad(
                lambda x, weight: cross_entropy_sum(x, weight, ignored, chunk_tokens=CHUNK),
                argnums=(0, 1),
            )
        )(x, weight)
    assert loss == 0.0
    assert not np.any(gradients[0])
    assert not np.any(gradients[1])


def test_loss_alone_equals_the_differentiated_loss():
    x, weight, targets = draw(19)
    targets = jnp.asarray(targets)
    alone = plain_model.quick_jit(
        lambda: cross_entropy_sum(x, weight, targets, chunk_tokens=CHUNK)
    )()
    with_gradient, _ = plain_model.quick_jit(
        lambda: jax.value_and_grad(cross_entropy_sum)(x, weight, targets, chunk_tokens=CHUNK)
    )()
    np.testing.assert_allclose(alone, with_gradient, rtol=1e-6)
    assert alone.dtype == jnp.float32


@pytest.mark.parametrize("wrong", [VOCAB, -1])
def test_a_target_outside_the_vocabulary_is_loud(wrong):
    x, weight, _ = draw(4)
    targets = jnp.asarray([1, 2, wrong, 3], jnp.int32)
    run = plain_model.quick_jit(functools.partial(cross_entropy_sum, chunk_tokens=CHUNK))
    assert np.isnan(run(x, weight, targets))


def test_three_products_and_no_array_of_all_logits():
    num_tokens, vocab = 64, 512
    shapes = [((num_tokens, 8), jnp.float32), ((vocab, 8), jnp.float32), ((num_tokens,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    jaxpr = jax.make_jaxpr(
        jax.value_and_grad(lambda *a: cross_entropy_sum(*a, chunk_tokens=8), argnums=(0, 1))
    )(*arguments)
    products, sizes = 0, []

    def visit(jaxpr):
        nonlocal products
        for equation in jaxpr.eqns:
            products += equation.primitive.name == "dot_general"
            sizes.extend(variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jaxpr.jaxpr)
    assert products == 3
    assert max(sizes) == 8 * vocab


def test_chunk_size_is_checked():
    x, weight, targets = draw(4)
    with pytest.raises(ValueError, match="loss_chunk_tokens is 0"):
        cross_entropy_sum(x, weight, jnp.asarray(targets), chunk_tokens=0)
