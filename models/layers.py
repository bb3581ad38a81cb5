"""Flax NNX modules whose parameter paths are the Hugging Face names within a layer.

Matrices keep Hugging Face's [out, in] orientation and are contracted over their second dimension,
so weights move between files, host state and GPU without a transposing copy. Every module computes
in the dtype of the parameters it is given; norms and rotary embeddings work in float32.

Letters: B rows, T tokens, D hidden, F feed-forward, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from slidedp_jax.models.attention import attend
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.rope import rotary_tables, rotate
from slidedp_jax.models.streamed import Batch
from slidedp_jax.models.varying import vary_like


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


class Embedding(nnx.Module):
    """Rows of a [V, D] table by token id."""

    def __init__(self, vocab_size: int, width: int):
        self.weight = nnx.Param(jnp.zeros((vocab_size, width), jnp.float32))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """int32 [B, T] -> [B, T, D]; an id outside the table gives NaN."""
        weight = self.weight[...]
        return _look_up(vary_like(weight, ids), ids)


@jax.custom_vjp
def _look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _look_up_forward(
    table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up(table, ids), (ids, jnp.zeros((table.shape[0], 0), table.dtype))


def _look_up_backward(
    residuals: tuple[jax.Array, jax.Array], d_rows: jax.Array
) -> tuple[jax.Array, None]:
    # A frequent token's gradient is a sum of thousands of rows: bfloat16 would stop growing.
    ids, like_table = residuals
    zeros = jnp.zeros((like_table.shape[0], d_rows.shape[-1]), jnp.float32)
    summed = vary_like(zeros, d_rows, ids).at[ids].add(d_rows.astype(jnp.float32), mode="drop")
    return summed.astype(like_table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in float32.

    The normalised value is rounded to the input's dtype before the product with the weight, as in
    Hugging Face's implementation.
    """

    def __init__(self, width: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., width]."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normalised = (wide * lax.rsqrt(variance + self.eps)).astype(x.dtype)
        return _per_channel(jnp.multiply, normalised, self.weight[...])


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: ModelConfig):
        hidden, head_dim = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * head_dim
        keys = config.num_key_value_heads * head_dim
        self.q_proj = Linear(hidden, queries, has_bias=config.attention_bias)
        self.k_proj = Linear(hidden, keys, has_bias=config.attention_bias)
        self.v_proj = Linear(hidden, keys, has_bias=config.attention_bias)
        self.o_proj = Linear(queries, hidden, has_bias=config.attention_output_bias)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.config = config

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H], positions applied.

        Args:
          x: [B, T, D], normalised.
          cos: float32 [B, T, H / 2] of `models.rope.rotary_tables`.
          sin: float32 [B, T, H / 2].
        """
        heads = (*x.shape[:2], -1, self.config.head_dim)
        q = self.q_proj(x).reshape(heads)
        k = self.k_proj(x).reshape(heads)
        v = self.v_proj(x).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge_heads(self, attended: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D] through the output projection."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, ffn, has_bias=config.mlp_bias)
        self.up_proj = Linear(hidden, ffn, has_bias=config.mlp_bias)
        self.down_proj = Linear(ffn, hidden, has_bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward block, each with a residual connection."""

    def __init__(self, config: ModelConfig):
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.config = config

    def __call__(
        self, x: jax.Array, batch: Batch, *, window: int | None, attention: str
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D].

        Args:
          x: residual stream, [B, T, D].
          batch: see `models.streamed.Batch`; positions and segments are read.
          window: sliding window of this layer in tokens, or None.
          attention: `chunked` or `cudnn`.
        """
        cos, sin = rotary_tables(self.config, batch["positions"], batch.get("segment_ids"))
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        attended = attend(q, k, v, batch, window=window, implementation=attention)
        return self.feed_forward(x + self.self_attn.merge_heads(attended))

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """The second half of the layer, [B, T, D] -> [B, T, D]."""
        return x + self.mlp(self.post_attention_layernorm(x))


class _Norm(nnx.Module):
    """The final norm at its path."""

    def __init__(self, config: ModelConfig):
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Head(nnx.Module):
    """Final norm and, untied, the output projection, at their Hugging Face paths."""

    def __init__(self, config: ModelConfig):
        self.model = _Norm(config)
        tied = config.tie_word_embeddings
        self.lm_head = (
            None if tied else Linear(config.hidden_size, config.vocab_size, has_bias=False)
        )

    def normalise(self, x: jax.Array) -> jax.Array:
        """The final norm, [B, T, D] -> [B, T, D]."""
        return self.model.norm(x)
