"""A decoder layer that keeps keys and values, for generating tokens one at a time.

Slot s of a row's cache holds the row's token s, so rows of different lengths are padded on their
right and every row writes at its own position. Slots after a row's last token are never read.

Keys are kept with their positions applied, and each token gets what a full forward pass over the
row so far would give it. That holds up to `max_position_embeddings`, where rows must end: beyond
it, dynamic RoPE turns all earlier tokens anew with every token, so that not only keys but all
hidden states above the first layer change, and no cache can hold them.

Letters: B rows, T tokens, D hidden, N query heads, K key-value heads, H head dim, C capacity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from slidedp_jax.models.attention import attend
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.layers import DecoderLayer
from slidedp_jax.models.rope import rotary_tables
from slidedp_jax.models.streamed import Batch


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, C, K, H] each in the compute dtype."""

    keys: jax.Array
    values: jax.Array


def init_cache(config: ModelConfig, num_rows: int, capacity: int, dtype: Any) -> LayerCache:
    """An empty cache of one layer: 2 * B * C * K * H elements.

    Raises:
      ValueError: the capacity is beyond `max_position_embeddings`.
    """
    if capacity > config.max_position_embeddings:
        raise ValueError(
            f"capacity is {capacity}, but rows must end at max_position_embeddings "
            f"({config.max_position_embeddings})."
        )
    shape = (num_rows, capacity, config.num_key_value_heads, config.head_dim)
    return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


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
    q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
    attended = attend(q, k, v, batch, window=window, implementation=attention)
    cache = LayerCache(
        lax.dynamic_update_slice_in_dim(cache.keys, k, 0, axis=1),
        lax.dynamic_update_slice_in_dim(cache.values, v, 0, axis=1),
    )
    return layer.after_attention(x, attended)[0], cache


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
    cos, sin = rotary_tables(layer.config, positions, None)
    q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
    cache = _write(cache, k, v, positions)
    attended = _attend_to_cache(q, cache, positions, window)
    return layer.after_attention(x, attended)[0], cache


def _write(cache: LayerCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> LayerCache:
    """Puts each row's token, [B, 1, K, H], into its slot."""
    # A scatter would touch only these slots, but XLA's CPU compiler in JAX 0.10 aborts on it under
    # the multi-output fusion that the host update needs there. Beside weights it is no cost.
    slots = jnp.arange(cache.keys.shape[1], dtype=positions.dtype)[None, :]
    is_own = (slots == positions)[:, :, None, None]
    return LayerCache(jnp.where(is_own, k, cache.keys), jnp.where(is_own, v, cache.values))


def _attend_to_cache(
    q: jax.Array, cache: LayerCache, positions: jax.Array, window: int | None
) -> jax.Array:
    """Attention of [B, 1, N, H] over the slots up to `positions`; scores float32 [B, N, C]."""
    keys, values = cache
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
