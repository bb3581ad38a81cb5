"""Shapes of well-known models as their public configurations give them. Imports no JAX.

They are fields of `models.config.ModelConfig`, for benchmarks and plans with random weights only: a
real checkpoint is described by its own config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slidedp_jax.models.rope_parameters import RopeParameters

Fields = dict[str, Any]


def _fields(**fields: Any) -> Fields:
    return fields


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> Fields:
    return _fields(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
        qk_norm=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
    )


def _qwen25(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], *, vocab: int, tied: bool
) -> Fields:
    return _fields(
        model_type="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=hidden // heads[0],
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        attention_bias=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
    )


def _llama3(hidden: int, ffn: int, layers: int, heads: int, *, factor: float, tied: bool) -> Fields:
    return _fields(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        max_position_embeddings=131_072,
        rope_parameters=RopeParameters(
            rope_type="llama3",
            rope_theta=5e5,
            factor=factor,
            original_max_position_embeddings=8_192,
        ),
    )


def _llama2_7b() -> Fields:
    return _fields(
        model_type="llama",
        vocab_size=32_000,
        hidden_size=4_096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=4_096,
    )


def _mistral_7b() -> Fields:
    return _fields(
        model_type="mistral",
        vocab_size=32_768,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=32_768,
        rope_parameters=RopeParameters(rope_theta=1e6),
    )


def _smollm2_135m() -> Fields:
    return _fields(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8_192,
        rope_parameters=RopeParameters(rope_theta=1e5),
    )


def _gemma3(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], *, window: int, factor: float
) -> Fields:
    """Text models; of those with eyes the decoder of text."""
    return _fields(
        model_type="gemma3_text",
        vocab_size=262_144 if factor == 1.0 else 262_208,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=256,
        tie_word_embeddings=True,
        max_position_embeddings=32_768 if factor == 1.0 else 131_072,
        qk_norm=True,
        rope_parameters=RopeParameters(
            rope_type="default" if factor == 1.0 else "linear", rope_theta=1e6, factor=factor
        ),
        local_rope_parameters=RopeParameters(rope_theta=1e4),
        layer_windows=tuple(window if (layer + 1) % 6 else None for layer in range(layers)),
        hidden_act="gelu_pytorch_tanh",
        norms_add_one=True,
        norms_after=True,
        scale_embeddings=True,
        query_pre_attn_scalar=256.0,
    )


def _mixture(*, experts: int, visited: int, width: int, **fields: Any) -> Fields:
    """The fields of a mixture of experts, among others."""
    return _fields(
        num_experts=experts,
        num_experts_per_tok=visited,
        moe_intermediate_size=width,
        **fields,
    )


def _olmoe() -> Fields:
    return _mixture(
        model_type="olmoe",
        vocab_size=50_304,
        hidden_size=2_048,
        intermediate_size=1_024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=4_096,
        qk_norm=True,
        qk_norm_per_head=False,
        rope_parameters=RopeParameters(rope_theta=1e4),
        experts=64,
        visited=8,
        width=1_024,
    )


def _qwen15_moe() -> Fields:
    return _mixture(
        model_type="qwen2_moe",
        vocab_size=151_936,
        hidden_size=2_048,
        intermediate_size=5_632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=8_192,
        attention_bias=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
        experts=60,
        visited=4,
        width=1_408,
        shared_expert_intermediate_size=5_632,
    )


def _qwen3_moe(hidden: int, width: int, layers: int, heads: int) -> Fields:
    return _mixture(
        model_type="qwen3_moe",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40_960,
        qk_norm=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
        experts=128,
        visited=8,
        width=width,
        norm_topk_prob=True,
    )


def _mixtral() -> Fields:
    return _mixture(
        model_type="mixtral",
        vocab_size=32_000,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=32_768,
        rope_parameters=RopeParameters(rope_theta=1e6),
        experts=8,
        visited=2,
        width=14_336,
        norm_topk_prob=True,
    )


def _tiny_moe() -> Fields:
    """A mixture as small; its experts' width is a multiple of nothing."""
    dense = _tiny(tied=False) | {"model_type": "qwen3_moe"}
    return dense | _mixture(experts=6, visited=2, width=44)


def _tiny(*, tied: bool) -> Fields:
    """Small enough for a test in milliseconds; head_dim is not hidden / heads, on purpose."""
    return _fields(
        model_type="qwen3",
        vocab_size=271,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        qk_norm=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
    )


KNOWN_SHAPES: dict[str, Callable[[], Fields]] = {
    "tiny": lambda: _tiny(tied=False),
    "tiny-tied": lambda: _tiny(tied=True),
    "smollm2-135m": _smollm2_135m,
    "qwen3-0.6b": lambda: _qwen3(1_024, 3_072, 28, 16, tied=True),
    "qwen3-1.7b": lambda: _qwen3(2_048, 6_144, 28, 16, tied=True),
    "qwen3-4b": lambda: _qwen3(2_560, 9_728, 36, 32, tied=True),
    "qwen3-8b": lambda: _qwen3(4_096, 12_288, 36, 32, tied=False),
    "qwen3-14b": lambda: _qwen3(5_120, 17_408, 40, 40, tied=False),
    "qwen3-32b": lambda: _qwen3(5_120, 25_600, 64, 64, tied=False),
    "qwen2.5-0.5b": lambda: _qwen25(896, 4_864, 24, (14, 2), vocab=151_936, tied=True),
    "qwen2.5-1.5b": lambda: _qwen25(1_536, 8_960, 28, (12, 2), vocab=151_936, tied=True),
    "qwen2.5-3b": lambda: _qwen25(2_048, 11_008, 36, (16, 2), vocab=151_936, tied=True),
    "qwen2.5-7b": lambda: _qwen25(3_584, 18_944, 28, (28, 4), vocab=152_064, tied=False),
    "qwen2.5-14b": lambda: _qwen25(5_120, 13_824, 48, (40, 8), vocab=152_064, tied=False),
    "qwen2.5-32b": lambda: _qwen25(5_120, 27_648, 64, (40, 8), vocab=152_064, tied=False),
    "qwen2.5-72b": lambda: _qwen25(8_192, 29_568, 80, (64, 8), vocab=152_064, tied=False),
    "llama-2-7b": _llama2_7b,
    "llama-3.1-8b": lambda: _llama3(4_096, 14_336, 32, 32, factor=8.0, tied=False),
    "llama-3.1-70b": lambda: _llama3(8_192, 28_672, 80, 64, factor=8.0, tied=False),
    "llama-3.2-1b": lambda: _llama3(2_048, 8_192, 16, 32, factor=32.0, tied=True),
    "llama-3.2-3b": lambda: _llama3(3_072, 8_192, 28, 24, factor=32.0, tied=True),
    "mistral-7b-v0.3": _mistral_7b,
    "gemma-3-1b": lambda: _gemma3(1_152, 6_912, 26, (4, 1), window=512, factor=1.0),
    "gemma-3-4b": lambda: _gemma3(2_560, 10_240, 34, (8, 4), window=1_024, factor=8.0),
    "gemma-3-12b": lambda: _gemma3(3_840, 15_360, 48, (16, 8), window=1_024, factor=8.0),
    "tiny-moe": _tiny_moe,
    "olmoe-1b-7b": _olmoe,
    "qwen1.5-moe-a2.7b": _qwen15_moe,
    "qwen3-30b-a3b": lambda: _qwen3_moe(2_048, 768, 48, 32),
    "qwen3-235b-a22b": lambda: _qwen3_moe(4_096, 1_536, 94, 64),
    "mixtral-8x7b": _mixtral,
}
