"""Models that are no packages, from checkouts: google/flax, llama-2-jax, big_vision, nanodo."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from port_training import VOCAB, Port, causal, loss_sum, mean_loss, moved, positions

import slidedp_jax

SOURCES = Path(os.environ.get("PORT_SOURCES", "."))


def ports() -> Iterator[Callable[[], Port]]:
    """One after the other."""
    yield _flax_gemma
    yield _flax_lm1b
    yield lambda: _llama2(12)
    yield lambda: _big_vision_gemma(3)
    yield _nanodo


def _load(name: str, path: str) -> Any:
    """A file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, SOURCES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _flax_gemma() -> Port:
    """The NNX example of google/flax: sliding and global attention, soft caps."""
    sys.path.insert(0, str(SOURCES / "flax/examples/gemma"))
    config_of, transformer = map(importlib.import_module, ("transformer_cfg", "transformer"))
    kinds = config_of.AttentionType
    config = config_of.TransformerConfig(
        num_layers=4,
        num_embed=VOCAB,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL) * 2,
        attn_logits_soft_cap=50.0,
        sliding_window_size=5,
    )

    def head_loss(m: Any, x: jax.Array, batch: Any) -> jax.Array:
        logits, cap = m.embedder.attend(m.final_norm(x)), m.final_logits_softcap
        return loss_sum(jnp.tanh(logits / cap) * cap, batch["targets"])

    def whole_loss(m: Any, batch: Any) -> jax.Array:
        ids = batch["input_ids"]
        return mean_loss(m(ids, positions(ids), None, causal(ids.shape[1]))[0], batch["labels"])

    parts = {
        "layers": "layers",
        "embed": lambda m, batch: m.embedder(batch["input_ids"]),
        "layer": lambda layer, x, b: layer(x, b["positions"], None, causal(x.shape[1]))[1],
        "head_loss": head_loss,
    }
    return Port(
        name="flax examples, gemma",
        model=moved(transformer.Transformer(config, rngs=nnx.Rngs(0))),
        parts=parts,
        whole_loss=whole_loss,
    )


def _flax_lm1b() -> Port:
    """The Linen example: it shifts its inputs itself, so position t predicts token t."""
    lm1b = _load("lm1b_models", "flax/examples/lm1b/models.py")
    config = lm1b.TransformerConfig(
        vocab_size=VOCAB,
        output_vocab_size=VOCAB,
        emb_dim=32,
        num_heads=4,
        num_layers=3,
        qkv_dim=32,
        mlp_dim=64,
        max_len=64,
        deterministic=True,
        logits_via_embedding=True,
    )
    model, block = lm1b.TransformerLM(config), lm1b.EncoderDecoder1DBlock(config=config)
    params = nn.unbox(model.init(jax.random.key(0), jnp.ones((2, 16), jnp.int32))["params"])

    def embed(p: Any, batch: Any) -> Any:
        shifted = lm1b.shift_inputs(batch["input_ids"])
        x = p["decoder"]["Embed_0"]["embedding"][shifted]
        return lm1b.AddPositionEmbs(config=config).apply({"params": {}}, x)

    def layer(p: Any, x: jax.Array, batch: Any) -> Any:
        seen = batch["input_ids"] > 0
        mask = nn.combine_masks(
            nn.make_attention_mask(seen, seen), nn.make_causal_mask(batch["input_ids"])
        )
        return block.apply({"params": p}, x, decoder_mask=mask)

    def head_loss(p: Any, x: jax.Array, batch: Any) -> jax.Array:
        p = p["decoder"]
        x = jnp.asarray(nn.LayerNorm().apply({"params": p["encoderdecoder_norm"]}, x))
        logits = x @ p["Embed_0"]["embedding"].T / jnp.sqrt(x.shape[-1])
        return loss_sum(logits, batch["targets"])

    def whole_loss(p: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": p}, batch["input_ids"])
        return mean_loss(logits, batch["labels"], shifted=False)

    parts = {
        "layers": [f"decoder.encoderdecoderblock_{n}" for n in range(3)],
        "embed": embed,
        "layer": layer,
        "head_loss": head_loss,
    }
    return Port(
        name="flax examples, lm1b",
        model=moved(params),
        parts=parts,
        whole_loss=whole_loss,
        options={"shift_labels": False},
    )


def _llama2(num_layers: int) -> Port:
    """llama-2-jax: functions over named tuples, layers stacked."""
    vars(jax)["tree_map"] = jax.tree.map  # by this name when it was written
    sys.path.insert(0, str(SOURCES / "llama-2-jax"))
    llama = importlib.import_module("lib.llama")
    block = importlib.import_module("lib.llama.decoder_block")
    norm = importlib.import_module("lib.llama.rms_norm")
    config = llama.model_config_dummy._replace(
        d_k=8,
        d_v=8,
        d_model=32,
        d_ff=48,
        n_heads_kv=2,
        n_rep_kv=2,
        n_layers=num_layers,
        vocab_size=VOCAB,
        dropout_rate=None,
    )
    params = llama.init_llama(key=jax.random.key(0), model_config=config)

    def whole_loss(p: Any, batch: Any) -> jax.Array:
        ids = batch["input_ids"].astype(jnp.uint16)
        rotary = llama.make_rotary_values(None, *ids.shape, model_config=config)
        mask = causal(ids.shape[1])[:, None, None]
        logits, _ = llama.forward_llama(p, ids, mask, rotary_values=rotary, model_config=config)
        return mean_loss(logits, batch["labels"])

    def layer(p: Any, x: jax.Array, batch: Any) -> Any:
        rotary = llama.make_rotary_values(None, *x.shape[:2], model_config=config)
        mask = causal(x.shape[1])[:, None, None]
        return block.forward_decoder_block(p, x, mask, rotary_values=rotary, model_config=config)[0]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> jax.Array:
        x = norm.forward_rms_norm(p.model.norm, x, model_config=config)
        return loss_sum(x @ p.lm_head, batch["targets"])

    parts = {
        "layers": slidedp_jax.Stacked("model.decoder"),
        "embed": lambda p, batch: p.model.embedding[batch["input_ids"]],
        "layer": layer,
        "head_loss": head_loss,
    }
    return Port(
        name=f"llama-2-jax, {num_layers} stacked layers",
        model=moved(params),
        parts=parts,
        whole_loss=whole_loss,
    )


def _big_vision_gemma(num_layers: int) -> Port:
    """big_vision's Gemma (PaliGemma's decoder): Linen, layers stacked by nn.scan, remat."""
    # Its helpers load checkpoints by TensorFlow, which the model itself has no use for.
    for name in ("big_vision.utils", "big_vision.models.common"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.path.insert(0, str(SOURCES / "big_vision"))
    vars(importlib.import_module("big_vision.models"))["common"] = types.ModuleType("common")
    gemma = _load("big_vision_gemma", "big_vision/big_vision/models/ppp/gemma.py")
    shape = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "attn_logits_softcap": 50.0,
        "query_pre_attn_norm": "rsqrt_head_dim",
        "post_norms": True,
    }
    model = gemma.Model(
        variant="small",
        width=32,
        depth=num_layers,
        mlp_dim=48,
        norm_eps=1e-6,
        vocab_size=VOCAB,
        final_logits_softcap=30.0,
        scan=True,
        remat_policy="nothing_saveable",
        **shape,
    )
    block = gemma.Block(embed_dim=32, hidden_dim=48, **shape)
    params = model.init(jax.random.key(0), jnp.ones((2, 16), jnp.int32))["params"]

    def layer(p: Any, x: jax.Array, batch: Any) -> Any:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        return block.apply({"params": p}, x, (), batch["positions"], mask, False)[0]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> jax.Array:
        x = gemma.RMSNorm().apply({"params": p["final_norm"]}, x)
        logits = x @ p["embedder"]["input_embedding"].T
        return loss_sum(jnp.tanh(logits / 30.0) * 30.0, batch["targets"])

    def embed(p: Any, batch: Any) -> Any:
        return p["embedder"]["input_embedding"][batch["input_ids"]] * jnp.sqrt(32.0)

    parts = {
        "layers": slidedp_jax.Stacked("layers"),
        "embed": embed,
        "layer": layer,
        "head_loss": head_loss,
    }
    return Port(
        name="big_vision gemma, stacked layers",
        model=moved(params),
        parts=parts,
        whole_loss=lambda p, b: mean_loss(
            model.apply({"params": p}, b["input_ids"])[0], b["labels"]
        ),
    )


def _nanodo() -> Port:
    """nanodo: Linen, with blocks in a list that `setup` names."""
    sys.path.insert(0, str(SOURCES / "nanodo"))
    nanodo = importlib.import_module("nanodo.model")
    config = nanodo.DoConfig(D=32, H=4, L=32, N=3, V=VOCAB, F=64, fsdp_enabled=False)
    model, block = nanodo.TransformerDo(config), nanodo.TBlock(config)
    params = model.init(jax.random.key(0), jnp.ones((2, 16), jnp.int32))["params"]

    def embed(p: Any, batch: Any) -> Any:
        tokens = p["embed"]["embedding"][batch["input_ids"]]
        return tokens + p["pos_embed"]["embedding"][batch["positions"]]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> jax.Array:
        x = jnp.asarray(nn.LayerNorm(use_bias=False).apply({"params": p["out_ln"]}, x))
        return loss_sum(x @ p["embed"]["embedding"].T, batch["targets"])

    parts = {
        "layers": [f"blocks_{n}" for n in range(3)],
        "embed": embed,
        "layer": lambda p, x, batch: block.apply({"params": p}, x),
        "head_loss": head_loss,
    }
    return Port(
        name="nanodo",
        model=moved(params),
        parts=parts,
        whole_loss=lambda p, b: mean_loss(
            jnp.asarray(model.apply({"params": p}, b["input_ids"])), b["labels"]
        ),
    )
