"""Rotary position embeddings in float32, for every kind that dense checkpoints use.

A head's first half is rotated against its second half (Hugging Face's layout, not the interleaved
one). Letters: B rows, T tokens, N heads, H head dim.

Sources: default, RoFormer (arXiv:2104.09864); linear, position interpolation (arXiv:2306.15595);
dynamic, "dynamically scaled NTK-aware RoPE" (r/LocalLLaMA, 2023); yarn, arXiv:2309.00071; llama3,
the Llama 3.1 reference code. Frequencies are computed in float64 and rounded once.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.rope_parameters import RopeParameters


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position, float32 [H / 2].

    For the dynamic kind these hold up to `max_position_embeddings` tokens; see `rotary_tables`.
    """
    rope, dim = config.rope_parameters, config.head_dim
    plain = rope.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.rope_type:
        case "default" | "dynamic":
            result = plain
        case "linear":
            result = plain / rope.factor
        case "llama3":
            result = _llama3_frequencies(plain, rope)
        case "yarn":
            result = _yarn_frequencies(plain, rope, dim)
    return result.astype(np.float32)


def attention_factor(rope: RopeParameters) -> float:
    """Multiplier of cos and sin; 1 but for yarn."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return _yarn_mscale(rope.factor, 1.0)


def rotary_tables(
    config: ModelConfig, positions: jax.Array, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every token's angles.

    The dynamic kind stretches its base with the length of the document a token belongs to, so a
    document gets the same embedding alone, beside others in a batch, or packed with them.

    Args:
      config: the model's configuration.
      positions: int32 [B, T], below T.
      segment_ids: int32 [B, T] as in `models.streamed.Batch`, or None when rows are documents.

    Returns:
      cos, sin: float32 [B, T, H / 2].
    """
    frequencies = jnp.asarray(inverse_frequencies(config))
    is_dynamic = config.rope_parameters.rope_type == "dynamic"
    if is_dynamic and positions.shape[1] > config.max_position_embeddings:
        frequencies = _dynamic_frequencies(config, _document_lengths(positions, segment_ids))
    else:
        frequencies = frequencies[None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies
    scale = attention_factor(config.rope_parameters)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the heads of every token by its angles, in float32.

    Args:
      x: [B, T, N, H], any float dtype.
      cos: float32 [B, T, H / 2].
      sin: float32 [B, T, H / 2].

    Returns:
      [B, T, N, H] in the dtype of `x`.
    """
    # Elementwise over [2, H / 2] rather than split and joined: XLA then writes no halves to memory,
    # and the derivative has the same form.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    cos, sin = cos[:, :, None, None, :], sin[:, :, None, None, :]
    signs = jnp.asarray([[-1.0], [1.0]], jnp.float32).reshape(1, 1, 1, 2, 1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * (sin * signs)
    return rotated.reshape(x.shape).astype(x.dtype)


def _llama3_frequencies(plain: np.ndarray, rope: RopeParameters) -> np.ndarray:
    """Stretches long wavelengths by `factor`, keeps short ones, blends in between."""
    assert rope.original_max_position_embeddings is not None
    rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / rope.factor)


def _yarn_frequencies(plain: np.ndarray, rope: RopeParameters, dim: int) -> np.ndarray:
    """Blends stretched and plain frequencies linearly in the index of the dimension."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def dimension_of(rotations: float) -> float:
        wavelength_ratio = original / (rotations * 2 * math.pi)
        return dim * math.log(wavelength_ratio) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 1e-3
    stretch = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    blended: np.ndarray = plain * (stretch / rope.factor + (1.0 - stretch))
    return blended


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _document_lengths(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Length in tokens of the document of each token, int32 [B, T] (or [B, 1] without segments)."""
    if segment_ids is None:
        return positions.max(axis=1, keepdims=True) + 1
    num_segments = positions.shape[1] + 1

    def of_row(row_positions: jax.Array, row_segments: jax.Array) -> jax.Array:
        longest = jax.ops.segment_max(row_positions, row_segments, num_segments=num_segments)
        return longest[row_segments] + 1

    return jax.vmap(of_row)(positions, segment_ids)


def _dynamic_frequencies(config: ModelConfig, lengths: jax.Array) -> jax.Array:
    """Frequencies with the base stretched for each length, float32 [B, T or 1, H / 2]."""
    rope, dim = config.rope_parameters, config.head_dim
    trained = config.max_position_embeddings
    ratio = jnp.maximum(lengths, trained).astype(jnp.float32) / trained
    # Logarithms, because theta ** (i / dim) of a large stretched theta loses digits in float32.
    stretch = jnp.log(rope.factor * ratio - (rope.factor - 1.0)) * (dim / (dim - 2))
    exponents = jnp.asarray(-np.arange(0, dim, 2, dtype=np.float32) / dim)
    log_theta = jnp.float32(math.log(rope.rope_theta)) + stretch
    return jnp.exp(log_theta[:, :, None] * exponents[None, None, :])
