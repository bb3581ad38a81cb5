"""Other models on PyPI: a state-space model, and two with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from dantinox.core.config import ModelConfig
from dantinox.core.model import Transformer
from flax import linen as nn
from flax import nnx
from mamba2_jax import modeling as mamba2
from nano_moe.config import NanoMoEConfig
from nano_moe.layers import TransformerBlock
from nano_moe.model import NanoMoE
from port_training import VOCAB, Port, loss_sum, mean_loss, moved


def ports() -> Iterator[Callable[[], Port]]:
    """One after the other."""
    yield _mamba2
    yield _nano_moe
    yield _dantinox


def _mamba2() -> Port:
    """mamba2-jax, an NNX module whose layers return their states too, and keep their number."""
    config = mamba2.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=8,
        head_dim=8,
        chunk_size=8,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    )

    def head_loss(m: Any, x: jax.Array, batch: Any) -> jax.Array:
        x = m.backbone.final_norm(x)
        return loss_sum(x @ m.backbone.embedder.embedding[...].T, batch["targets"])

    parts = {
        "layers": "backbone.layers",
        "embed": lambda m, batch: m.backbone.embedder(batch["input_ids"]),
        "layer": lambda block, x, batch: block(x)[0],
        "head_loss": head_loss,
    }
    return Port(
        name="mamba2-jax",
        model=moved(mamba2.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))),
        parts=parts,
        whole_loss=lambda m, batch: mean_loss(m(batch["input_ids"])["logits"], batch["labels"]),
    )


def _nano_moe() -> Port:
    """nano-moe-jax, Linen with experts.

    Its balance loss, a product of means over the batch, is no sum over rows and is left out.
    """
    config = NanoMoEConfig(
        vocab_size=VOCAB, n_layers=3, d_model=32, d_ff=48, n_experts=4, block_size=16
    )
    model = NanoMoE(config)
    params = model.init(jax.random.key(0), jnp.ones((2, 16), jnp.int32))["params"]

    def embed(p: Any, batch: Any) -> Any:
        ids = batch["input_ids"]
        return p["Embed_0"]["embedding"][ids] + p["pos_emb"][:, : ids.shape[1]]

    def head_loss(p: Any, x: jax.Array, batch: Any) -> jax.Array:
        x = jnp.asarray(nn.LayerNorm().apply({"params": p["LayerNorm_0"]}, x))
        logits = nn.Dense(VOCAB).apply({"params": p["Dense_0"]}, x)
        return loss_sum(jnp.asarray(logits), batch["targets"])

    parts = {
        "layers": [f"block_{n}" for n in range(3)],
        "embed": embed,
        "layer": lambda p, x, batch: TransformerBlock(config).apply({"params": p}, x)[0],
        "head_loss": head_loss,
    }

    def whole_loss(p: Any, batch: Any) -> jax.Array:
        logits, _ = model.apply({"params": p}, batch["input_ids"])
        return mean_loss(logits, batch["labels"])

    return Port(
        name="nano-moe-jax, experts",
        model=moved(params),
        parts=parts,
        whole_loss=whole_loss,
        update_tolerance=0.05,
    )


def _dantinox() -> Port:
    """dantinox, an NNX module with experts, whose router balances per batch (left out here)."""
    config = ModelConfig(
        vocab_size=VOCAB,
        dim=32,
        n_heads=4,
        num_blocks=3,
        max_context=32,
        ffn="moe",
        n_experts=4,
        top_k=2,
    )
    model = Transformer(config, rngs=nnx.Rngs(0))

    def embed(m: Any, batch: Any) -> Any:
        return m._add_pos(m.embed(batch["input_ids"]), 0)

    parts = {
        "layers": "blocks",
        "embed": embed,
        "layer": lambda block, x, batch: block(x, deterministic=True)[0],
        "head_loss": lambda m, x, b: loss_sum(m._unembed(m.norm_f(x)), b["targets"]),
    }
    return Port(
        name="dantinox, experts",
        model=moved(model),
        parts=parts,
        whole_loss=lambda m, b: mean_loss(
            m(b["input_ids"], deterministic=True).logits, b["labels"]
        ),
        update_tolerance=0.05,
    )
