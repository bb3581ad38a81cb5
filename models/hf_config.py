"""`config.json` of a Hugging Face folder -> `ModelConfig`. Imports no JAX.

Both layouts in the field are read: `rope_theta` beside `rope_scaling`, and the newer
`rope_parameters`. A feature that the decoder lacks is refused by name, because a checkpoint trained
with another forward pass than its own looks fine until it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.hf_expert_config import FAMILIES as EXPERT_FAMILIES
from slidedp_jax.models.hf_expert_config import expert_fields, own_features
from slidedp_jax.models.hf_gemma_config import FAMILIES as GEMMA_FAMILIES
from slidedp_jax.models.hf_gemma_config import (
    OWN_FEATURES,
    gemma_fields,
    gemma_windows,
    rope_of_kind,
)
from slidedp_jax.models.rope_parameters import ROPE_TYPES, RopeParameters

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    **EXPERT_FAMILIES,
    **GEMMA_FAMILIES,
}
"""Supported `model_type` -> the class that its `architectures` may name."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

# Keys that other decoders put beside these families' own; any value but null, false and the
# neutral numbers 0 and 1 means a forward pass that is not ours.
_FOREIGN_FEATURES = (
    "quantization_config",
    "auto_map",
    "num_experts",
    "num_local_experts",
    "attention_dropout",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "query_pre_attn_scalar",
    "no_rope_layers",
    "clip_qkv",
    "use_qk_norm",
    "qk_layernorm",
    "partial_rotary_factor",
)

# What transformers assumes of configurations that do not say.
_MISTRAL_WINDOW = 4096
_DEFAULT_POSITIONS = {
    "qwen2": 32_768,
    "qwen3": 32_768,
    "llama": 2_048,
    "mistral": 131_072,
    "qwen2_moe": 32_768,
    "qwen3_moe": 32_768,
    "mixtral": 131_072,
    "olmoe": 4_096,
    "gemma3_text": 131_072,
}
_DEFAULT_EPS = {"mixtral": 1e-5, "olmoe": 1e-5}
_DEFAULT_THETA = {"mixtral": 1_000_000.0}

_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder.

    Raises:
      FileNotFoundError: the folder holds no `config.json`.
      ValueError: the file is not JSON, or describes what is not supported.
    """
    return parse_config(read_json(Path(folder) / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, with errors that name the file."""
    if not path.is_file():
        exported = path.parent / "export"
        hint = f" There is a model in {exported}." if (exported / path.name).is_file() else ""
        if (path.parent / "trainer.json").is_file():
            hint = f" This is a checkpoint: `slidedp export {path.parent} FOLDER` makes one of it."
        raise FileNotFoundError(
            f"{path} does not exist. A model folder holds config.json, model.safetensors (or "
            f"shards and an index) and the tokenizer's files.{hint}"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A `config.json`'s content -> `ModelConfig`.

    Raises:
      ValueError: the architecture or a feature is not supported, a needed key is absent, or two
        keys contradict each other.
    """
    family = _supported_family(raw)
    _refuse_foreign_features(raw, family)
    missing = [key for key in _required_keys(family) if raw.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}, which {family} needs.")
    heads = raw["num_attention_heads"]
    # A field for it, of q, k, v and o alike; Qwen2's are there without one.
    is_gemma = family in GEMMA_FAMILIES
    has_bias_field = is_gemma or family in ("llama", "qwen3", "qwen3_moe", "olmoe")
    attention_bias = bool(raw.get("attention_bias", False)) and has_bias_field
    qkv_bias = family == "qwen2" or (family == "qwen2_moe" and raw.get("qkv_bias", True))
    positions = _or_default(raw, "max_position_embeddings", _DEFAULT_POSITIONS[family])
    return ModelConfig(
        **_rope_fields(raw, family, positions),
        model_type=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=_or_default(raw, "num_key_value_heads", heads),
        head_dim=_head_dim(raw, family),
        rms_norm_eps=_or_default(raw, "rms_norm_eps", _DEFAULT_EPS.get(family, 1e-6)),
        tie_word_embeddings=bool(_or_default(raw, "tie_word_embeddings", is_gemma)),
        max_position_embeddings=positions,
        attention_bias=attention_bias or qkv_bias,
        attention_output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=is_gemma or family in ("qwen3", "qwen3_moe", "olmoe"),
        layer_windows=_layer_windows(raw, family),
        hidden_act=_hidden_act(raw, family),
        initializer_range=_or_default(raw, "initializer_range", 0.02),
        **expert_fields(raw, family),
        **(gemma_fields(raw) if is_gemma else {}),
    )


def _or_default(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    return default if value is None else value


def _supported_family(raw: Mapping[str, Any]) -> str:
    family, named = raw.get("model_type"), raw.get("architectures")
    supported = ", ".join(f"{name} ({family})" for family, name in ARCHITECTURES.items())
    if family not in ARCHITECTURES:
        what = f"model_type {family!r}" + (f" with architectures {named}" if named else "")
        raise ValueError(f"config.json has {what}, which is not supported. Supported: {supported}.")
    if named and named != [ARCHITECTURES[family]]:
        raise ValueError(
            f"config.json names architectures {named} for model_type {family!r}, which is not "
            f"supported. Supported: {supported}."
        )
    return str(family)


def _refuse_foreign_features(raw: Mapping[str, Any], family: str) -> None:
    own = OWN_FEATURES if family in GEMMA_FAMILIES else own_features(family)
    for key in sorted(set(_FOREIGN_FEATURES) - set(own)):
        value = raw.get(key)
        if value not in (None, 0, 1) or value is True:
            raise ValueError(
                f"config.json sets {key} to {value!r}, which this decoder does not implement. If "
                f"the model does not use it, remove the key."
            )


def _required_keys(family: str) -> tuple[str, ...]:
    # Llama 1 and 2 predate grouped queries: there, and in OLMoE, absence means "as many as heads".
    if family in ("llama", "olmoe"):
        return _REQUIRED
    return (*_REQUIRED, "num_key_value_heads")


def _head_dim(raw: Mapping[str, Any], family: str) -> int:
    if raw.get("head_dim") is not None:
        return int(raw["head_dim"])
    if family in ("qwen3", *GEMMA_FAMILIES):
        return 128 if family == "qwen3" else 256
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"config.json has no head_dim, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}."
        )
    return int(hidden // heads)


def _layer_windows(raw: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    num_layers = int(raw["num_hidden_layers"])
    if family in GEMMA_FAMILIES:
        return gemma_windows(raw)
    if family in ("llama", "olmoe"):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if family in ("mistral", "mixtral", "qwen3_moe"):
        window = raw.get("sliding_window", _MISTRAL_WINDOW if family == "mistral" else None)
        if family == "qwen3_moe" and not raw.get("use_sliding_window", False):
            window = None
        _check_window(window)
        kind = "full_attention" if window is None else "sliding_attention"
        if kinds is not None and set(kinds) != {kind}:
            raise ValueError(
                f"config.json mixes layer_types {sorted(set(kinds))} with sliding_window {window} "
                f"in a {family} model, where all layers are alike."
            )
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        window = None
    else:
        window = raw.get("sliding_window")
        if window is None:
            raise ValueError("config.json sets use_sliding_window but no sliding_window.")
    _check_window(window)
    if kinds is None:
        if family == "qwen2_moe" and window is not None:
            raise ValueError(
                "config.json sets use_sliding_window but no layer_types; versions of transformers "
                "differ in which layers of a qwen2_moe model slide then."
            )
        if window is not None and raw.get("max_window_layers") is None:
            raise ValueError(
                "config.json sets use_sliding_window but neither layer_types nor "
                "max_window_layers, so it does not say which layers slide."
            )
        first = raw.get("max_window_layers") or 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"config.json has {len(kinds)} layer_types of kinds {sorted(set(kinds))} for "
            f"{num_layers} layers; supported kinds: full_attention, sliding_attention."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(
            f"config.json has sliding_window {window}; a window has at least one token. For none, "
            "set use_sliding_window to false, in a Mistral or Mixtral sliding_window to null."
        )


def _hidden_act(raw: Mapping[str, Any], family: str) -> str:
    """Gemma's configurations call it `hidden_activation`, and older ones have another beside it."""
    if family in GEMMA_FAMILIES:
        return str(_or_default(raw, "hidden_activation", "gelu_pytorch_tanh"))
    return str(_or_default(raw, "hidden_act", "silu"))


def _rope_fields(raw: Mapping[str, Any], family: str, positions: int) -> dict[str, Any]:
    if family not in GEMMA_FAMILIES:
        return {"rope_parameters": _rope_parameters(raw, family, positions)}
    full, local = (
        _rope_parameters(rope_of_kind(raw, kind), family, positions)
        for kind in ("full_attention", "sliding_attention")
    )
    return {"rope_parameters": full, "local_rope_parameters": local}


def _rope_parameters(raw: Mapping[str, Any], family: str, positions: int) -> RopeParameters:
    old = dict(raw.get("rope_scaling") or {})
    new = dict(raw.get("rope_parameters") or {})
    _refuse_nested_rope(new)
    if raw.get("rope_theta") is not None:
        old.setdefault("rope_theta", raw["rope_theta"])
    old, new = _with_one_type(old), _with_one_type(new)
    clashes = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
    if clashes:
        described = "; ".join(f"{key} is {old[key]!r} and {new[key]!r}" for key in clashes)
        raise ValueError(
            f"config.json describes RoPE twice and differently, in rope_theta/rope_scaling and in "
            f"rope_parameters: {described}. Remove the wrong one."
        )
    given = {key: value for key, value in (old | new).items() if value is not None}
    if "rope_theta" not in given:
        if family.startswith("qwen"):
            raise ValueError(
                f"config.json has no rope_theta, neither on its own nor in rope_parameters; "
                f"{family} models do not share one value (most use 1000000.0)."
            )
        given["rope_theta"] = _DEFAULT_THETA.get(family, 10_000.0)
    return _scaled_rope(given, raw, positions)


def _refuse_nested_rope(parameters: Mapping[str, Any]) -> None:
    nested = sorted(key for key, value in parameters.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(
            f"config.json has rope_parameters per kind of layer ({', '.join(nested)}); supported "
            f"is one set for all layers."
        )


def _with_one_type(parameters: dict[str, Any]) -> dict[str, Any]:
    """Renames the legacy `type` to `rope_type`."""
    legacy = parameters.pop("type", None)
    kind = parameters.get("rope_type", legacy)
    if legacy is not None and kind != legacy:
        raise ValueError(f"config.json gives RoPE type {legacy!r} and rope_type {kind!r}.")
    return parameters | ({} if kind is None else {"rope_type": kind})


def _scaled_rope(given: dict[str, Any], raw: Mapping[str, Any], positions: int) -> RopeParameters:
    kind = given.pop("rope_type", None)
    theta = float(given.pop("rope_theta"))
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json sets partial_rotary_factor, which is not supported.")
    if kind is None and given:
        raise ValueError(f"config.json scales RoPE by {given} but names no rope_type.")
    kind = kind or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"config.json has RoPE type {kind!r}; supported kinds: {', '.join(ROPE_TYPES)}."
        )
    unknown = sorted(given.keys() - _ROPE_KEYS[kind])
    if unknown:
        raise ValueError(
            f"config.json has RoPE keys {', '.join(unknown)}, which type {kind!r} does not use "
            f"here. Known: {', '.join(sorted(_ROPE_KEYS[kind])) or 'none'}."
        )
    if kind in ("llama3", "yarn"):
        outer = raw.get("original_max_position_embeddings")
        given.setdefault("original_max_position_embeddings", outer or positions)
        if outer is not None and given["original_max_position_embeddings"] != outer:
            raise ValueError(
                "config.json has original_max_position_embeddings inside and outside the RoPE "
                "block, with different values."
            )
    if kind == "yarn":
        given.setdefault("factor", positions / given["original_max_position_embeddings"])
    needed = {"linear": {"factor"}, "dynamic": {"factor"}, "llama3": _ROPE_KEYS["llama3"]}
    missing = sorted(needed.get(kind, frozenset()) - given.keys())
    if missing:
        raise ValueError(f"config.json has RoPE of type {kind!r} without {', '.join(missing)}.")
    return RopeParameters(rope_type=kind, rope_theta=theta, **given)
