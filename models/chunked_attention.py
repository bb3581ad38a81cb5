"""Exact causal attention on any backend without a score matrix over the whole row.

The online-softmax scheme of FlashAttention (arXiv:2205.14135, and arXiv:2307.08691 for the
backward pass) written as one `lax.scan` over the pairs (query block, key block) that causality and
the sliding window leave visible. The list of pairs is static, so no block is computed in vain and
the loop has a known length: a data-dependent one makes a GPU program wait for the host each turn.

Memory beyond inputs and outputs: float32 accumulators of the size of q (forward) or of q, k and v
(backward), and a few float32 tiles [B, N, block, block]. Time is that of the matrix products run
tile by tile; on a GPU a fused kernel is several times faster, see `models.attention`.

Letters: B rows, T tokens, N query heads, K key-value heads, G = N / K, H head dim, c blocks of
size s.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from slidedp_jax.models.named_results import ATTENTION
from slidedp_jax.models.varying import vary_like

_HIDDEN = -1e30
# The running maximum starts half way: a query that sees nothing then sums exp(-5e29) = 0 exactly.
_LOWEST_MAXIMUM = _HIDDEN / 2


def visible_block_pairs(
    num_tokens: int, *, block: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the query and key blocks that share at least one visible pair of tokens.

    Args:
      num_tokens: length of the row, T.
      block: tokens per block.
      window: sliding window in tokens, or None.

    Returns:
      Two int32 arrays of equal length, query blocks ascending.
    """
    queries, keys = [], []
    for query in range(-(-num_tokens // block)):
        oldest = 0 if window is None else max(query * block - window + 1, 0)
        for key in range(oldest // block, query + 1):
            queries.append(query)
            keys.append(key)
    return np.asarray(queries, np.int32), np.asarray(keys, np.int32)


def chunked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    window: int | None = None,
    block: int = 256,
) -> jax.Array:
    """Causal softmax(q k^T / sqrt(H)) v within each segment.

    Scores, softmax and sums are float32; the matrix products take the inputs' dtype.

    Args:
      q: [B, T, N, H].
      k: [B, T, K, H], N a multiple of K.
      v: [B, T, K, H].
      segment_ids: int32 [B, T], 0 for padding, or None when every row is one document.
      window: a query sees itself and the `window - 1` tokens before it; None sees all before it.
      block: tokens per block.

    Returns:
      [B, T, N, H] in the dtype of `q`; exactly 0 where the segment is 0.
    """
    return _attention(window, min(block, q.shape[1]), q, k, v, segment_ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    window: int | None,
    block: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
) -> jax.Array:
    return _forward(window, block, q, k, v, segment_ids)[0]


class _Blocks(NamedTuple):
    """Inputs cut into blocks, blocks first; a tail of zeros fills the last one."""

    q: jax.Array  # [c, B, K, G, s, H]
    k: jax.Array  # [c, B, K, s, H]
    v: jax.Array  # [c, B, K, s, H]
    segments: jax.Array | None  # [c, B, s]


_Three = tuple[jax.Array, jax.Array, jax.Array]
_Pair = tuple[jax.Array, jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]
"""q, k, v, segment_ids, the output, and the logarithm of the sum of its weights."""


def _forward(
    window: int | None,
    block: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, _Residuals]:
    num_tokens, head_dim = q.shape[1], q.shape[3]
    blocks = _cut_inputs(q, k, v, segment_ids, block)

    def visit(carry: _Three, pair: _Pair) -> tuple[_Three, None]:
        query, key = pair
        maximum, total, weighted = (_get(array, query) for array in carry)
        scores = _scores(blocks, query, key, window)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        weights = jnp.exp(scores - new_maximum[..., None])
        shrink = jnp.exp(maximum - new_maximum)
        values = _get(blocks.v, key)
        update = _dot("bkgqs,bksh->bkgqh", weights.astype(values.dtype), values)
        new_total = total * shrink + weights.sum(axis=-1)
        new_weighted = weighted * shrink[..., None] + update
        maxima, totals, sums = carry
        return (
            _set(maxima, query, new_maximum),
            _set(totals, query, new_total),
            _set(sums, query, new_weighted),
        ), None

    shape = blocks.q.shape[:-1]
    start = (
        vary_like(jnp.full(shape, _LOWEST_MAXIMUM, jnp.float32), q, k, v),
        vary_like(jnp.zeros(shape, jnp.float32), q, k, v),
        vary_like(jnp.zeros((*shape, head_dim), jnp.float32), q, k, v),
    )
    pairs: Any = visible_block_pairs(num_tokens, block=block, window=window)
    (maximum, total, weighted), _ = lax.scan(visit, start, pairs)

    total = jnp.where(total > 0, total, 1.0)
    out = _join((weighted / total[..., None]).astype(q.dtype), num_tokens)
    # Where these stay from forward to backward, no block is computed again.
    out, log_total = checkpoint_name((out, maximum + jnp.log(total)), ATTENTION)
    return out, (q, k, v, segment_ids, out, log_total)


def _backward(
    window: int | None, block: int, residuals: _Residuals, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segment_ids, out, log_total = residuals
    num_tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    blocks = _cut_inputs(q, k, v, segment_ids, block)
    d_out_blocks = _cut_queries(d_out, groups, block)
    product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    delta = _cut_queries(product.sum(axis=-1, keepdims=True), groups, block)[..., 0]
    scale = q.shape[3] ** -0.5

    def visit(carry: _Three, pair: _Pair) -> tuple[_Three, None]:
        d_q, d_k, d_v = carry
        query, key = pair
        queries, keys, values = (
            _get(blocks.q, query),
            _get(blocks.k, key),
            _get(blocks.v, key),
        )
        d_row = _get(d_out_blocks, query)
        weights = jnp.exp(_scores(blocks, query, key, window) - _get(log_total, query)[..., None])
        d_weights = _dot("bkgqh,bksh->bkgqs", d_row, values)
        d_scores = weights * (d_weights - _get(delta, query)[..., None]) * scale
        d_scores = d_scores.astype(q.dtype)
        d_q = _add(d_q, query, _dot("bkgqs,bksh->bkgqh", d_scores, keys))
        d_k = _add(d_k, key, _dot("bkgqs,bkgqh->bksh", d_scores, queries))
        d_v = _add(d_v, key, _dot("bkgqs,bkgqh->bksh", weights.astype(v.dtype), d_row))
        return (d_q, d_k, d_v), None

    def zeros(array: jax.Array) -> jax.Array:
        return vary_like(jnp.zeros(array.shape, jnp.float32), q, k, v, d_out)

    start = zeros(blocks.q), zeros(blocks.k), zeros(blocks.v)
    pairs: Any = visible_block_pairs(num_tokens, block=block, window=window)
    (d_q, d_k, d_v), _ = lax.scan(visit, start, pairs)
    # Keys are queries with one head per group.
    d_k, d_v = d_k[:, :, :, None], d_v[:, :, :, None]
    d_q, d_k, d_v = (_join(gradient, num_tokens) for gradient in (d_q, d_k, d_v))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


def _cut_inputs(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, block: int
) -> _Blocks:
    groups = q.shape[2] // k.shape[2]
    segments = None
    if segment_ids is not None:
        padded = _pad_tokens(segment_ids, block)
        segments = padded.reshape(padded.shape[0], -1, block).transpose(1, 0, 2)
    return _Blocks(
        q=_cut_queries(q, groups, block),
        k=_cut_queries(k, 1, block)[:, :, :, 0],
        v=_cut_queries(v, 1, block)[:, :, :, 0],
        segments=segments,
    )


def _pad_tokens(array: jax.Array, block: int) -> jax.Array:
    missing = -array.shape[1] % block
    return jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))


def _cut_queries(array: jax.Array, groups: int, block: int) -> jax.Array:
    """[B, T, N, H] -> [c, B, K, G, s, H]."""
    padded = _pad_tokens(array, block)
    num_rows, _, num_heads, width = padded.shape
    cut = padded.reshape(num_rows, -1, block, num_heads // groups, groups, width)
    return cut.transpose(1, 0, 3, 4, 2, 5)


def _join(blocks: jax.Array, num_tokens: int) -> jax.Array:
    """[c, B, K, G, s, H] -> [B, T, N, H]."""
    _, num_rows, num_keys, groups, _, width = blocks.shape
    tokens = blocks.transpose(1, 0, 4, 2, 3, 5)
    return tokens.reshape(num_rows, -1, num_keys * groups, width)[:, :num_tokens]


def _scores(blocks: _Blocks, query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    """Scaled scores of one pair of blocks, float32 [B, K, G, s, s], hidden ones at -1e30."""
    queries, keys = _get(blocks.q, query), _get(blocks.k, key)
    block, head_dim = queries.shape[-2:]
    within = jnp.arange(block, dtype=jnp.int32)
    distance = (query - key) * block + within[:, None] - within[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible[None]
    if blocks.segments is not None:
        of_query, of_key = _get(blocks.segments, query), _get(blocks.segments, key)
        same = of_query[:, :, None] == of_key[:, None, :]
        visible = visible & same & (of_query > 0)[:, :, None]
    scores = _dot("bkgqh,bksh->bkgqs", queries, keys) * head_dim**-0.5
    return jnp.where(visible[:, None, None], scores, _HIDDEN)


def _dot(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def _get(blocks: jax.Array, index: jax.Array) -> jax.Array:
    block: jax.Array = lax.dynamic_index_in_dim(blocks, index, axis=0, keepdims=False)
    return block


def _set(blocks: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    changed: jax.Array = lax.dynamic_update_index_in_dim(blocks, value, index, axis=0)
    return changed


def _add(blocks: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return _set(blocks, index, _get(blocks, index) + value)
