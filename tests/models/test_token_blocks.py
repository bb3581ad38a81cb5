"""Layers in blocks of tokens are the layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from jax.extend.core import jaxprs_in_params
from streamed_training import small_config

from slidedp_jax.models import decoder
from slidedp_jax.models.token_blocks import in_blocks
from slidedp_jax.step.layer_functions import apply_layers

ROWS, TOKENS = 2, 19


def function(params, arrays, constants):
    """Two outputs of other widths, and a parameter that one of them does not read."""
    x, y = arrays
    z = jnp.tanh(x @ params["a"]) + constants[0]
    return z, (z * y) @ params["b"]


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 7), "b": (7, 3)}
    params = {
        name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()
    }
    arrays = [jnp.asarray(rng.standard_normal((ROWS, TOKENS, n)), dtype) for n in (5, 7, 7)]
    return params, tuple(arrays[:2]), tuple(arrays[2:])


@pytest.mark.parametrize("size", [1, 4, 18, 19, 40])
def test_values_and_gradients_at_every_edge(size):
    params, arrays, constants = draw()

    def loss(run, params, arrays):
        one, other = run(params, arrays, constants)
        return jnp.sum(jnp.sin(one)) + jnp.sum(other**2)

    def whole(params, arrays, constants):
        return function(params, arrays, constants)

    def cut(params, arrays, constants):
        return in_blocks(function, size, params, arrays, constants)

    results = [
        plain_model.quick_jit(jax.value_and_grad(lambda *a, run=run: loss(run, *a), (0, 1)))(
            params, arrays
        )
        for run in (whole, cut)
    ]
    for expected, got in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_gradients_of_parameters_add_up_in_float32():
    """4,096 equal tokens, one at a time: a bfloat16 sum would stall at 256."""
    weight, x = jnp.ones((1, 1), jnp.bfloat16), jnp.ones((1, 4096, 1), jnp.bfloat16)

    def total(weight):
        (y,) = in_blocks(lambda w, a, _: (a[0] @ w,), 1, weight, (x,))
        return jnp.sum(y.astype(jnp.float32))

    assert plain_model.quick_jit(jax.grad(total))(weight)[0, 0] == 4096


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_decoders_layer(packed, bias):
    config = dataclasses.replace(
        small_config(layers=2),
        attention_bias=bias,
        mlp_bias=bias,
        layer_windows=(None, 5),
    )
    model = decoder.build(config)
    values = plain_model.random_values(model)
    trees = tuple(plain_model.model_arrays(model, values)["layers"])
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((ROWS, TOKENS, config.hidden_size)), jnp.float32)
    batch = plain_model.rows_batch(np.zeros((ROWS, TOKENS)))
    if packed:
        segments = np.where(np.arange(TOKENS) < 8, 1, np.where(np.arange(TOKENS) < 15, 2, 0))
        batch["segment_ids"] = jnp.asarray(np.tile(segments, (ROWS, 1)), jnp.int32)

    def run(fns):
        def loss(trees, x):
            return jnp.sum(jnp.sin(apply_layers(fns, trees, x, batch)))

        return plain_model.quick_jit(jax.value_and_grad(loss, (0, 1)))(trees, x)

    expected, got = run(model.layer_fns), run(model.layer_fns_for(8))
    for one, other in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
        atol = 2e-5 * float(jnp.abs(one).max())
        np.testing.assert_allclose(other, one, rtol=0, atol=atol)


def test_nothing_of_a_whole_row_is_as_wide_as_the_mlp():
    """In the traced backward of a layer, as in its forward."""
    config = dataclasses.replace(small_config(layers=1), intermediate_size=4000)
    model = decoder.build(config)
    tree = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.layers[0].shapes
    )
    tokens = 512
    x = jax.ShapeDtypeStruct((1, tokens, config.hidden_size), jnp.float32)
    batch = plain_model.rows_batch(np.zeros((1, tokens)))

    def widest(fn):
        def both(tree, x):
            y, pullback = jax.vjp(lambda t, h: fn(t, h, batch), tree, x)
            return pullback(y)

        sizes = []

        def visit(jaxpr):
            for equation in jaxpr.eqns:
                sizes.extend(v.aval.size for v in equation.outvars if v.aval.ndim == 3)
                for inner in jaxprs_in_params(equation.params):
                    visit(inner)

        visit(jax.make_jaxpr(both)(tree, x).jaxpr)
        return max(sizes)

    assert widest(model.layer_fns[0]) == tokens * 4000
    assert widest(model.layer_fns_for(16)[0]) <= 256 * 256  # a tile of scores
