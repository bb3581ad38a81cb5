"""How positions are embedded, as a configuration says it. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
"""Every kind of rotary position embedding that `models.rope` computes."""


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
