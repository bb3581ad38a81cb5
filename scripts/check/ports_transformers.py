"""transformers' Flax models, the last that had them: GPT-2, Llama, Mistral, Bloom, GPT-J."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from flax import linen as nn
from port_training import VOCAB, Port, loss_sum, mean_loss, moved


def ports() -> Iterator[Callable[[], Port]]:
    """One after the other."""
    yield lambda: _gpt2(12)
    yield lambda: _llama("Llama")
    yield lambda: _llama("Mistral", sliding_window=5)
    yield _bloom
    yield _gptj


def _whole_loss(model: Any) -> Callable[[Any, Any], jax.Array]:
    def whole_loss(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["input_ids"], params=params, train=False).logits
        return mean_loss(logits, batch["labels"])

    return whole_loss


def _module(kind: str, name: str) -> Any:
    return getattr(
        __import__(f"transformers.models.{kind}.modeling_flax_{kind}", fromlist=[name]), name
    )


def _ones(x: jax.Array) -> jax.Array:
    return jnp.ones(x.shape[:2], jnp.int32)


def _norm(params: Any, x: jax.Array, epsilon: float) -> Any:
    return nn.LayerNorm(epsilon=epsilon).apply({"params": params}, x)


def _gpt2(num_layers: int) -> Port:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=num_layers,
        n_head=4,
        n_positions=64,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = _module("gpt2", "FlaxGPT2LMHeadModel")(config, seed=0)
    block = _module("gpt2", "FlaxGPT2Block")(config)

    def embed(p: Any, batch: Any) -> Any:
        t = p["transformer"]
        tokens = t["wte"]["embedding"][batch["input_ids"]]
        return tokens + t["wpe"]["embedding"][batch["positions"]]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> Any:
        t = p["transformer"]
        x = _norm(t["ln_f"], x, config.layer_norm_epsilon)
        return loss_sum(x @ t["wte"]["embedding"].T, batch["targets"])

    parts = {
        "layers": "transformer.h",
        "embed": embed,
        "layer": lambda p, x, batch: block.apply({"params": p}, x, _ones(x))[0],
        "head_loss": head_loss,
    }
    # As it comes out of jax.jit: with its layers sorted as text.
    params = jax.jit(lambda p: p)(moved(model.params))
    return Port(
        name=f"transformers GPT-2, {num_layers} layers, keys sorted",
        model=params,
        parts=parts,
        whole_loss=_whole_loss(model),
    )


def _llama(family: str, **settings: Any) -> Port:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **settings,
    )
    config._attn_implementation = "eager"
    kind = family.lower()
    model = _module(kind, f"Flax{family}ForCausalLM")(config, seed=0)
    block = _module(kind, f"Flax{family}DecoderLayer")(config)
    norm = _module(kind, f"Flax{family}RMSNorm")(config)

    def layer(p: Any, x: jax.Array, batch: Any) -> Any:
        at = batch["positions"]
        return block.apply({"params": p}, x, attention_mask=_ones(x), position_ids=at)[0]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> Any:
        x = norm.apply({"params": p["model"]["norm"]}, x)
        return loss_sum(x @ p["lm_head"]["kernel"], batch["targets"])

    parts = {
        "layers": "model.layers",
        "embed": lambda p, b: p["model"]["embed_tokens"]["embedding"][b["input_ids"]],
        "layer": layer,
        "head_loss": head_loss,
    }
    return Port(
        name=f"transformers {family}",
        model=moved(model.params),
        parts=parts,
        whole_loss=_whole_loss(model),
    )


def _bloom() -> Port:
    """Attention biased by distance, which each layer is handed."""
    config = transformers.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        n_layer=3,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = _module("bloom", "FlaxBloomForCausalLM")(config, seed=0)
    block = _module("bloom", "FlaxBloomBlock")(config)
    build_alibi = _module("bloom", "build_alibi_tensor")

    def embed(p: Any, batch: Any) -> Any:
        t = p["transformer"]
        x = t["word_embeddings"]["embedding"][batch["input_ids"]]
        return _norm(t["word_embeddings_layernorm"], x, config.layer_norm_epsilon)

    def layer(p: Any, x: jax.Array, batch: Any) -> Any:
        alibi = build_alibi(_ones(x), config.n_head, dtype=x.dtype)
        return block.apply({"params": p}, x, alibi, attention_mask=_ones(x))[0]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> Any:
        t = p["transformer"]
        x = _norm(t["ln_f"], x, config.layer_norm_epsilon)
        return loss_sum(x @ t["word_embeddings"]["embedding"].T, batch["targets"])

    parts = {
        "layers": "transformer.h",
        "embed": embed,
        "layer": layer,
        "head_loss": head_loss,
    }
    return Port(
        name="transformers Bloom",
        model=moved(model.params),
        parts=parts,
        whole_loss=_whole_loss(model),
    )


def _gptj() -> Port:
    """Attention and feed-forward side by side, an output projection with a bias."""
    config = transformers.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        rotary_dim=4,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = _module("gptj", "FlaxGPTJForCausalLM")(config, seed=0)
    block = _module("gptj", "FlaxGPTJBlock")(config)

    def layer(p: Any, x: jax.Array, batch: Any) -> Any:
        return block.apply({"params": p}, x, _ones(x), position_ids=batch["positions"])[0]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> Any:
        x = _norm(p["transformer"]["ln_f"], x, config.layer_norm_epsilon)
        head = p["lm_head"]
        return loss_sum(x @ head["kernel"] + head["bias"], batch["targets"])

    parts = {
        "layers": "transformer.h",
        "embed": lambda p, b: p["transformer"]["wte"]["embedding"][b["input_ids"]],
        "layer": layer,
        "head_loss": head_loss,
    }
    return Port(
        name="transformers GPT-J",
        model=moved(model.params),
        parts=parts,
        whole_loss=_whole_loss(model),
    )
