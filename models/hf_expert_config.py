"""What `config.json` says of experts, for the families that have them. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
"""`model_type` -> the class that `architectures` may name."""

_COUNT = {
    "qwen2_moe": ("num_experts",),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "mixtral": ("num_local_experts", "num_experts"),
    "olmoe": ("num_experts", "num_local_experts"),
}
"""Names of the number of experts, the usual one first."""

_AUX_COEFFICIENT = {"qwen2_moe": 0.001, "qwen3_moe": 0.001, "mixtral": 0.001, "olmoe": 0.01}
"""What transformers takes where a configuration turns the loss on and gives no coefficient."""


def own_features(family: str) -> tuple[str, ...]:
    """Keys that describe these families and that others may not have."""
    if family not in FAMILIES:
        return ()
    return ("num_experts", "num_local_experts", *(("clip_qkv",) if family == "olmoe" else ()))


def expert_fields(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Fields of `ModelConfig` that say what a layer's experts are; none for a dense family.

    Raises:
      ValueError: something is missing, contradicts itself, or is not supported.
    """
    if family not in FAMILIES:
        return {}
    if raw.get("router_jitter_noise"):
        raise ValueError(
            f"config.json sets router_jitter_noise to {raw['router_jitter_noise']!r}, which this "
            "decoder does not implement: set it to 0 to train without noise on the router's input."
        )
    width = "intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"
    count = _number_of_experts(raw, family)
    fields = {
        "num_experts": count,
        "num_experts_per_tok": _required(raw, "num_experts_per_tok", family),
        "moe_intermediate_size": _required(raw, width, family),
        "norm_topk_prob": family == "mixtral" or bool(raw.get("norm_topk_prob", False)),
        "sparse_layers": _sparse_layers(raw, family),
        "router_aux_loss_coef": _aux_coefficient(raw, family),
    }
    if family == "qwen2_moe":
        shared = _required(raw, "shared_expert_intermediate_size", family)
        fields["shared_expert_intermediate_size"] = shared
    if family == "olmoe":
        fields |= {"qk_norm_per_head": False, "clip_qkv": raw.get("clip_qkv")}
    return fields


def _required(raw: Mapping[str, Any], key: str, family: str) -> int:
    if raw.get(key) is None:
        raise ValueError(f"config.json lacks {key}, which {family} needs.")
    return int(raw[key])


def _number_of_experts(raw: Mapping[str, Any], family: str) -> int:
    """Under the family's own name or its alias; of both, they must agree."""
    given = {int(raw[key]) for key in _COUNT[family] if raw.get(key) is not None}
    if not given:
        raise ValueError(f"config.json lacks {_COUNT[family][0]}, which {family} needs.")
    if len(given) > 1 or min(given) < 1:
        raise ValueError(
            f"config.json has {' and '.join(_COUNT[family])} of {sorted(given)}; {family} needs "
            "one number of 1 or more."
        )
    return given.pop()


def _sparse_layers(raw: Mapping[str, Any], family: str) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    layers = range(int(raw["num_hidden_layers"]))
    if not family.startswith("qwen"):
        return (True,) * len(layers)
    step, dense = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or []
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)
    if not any(sparse):
        raise ValueError(
            f"config.json has mlp_only_layers {dense} and decoder_sparse_step {step}, so that no "
            "layer has experts; that is a model of the dense family."
        )
    return sparse


def _aux_coefficient(raw: Mapping[str, Any], family: str) -> float:
    """Of the load-balance loss, which is on where the router's logits are put out."""
    if not raw.get("output_router_logits", False):
        return 0.0
    value = raw.get("router_aux_loss_coef")
    return float(_AUX_COEFFICIENT[family] if value is None else value)
