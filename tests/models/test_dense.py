import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from slidedp_jax.models.dense import Linear, RMSNorm


def gradients(module, x):
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: leaf.astype(x.dtype), state)

    @jax.jit
    @jax.grad
    def run(state):
        return nnx.merge(graph, state)(x).astype(jnp.float32).sum()

    pure = run(state)
    return nnx.to_pure_dict(pure)


@pytest.mark.parametrize("shape", [(1, 4096), (2, 64, 32)])
def test_gradients_per_channel_are_summed_over_tokens_in_float32(shape):
    """A bfloat16 sum of ones stalls at 256."""
    x = jnp.ones((*shape, 4), jnp.bfloat16)
    expected = np.full(4, 4096.0, np.float32)
    norm = gradients(RMSNorm(4, eps=0.0), x)
    np.testing.assert_array_equal(norm["weight"].astype(jnp.float32), expected)
    linear = gradients(Linear(4, 4, has_bias=True), x)
    np.testing.assert_array_equal(linear["bias"].astype(jnp.float32), expected)


def test_the_sum_over_tokens_is_a_float32_operation():
    """XLA may or may not widen a bfloat16 sum by itself; the program must not depend on it."""
    x = jax.ShapeDtypeStruct((1, 4096, 4), jnp.bfloat16)
    norm = RMSNorm(4, eps=1e-6)
    graph, state = nnx.split(norm)
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)

    def pull_back(state, x, dy):
        return jax.vjp(lambda s: nnx.merge(graph, s)(x), state)[1](dy)

    jaxpr = jax.make_jaxpr(pull_back)(state, x, x)
    sums = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "reduce_sum"]
    assert sums
    assert all(equation.outvars[0].aval.dtype == jnp.float32 for equation in sums)
