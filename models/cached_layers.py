"""A decoder layer that keeps keys and values, for generating tokens one at a time.

Slot s of a row's cache holds the row's token s, so rows of different lengths are padded on their
right and every row writes at its own position. Slots after a row's last token are never read.

Keys are kept rotated, with one exception: under dynamic RoPE beyond the trained length all angles
change with every token, so keys are kept as they were projected and rotated whenever they are read.
The result is that of a full forward pass over the row so far.

Letters: B rows, T tokens, D hidden, N query heads, K key-value heads, H head dim, C capacity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models.attention import attend
from models.config import ModelConfig
from models.layers import DecoderLayer
from models.rope import rotary_tables, rotate
from models.streamed import Batch


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, C, K, H] each in the compute dtype."""

    keys: jax.Array
    values: jax.Array


def init_cache(config: ModelConfig, num_rows: int, capacity: int, dtype: Any) -> LayerCache:
    """An empty cache of one layer: 2 * B * C * K * H elements."""
    shape = (num_rows, capacity, config.num_key_value_heads, config.head_dim)
    return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def max_tokens(config: ModelConfig) -> int:
    """Longest row, prompt and completion, that the model's positions are meant for.

    `max_position_embeddings`; for dynamic RoPE, whose formula starts from there, `factor` times it.
    """
    rope = config.rope_parameters
    factor = rope.factor if rope.rope_type == "dynamic" else 1.0
    return int(config.max_position_embeddings * factor)


def prefill(
    layer: DecoderLayer,
    x: jax.Array,
    batch: Batch,
    cache: LayerCache,
    *,
    window: int | None,
    attention: str,
) -> tuple[jax.Array, LayerCache]:
    """The layer over whole prompts, [B, T, D] -> [B, T, D]; fills the first T slots.

    Args:
      layer: the module, its parameters in place.
      x: residual stream, [B, T, D] with T <= C.
      batch: `positions` 0, 1, 2, ... and, with padding on the right, `segment_ids`.
      cache: the row's cache; what it held is dropped.
      window: sliding window of this layer in tokens, or None.
      attention: `chunked` or `cudnn`.
    """
    cos, sin = rotary_tables(layer.config, batch["positions"], batch.get("segment_ids"))
    q, k, v = layer.self_attn.heads(layer.input_layernorm(x))
    q, rotated = rotate(q, cos, sin), rotate(k, cos, sin)
    attended = attend(q, rotated, v, batch, window=window, implementation=attention)
    kept = k if _turns_with_length(layer.config, cache) else rotated
    cache = LayerCache(
        lax.dynamic_update_slice_in_dim(cache.keys, kept, 0, axis=1),
        lax.dynamic_update_slice_in_dim(cache.values, v, 0, axis=1),
    )
    return layer.feed_forward(x + layer.self_attn.merge_heads(attended)), cache


def decode(
    layer: DecoderLayer, x: jax.Array, batch: Batch, cache: LayerCache, *, window: int | None
) -> tuple[jax.Array, LayerCache]:
    """The layer over one more token of each row, [B, 1, D] -> [B, 1, D].

    Args:
      layer: the module, its parameters in place.
      x: residual stream, [B, 1, D].
      batch: `positions` int32 [B, 1], the token's place in its row; slots before it are filled.
      cache: the row's cache.
      window: sliding window of this layer in tokens, or None.
    """
    positions = batch["positions"]
    q, k, v = layer.self_attn.heads(layer.input_layernorm(x))
    if _turns_with_length(layer.config, cache):
        # Slots after the token take its position: the longest position tells the row's length.
        slots = jnp.arange(cache.keys.shape[1], dtype=positions.dtype)[None, :]
        cos, sin = rotary_tables(layer.config, jnp.minimum(slots, positions), None)
        own_cos, own_sin = (
            jnp.take_along_axis(table, positions[:, :, None], axis=1) for table in (cos, sin)
        )
        cache = _write(cache, k, v, positions)
        q, keys = rotate(q, own_cos, own_sin), rotate(cache.keys, cos, sin)
    else:
        cos, sin = rotary_tables(layer.config, positions, None)
        cache = _write(cache, rotate(k, cos, sin), v, positions)
        q, keys = rotate(q, cos, sin), cache.keys
    attended = _attend_to_cache(q, keys, cache.values, positions, window)
    return layer.feed_forward(x + layer.self_attn.merge_heads(attended)), cache


def _turns_with_length(config: ModelConfig, cache: LayerCache) -> bool:
    """Whether rows of this cache can grow past where dynamic RoPE begins to stretch."""
    is_dynamic = config.rope_parameters.rope_type == "dynamic"
    return is_dynamic and cache.keys.shape[1] > config.max_position_embeddings


def _write(cache: LayerCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> LayerCache:
    """Puts each row's token, [B, 1, K, H], into its slot."""
    # A scatter would touch only these slots, but XLA's CPU compiler in JAX 0.10 aborts on it under
    # the multi-output fusion that the host update needs there. Beside weights it is no cost.
    slots = jnp.arange(cache.keys.shape[1], dtype=positions.dtype)[None, :]
    is_own = (slots == positions)[:, :, None, None]
    return LayerCache(jnp.where(is_own, k, cache.keys), jnp.where(is_own, v, cache.values))


def _attend_to_cache(
    q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """Attention of [B, 1, N, H] over the slots up to `positions`; scores float32 [B, N, C]."""
    num_rows, _, num_heads, head_dim = q.shape
    num_keys = keys.shape[2]
    grouped = q.reshape(num_rows, num_keys, num_heads // num_keys, head_dim)
    scores = jnp.einsum("bkgh,bskh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    distance = positions - jnp.arange(keys.shape[1], dtype=positions.dtype)[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    scores = jnp.where(visible[:, None, None, :], scores * head_dim**-0.5, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    attended = jnp.einsum("bkgs,bskh->bkgh", shares, values, preferred_element_type=jnp.float32)
    return attended.reshape(num_rows, 1, num_heads, head_dim).astype(q.dtype)
