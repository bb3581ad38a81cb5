"""Flax NNX modules whose parameter paths are the Hugging Face names within a layer.

What they are made of is in `models.dense` and `models.experts`. Every module computes in the dtype
of the parameters it is given; rotary embeddings work in float32.

Letters: B rows, T tokens, D hidden, F feed-forward, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from slidedp_jax.models.attention import attend
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.dense import MLP, Linear, RMSNorm
from slidedp_jax.models.experts import ResolveForms, Routing, SparseMLP, always_portable
from slidedp_jax.models.rope import rotary_tables, rotate
from slidedp_jax.models.streamed import Batch
from slidedp_jax.models.varying import vary_like


class Embedding(nnx.Module):
    """Rows of a [V, D] table by token id, times a number where the family has one."""

    def __init__(self, config: ModelConfig):
        shape = config.vocab_size, config.hidden_size
        self.weight = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.scale = config.hidden_size**0.5 if config.scale_embeddings else None

    def __call__(self, ids: jax.Array, scale_dtype: Any = None) -> jax.Array:
        """int32 [B, T] -> [B, T, D]; an id outside the table gives NaN.

        `scale_dtype` is what the scale is rounded to; None: the table's.
        """
        weight = self.weight[...]
        rows = _look_up(vary_like(weight, ids), ids)
        if self.scale is None:
            return rows
        scale = jnp.asarray(self.scale, rows.dtype if scale_dtype is None else scale_dtype)
        return rows * scale.astype(rows.dtype)


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
        normed = (head_dim, head_dim) if config.qk_norm_per_head else (queries, keys)
        self.q_norm = _norm(config, normed[0]) if config.qk_norm else None
        self.k_norm = _norm(config, normed[1]) if config.qk_norm else None
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
        q = self._heads(self.q_proj, self.q_norm, x)
        k = self._heads(self.k_proj, self.k_norm, x)
        v = self._heads(self.v_proj, None, x)
        if self.q_norm is not None and self.k_norm is not None and self.config.qk_norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.query_pre_attn_scalar is not None:
            # Attention divides by the root of H.
            factor = (self.config.head_dim / self.config.query_pre_attn_scalar) ** 0.5
            q = (q.astype(jnp.float32) * factor).astype(q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _heads(self, project: Linear, norm: RMSNorm | None, x: jax.Array) -> jax.Array:
        """One projection in heads, with what is done to all heads of a token at once."""
        config, y = self.config, project(x)
        if norm is not None and not config.qk_norm_per_head:
            y = norm(y)
        if config.clip_qkv is not None:
            y = jnp.clip(y, -config.clip_qkv, config.clip_qkv)
        return y.reshape(*x.shape[:2], -1, config.head_dim)

    def merge_heads(self, attended: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D] through the output projection."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward block, each with a residual connection.

    Where a family normalises their results too, `post_attention_layernorm` is the norm after
    attention; otherwise it is the one before the feed-forward block. Both are Hugging Face's names.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        sparse: bool,
        resolve_forms: ResolveForms = always_portable,
    ):
        self.self_attn = Attention(config)
        self.mlp = SparseMLP(config) if sparse else MLP(config, config.intermediate_size)
        hidden, after = config.hidden_size, config.norms_after
        self.input_layernorm = _norm(config, hidden)
        self.post_attention_layernorm = _norm(config, hidden)
        self.pre_feedforward_layernorm = _norm(config, hidden) if after else None
        self.post_feedforward_layernorm = _norm(config, hidden) if after else None
        self.config = config
        self.resolve_forms = resolve_forms

    def __call__(
        self, x: jax.Array, batch: Batch, *, window: int | None, attention: str
    ) -> tuple[jax.Array, Routing | None]:
        """[B, T, D] -> [B, T, D], and how a sparse layer's tokens were routed.

        Args:
          x: residual stream, [B, T, D].
          batch: see `models.streamed.Batch`; positions and segments are read.
          window: sliding window of this layer in tokens, or None.
          attention: `chunked` or `cudnn`.
        """
        cos, sin = rotary_tables(self.config, batch["positions"], batch.get("segment_ids"))
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        attended = attend(q, k, v, batch, window=window, implementation=attention)
        return self.after_attention(x, attended)

    def after_attention(
        self, x: jax.Array, attended: jax.Array
    ) -> tuple[jax.Array, Routing | None]:
        """The rest of the layer, [B, T, D], and the routing in it.

        Args:
          x: the layer's input, [B, T, D].
          attended: what attention gave, [B, T, N, H].
        """
        merged = self.self_attn.merge_heads(attended)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + merged
            y, routing = self._feed_forward(self.post_attention_layernorm(x))
            return x + y, routing
        x = x + self.post_attention_layernorm(merged)
        y, routing = self._feed_forward(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y), routing

    def _feed_forward(self, normed: jax.Array) -> tuple[jax.Array, Routing | None]:
        if isinstance(self.mlp, SparseMLP):
            return self.mlp(normed, self.resolve_forms)
        return self.mlp(normed), None


def _norm(config: ModelConfig, width: int) -> RMSNorm:
    return RMSNorm(width, eps=config.rms_norm_eps, add_one=config.norms_add_one)


class _FinalNorm(nnx.Module):
    """The final norm at its path."""

    def __init__(self, config: ModelConfig):
        self.norm = _norm(config, config.hidden_size)


class Head(nnx.Module):
    """Final norm and, untied, the output projection, at their Hugging Face paths."""

    def __init__(self, config: ModelConfig):
        self.model = _FinalNorm(config)
        tied = config.tie_word_embeddings
        self.lm_head = (
            None if tied else Linear(config.hidden_size, config.vocab_size, has_bias=False)
        )

    def normalise(self, x: jax.Array) -> jax.Array:
        """The final norm, [B, T, D] -> [B, T, D]."""
        return self.model.norm(x)
