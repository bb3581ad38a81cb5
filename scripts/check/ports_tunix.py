"""google-tunix: Llama 3, Gemma 1 to 4, Qwen3 with experts, as they are on PyPI."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from port_training import VOCAB, Port, causal, loss_sum, mean_loss, moved, positions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3


def ports() -> Iterator[Callable[[], Port]]:
    """One after the other."""
    yield lambda: _port("tunix llama3, tied", _llama(tied=True), _llama_head)
    yield lambda: _port("tunix llama3, 12 layers", _llama(num_layers=12), _llama_head)
    yield lambda: _llama_remat("BLOCK")
    yield lambda: _llama_remat("DECODER")
    yield lambda: _port("tunix gemma 1", _gemma(), _gemma_head)
    yield lambda: _port(
        "tunix gemma 2",
        _gemma(
            attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL) * 2,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
            sliding_window_size=5,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
        ),
        _gemma_head,
    )
    yield lambda: _port("tunix gemma 3", _gemma3(), _gemma3_head)
    yield lambda: _port("tunix qwen3, experts", _qwen3_experts(), _qwen3_head)
    # Scales before a norm and top-k choices turn rounding into steps of their own.
    yield lambda: _port("tunix gemma 4, experts", _gemma4(**EXPERTS), _gemma4_head, 0.1)
    yield lambda: _sharing()


def _port(name: str, model: Any, head: Callable[..., Any], tolerance: float = 2e-3) -> Port:
    parts = {
        "layers": "layers",
        "embed": lambda m, batch: m.embedder.encode(batch["input_ids"]),
        "layer": lambda layer, x, batch: layer(x, batch["positions"], None, causal(x.shape[1]))[1],
        "head_loss": lambda m, x, batch: loss_sum(head(m, x), batch["targets"]),
    }
    return Port(
        name=name,
        model=moved(model),
        parts=parts,
        whole_loss=_whole_loss,
        update_tolerance=tolerance,
    )


def _whole_loss(model: Any, batch: Any) -> jax.Array:
    ids = batch["input_ids"]
    logits = model(ids, positions(ids), None, causal(ids.shape[1]))[0]
    return mean_loss(logits, batch["labels"])


def _llama(num_layers: int = 3, *, tied: bool = False, **settings: Any) -> Any:
    config = llama3.ModelConfig(
        num_layers=num_layers,
        vocab_size=VOCAB,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=500_000,
        norm_eps=1e-5,
        weight_tying=tied,
        **settings,
    )
    return llama3.Llama3(config, rngs=nnx.Rngs(0))


def _llama_remat(setting: str) -> Port:
    model = _llama(remat_config=getattr(llama3.RematConfig, setting))
    return _port(f"tunix llama3, remat_config {setting}", model, _llama_head)


def _llama_head(model: Any, x: jax.Array) -> Any:
    x = model.final_norm(x)
    return model.embedder.decode(x) if model.config.weight_tying else model.lm_head(x)


def _gemma(**settings: Any) -> Any:
    plain = {
        "attention_types": (gemma.AttentionType.GLOBAL,) * 4,
        "final_logit_softcap": None,
        "use_post_attn_norm": False,
        "use_post_ffw_norm": False,
    }
    config = gemma.ModelConfig(
        num_layers=4,
        num_embed=VOCAB,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        **(plain | settings),
    )
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


def _gemma_head(model: Any, x: jax.Array) -> Any:
    return _capped(model.embedder.decode(model.final_norm(x)), model.final_logits_softcap)


def _capped(logits: jax.Array, cap: float | None) -> jax.Array:
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def _gemma3() -> Any:
    config = gemma3.ModelConfig(
        num_layers=6,
        num_embed=VOCAB,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=1,
        sliding_window_size=5,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )
    return gemma3.Gemma3(config, rngs=nnx.Rngs(0))


def _gemma3_head(model: Any, x: jax.Array) -> Any:
    return model.embedder.decode(model.final_norm(x))


def _qwen3_experts() -> Any:
    config = qwen3.ModelConfig(
        num_layers=3,
        vocab_size=VOCAB,
        embed_dim=32,
        hidden_dim=24,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=False,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def _qwen3_head(model: Any, x: jax.Array) -> Any:
    return model.lm_head(model.final_norm(x))


EXPERTS = {"enable_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "expert_dim": 24}


def _gemma4(**settings: Any) -> Any:
    config = gemma4.ModelConfig(
        num_layers=4,
        num_embed=VOCAB,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        sliding_window_size=5,
        global_key_size=16,
        attention_pattern=(gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL),
        **settings,
    )
    return gemma4.Gemma4(config, rngs=nnx.Rngs(0))


def _gemma4_head(model: Any, x: jax.Array) -> Any:
    logits = model.embedder.decode(model.final_norm(x)).astype(jnp.float32)
    return _capped(logits, model.config.final_logit_softcap)


def _sharing() -> Port:
    """Gemma 4 as its small ones are: upper layers attend to keys and values of lower ones."""
    names = ("local", "global")

    def begin(m: Any, batch: Any) -> Any:
        x = m.embedder.encode(batch["input_ids"])
        empty = jnp.zeros((*x.shape[:2], m.config.num_kv_heads, m.config.head_dim), x.dtype)
        inputs = m.embedder.encode_per_layer_input(x, batch["input_ids"])
        kept = {f"{part}_{name}": empty for part in ("k", "v") for name in names}
        return {"x": x, "inputs": inputs, **kept}

    def layer(name: str, shares: bool) -> Callable[..., Any]:
        def run(module: Any, states: Any, batch: Any) -> Any:
            own = jnp.take(states["inputs"], batch["layer_index"], axis=2)
            given = {part: states[f"{part}_{name}"] for part in ("k", "v")} if shares else None
            mask = causal(states["x"].shape[1])
            _, x, kv = module(states["x"], batch["positions"], None, mask, own, given)
            made = {} if shares else {f"k_{name}": kv[0], f"v_{name}": kv[1]}
            return states | {"x": x} | made

        return run

    port = _port(
        "tunix gemma 4, shared keys and inputs of each layer",
        _gemma4(frac_shared_layers=0.5, per_layer_input_dim=8),
        _gemma4_head,
        0.1,
    )
    parts = {
        **port.parts,
        "embed": begin,
        "layer": [layer(name, shares) for shares in (False, True) for name in names],
        "head_loss": lambda m, states, batch: loss_sum(
            _gemma4_head(m, states["x"]), batch["targets"]
        ),
        "unused": [f"layers.{n}.attn.{what}.*" for n in (2, 3) for what in UNUSED],
    }
    return replace(port, parts=parts)


UNUSED = ("kv_einsum", "_key_norm")
"""Of layers that are handed keys and values."""
