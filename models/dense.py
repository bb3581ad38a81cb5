"""What every layer is made of: products with a matrix, norms, and the dense feed-forward block.

Flax NNX modules whose parameter paths are Hugging Face's names. Matrices keep its [out, in]
orientation and are contracted over their second dimension, so weights move between files, host
state and GPU without a transposing copy. Every module computes in the dtype of the parameters it is
given; norms work in float32.

Letters: B rows, T tokens, D hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from slidedp_jax.models.config import ModelConfig


class Linear(nnx.Module):
    """x W^T + b with W [out, in]."""

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool):
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((num_out,), jnp.float32)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
        weight = self.weight[...]
        y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        if self.bias is None:
            return y
        return _per_channel(jnp.add, y, self.bias[...])


def _per_channel(
    operation: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, channels: jax.Array
) -> jax.Array:
    """operation(x [..., D], channels [D]) rounded once to the dtype of `x`.

    Taken in float32 only for its derivative: the gradient of `channels` is a sum over all tokens,
    which JAX would otherwise add up in bfloat16.
    """
    channels = jnp.expand_dims(channels.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return operation(x.astype(jnp.float32), channels).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in float32.

    The normalised value is rounded to the input's dtype before the product with the weight, as in
    Hugging Face's implementation. With `add_one`, as in Gemma's, it is multiplied by 1 + weight and
    rounded after.
    """

    def __init__(self, width: int, *, eps: float, add_one: bool = False):
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps
        self.add_one = add_one

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., width]."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        if self.add_one:
            scale = 1.0 + self.weight[...].astype(jnp.float32)
            y = _per_channel(jnp.multiply, wide * lax.rsqrt(variance + self.eps), scale)
            return y.astype(x.dtype)
        normalised = (wide * lax.rsqrt(variance + self.eps)).astype(x.dtype)
        return _per_channel(jnp.multiply, normalised, self.weight[...])


class MLP(nnx.Module):
    """A gated unit: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, width: int):
        hidden, ffn = config.hidden_size, width
        self.gate_proj = Linear(hidden, ffn, has_bias=config.mlp_bias)
        self.up_proj = Linear(hidden, ffn, has_bias=config.mlp_bias)
        self.down_proj = Linear(ffn, hidden, has_bias=config.mlp_bias)
        self.hidden_act = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.down_proj(activation(self.hidden_act, self.gate_proj(x)) * self.up_proj(x))


def activation(name: str, x: jax.Array) -> jax.Array:
    """`ModelConfig.hidden_act` of x."""
    if name == "silu":
        return jax.nn.silu(x)
    assert name == "gelu_pytorch_tanh", name
    return jax.nn.gelu(x, approximate=True)
