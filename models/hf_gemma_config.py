"""What `config.json` says of a Gemma 3 text model, where it differs from others. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = {"gemma3_text": "Gemma3ForCausalLM"}
"""`model_type` -> the class that `architectures` may name."""

OWN_FEATURES = ("query_pre_attn_scalar",)
"""Keys that describe it and that other families may not have."""

# What transformers takes where a configuration does not say.
_WINDOW = 4096
_PATTERN = 6
_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_OLD_THETA = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def gemma_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` beside those that all families share.

    Raises:
      ValueError: a feature is not supported.
    """
    if raw.get("use_bidirectional_attention"):
        raise ValueError(
            "config.json sets use_bidirectional_attention, which this decoder does not implement."
        )
    scalar = raw.get("query_pre_attn_scalar")
    return {
        "norms_add_one": True,
        "norms_after": True,
        "scale_embeddings": True,
        "query_pre_attn_scalar": float(256 if scalar is None else scalar),
    }


def gemma_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer its window, or None for full attention.

    Raises:
      ValueError: `layer_types` are not one per layer, or of an unknown kind.
    """
    num_layers = int(raw["num_hidden_layers"])
    window = raw.get("sliding_window")
    window = _WINDOW if window is None else int(window)
    kinds = raw.get("layer_types")
    if kinds is None:
        pattern = raw.get("sliding_window_pattern")
        pattern = _PATTERN if pattern is None else int(pattern)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    unknown = set(kinds) - set(_THETA)
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"config.json has {len(kinds)} layer_types of kinds {sorted(set(kinds))} for "
            f"{num_layers} layers; supported kinds: {', '.join(sorted(_THETA))}."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rope_of_kind(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What another family's `config.json` would say of the RoPE of layers of a kind.

    Args:
      raw: in the older layout `rope_theta` and `rope_scaling` are of layers with full attention,
        `rope_local_base_freq` is of the others; the newer one has `rope_parameters` per kind.
      kind: `full_attention` or `sliding_attention`.
    """
    given = raw.get("rope_parameters") or {}
    if odd := sorted(given.keys() - _THETA.keys()):
        raise ValueError(
            f"config.json has rope_parameters {', '.join(odd)} for all layers; gemma3_text needs "
            f"one set each for {', '.join(sorted(_THETA))}."
        )
    nested = given.get(kind)
    theta = raw.get(_OLD_THETA[kind])
    if theta is None and (nested or {}).get("rope_theta") is None:
        theta = _THETA[kind]
    old = raw.get("rope_scaling") if kind == "full_attention" else None
    return {**raw, "rope_theta": theta, "rope_scaling": old, "rope_parameters": nested}
