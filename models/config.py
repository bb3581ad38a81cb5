"""The one description of a dense decoder that models, planner and runtime share. Imports no JAX.

Field names are Hugging Face's, so that a `config.json` maps onto them by identity; model families
(Qwen2, Qwen3, Llama, Mistral) are flags of `ModelConfig`, not classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
"""Every kind of rotary position embedding that `models.rope` computes."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """Rotary position embedding, one value for the whole model.

    Attributes:
      rope_type: which formula; see `models.rope` for each.
      rope_theta: base of the geometric series of wavelengths.
      factor: context extension factor (linear, dynamic, llama3, yarn).
      original_max_position_embeddings: context length of the pretraining, tokens (llama3, yarn).
      low_freq_factor: wavelengths above original / low_freq_factor are stretched in full (llama3).
      high_freq_factor: wavelengths below original / high_freq_factor are left alone (llama3).
      beta_fast: rotations within the original context above which nothing is stretched (yarn).
      beta_slow: rotations within the original context below which all is stretched (yarn).
      attention_factor: multiplier of cos and sin; None derives it from `factor` (yarn).
      mscale: numerator's scale in the derived attention factor (yarn, with `mscale_all_dim`).
      mscale_all_dim: denominator's scale in the derived attention factor (yarn, with `mscale`).
      truncate: round the borders of the blend to whole dimensions (yarn).
    """

    rope_type: RopeType = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Rejects what no formula can use."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type is {self.rope_type!r}; supported kinds: {', '.join(ROPE_TYPES)}."
            )
        if not self.rope_theta > 1.0:
            raise ValueError(f"rope_theta is {self.rope_theta}; it must be greater than 1.")
        if not self.factor >= 1.0:
            raise ValueError(f"RoPE factor is {self.factor}; it must be at least 1.")
        needs_original = self.rope_type in ("llama3", "yarn")
        if needs_original and not (self.original_max_position_embeddings or 0) > 0:
            raise ValueError(
                f"RoPE of type {self.rope_type!r} needs a positive "
                f"original_max_position_embeddings, got {self.original_max_position_embeddings}."
            )
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"llama3 RoPE needs high_freq_factor > low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and flags of a decoder-only transformer with RMSNorm, RoPE and SwiGLU.

    Attributes:
      model_type: Hugging Face family name (`qwen2`, `qwen3`, `llama`, `mistral`); informative, no
        code branches on it after the configuration has been read.
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, D.
      intermediate_size: width of the feed-forward block, F.
      num_hidden_layers: number of layers, L.
      num_attention_heads: query heads, N.
      num_key_value_heads: key and value heads, K; divides N.
      head_dim: size of a head, H; even. Never derived: Qwen3's is not D / N.
      rms_norm_eps: added to the mean square inside every norm.
      tie_word_embeddings: the output projection is the embedding.
      max_position_embeddings: context length that the model was configured for, tokens.
      attention_bias: q, k and v projections have biases.
      attention_output_bias: the o projection has a bias.
      mlp_bias: gate, up and down projections have biases.
      qk_norm: RMSNorm over each query and key head before RoPE.
      rope_parameters: see `RopeParameters`.
      layer_windows: per layer the sliding window in tokens (a query sees itself and the
        window - 1 tokens before it), or None for full attention. Empty means None everywhere.
      hidden_act: activation of the gate; only `silu`.
      initializer_range: standard deviation of freshly initialised matrices.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    layer_windows: tuple[int | None, ...] = ()
    hidden_act: str = "silu"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Checks that the numbers fit together; fills an empty `layer_windows`."""
        for name in _POSITIVE_FIELDS:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE needs an even number.")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}; supported: 'silu'.")
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_hidden_layers)
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries for "
                f"{self.num_hidden_layers} layers; give one per layer, or none at all."
            )
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise ValueError(f"layer_windows are {self.layer_windows}; a window is at least 1.")

    def embedding_shapes(self) -> dict[str, Shape]:
        """Names within `model.embed_tokens` -> shapes."""
        return {"weight": (self.vocab_size, self.hidden_size)}

    def layer_shapes(self) -> dict[str, Shape]:
        """Names within `model.layers.{i}` -> shapes; every layer has the same.

        Matrices are [out, in], as Hugging Face stores them.
        """
        hidden, ffn = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.attention_bias),
            "self_attn.k_proj": (keys, hidden, self.attention_bias),
            "self_attn.v_proj": (keys, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, queries, self.attention_output_bias),
            "mlp.gate_proj": (ffn, hidden, self.mlp_bias),
            "mlp.up_proj": (ffn, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, ffn, self.mlp_bias),
        }
        shapes: dict[str, Shape] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, (num_out, num_in, has_bias) in linears.items():
            shapes[f"{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{name}.bias"] = (num_out,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    def head_shapes(self) -> dict[str, Shape]:
        """Full names of the final norm and, untied, of the output projection -> shapes."""
        shapes: dict[str, Shape] = {"model.norm.weight": (self.hidden_size,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def parameter_shapes(self) -> dict[str, Shape]:
        """Full Hugging Face name -> shape of every parameter, bottom to top."""
        shapes = {
            f"model.embed_tokens.{name}": shape for name, shape in self.embedding_shapes().items()
        }
        for layer in range(self.num_hidden_layers):
            for name, shape in self.layer_shapes().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes | self.head_shapes()

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token embedding (and, tied, of the output projection)."""
        return _count(self.embedding_shapes())

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer."""
        return _count(self.layer_shapes())

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the final norm and, untied, of the output projection."""
        return _count(self.head_shapes())

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied matrix counted once."""
        layers = self.num_hidden_layers * self.num_layer_parameters
        return self.num_embedding_parameters + layers + self.num_head_parameters


_POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
)


def _count(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# Shapes of well-known models, as their public configurations give them. For benchmarks and plans
# with random weights only: a real checkpoint is described by its own config.json.


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
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
) -> ModelConfig:
    return ModelConfig(
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


def _llama3(
    hidden: int, ffn: int, layers: int, heads: int, *, factor: float, tied: bool
) -> ModelConfig:
    return ModelConfig(
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


def _llama2_7b() -> ModelConfig:
    return ModelConfig(
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


def _mistral_7b() -> ModelConfig:
    return ModelConfig(
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


def _smollm2_135m() -> ModelConfig:
    return ModelConfig(
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


def _tiny(*, tied: bool) -> ModelConfig:
    """Small enough for a test in milliseconds; head_dim is not hidden / heads, on purpose."""
    return ModelConfig(
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


_PRESETS: dict[str, Callable[[], ModelConfig]] = {
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
}


def config_names() -> tuple[str, ...]:
    """Names that `named_config` knows."""
    return tuple(_PRESETS)


def named_config(name: str) -> ModelConfig:
    """The configuration of a well-known model.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in _PRESETS:
        raise ValueError(f"No preset is named {name!r}; known: {', '.join(_PRESETS)}.")
    return _PRESETS[name]()
