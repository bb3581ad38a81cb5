"""Models written with Equinox and with Haiku."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from port_training import VOCAB, Port, causal, loss_sum, mean_loss, moved

WIDTH = 32


def ports() -> Iterator[Callable[[], Port]]:
    """One after the other."""
    yield lambda: _equinox(3)
    yield lambda: _haiku(12)


class Layer(eqx.Module):
    """Attention and feed-forward over one row."""

    norms: list[Any]
    attend: Any
    mlp: Any

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.norms = [eqx.nn.RMSNorm(WIDTH) for _ in range(2)]
        self.attend = eqx.nn.MultiheadAttention(4, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attend(h, h, h, causal(len(x))[0])
        mixed: jax.Array = x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return mixed


class Decoder(eqx.Module):
    """Embedding, layers, head, over one row."""

    embed: Any
    layers: list[Layer]
    norm: Any
    head: Any

    def __init__(self, num_layers: int, key: jax.Array):
        keys = jax.random.split(key, num_layers + 2)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.layers = [Layer(key) for key in keys[2:]]
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[1])

    def logits(self, x: jax.Array) -> Any:
        """[T, D] -> [T, V]."""
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    def __call__(self, ids: jax.Array) -> Any:
        """[T] -> [T, V]."""
        x = jax.vmap(self.embed)(ids)
        for layer in self.layers:
            x = layer(x)
        return self.logits(x)


def _equinox(num_layers: int) -> Port:
    arrays, rest = eqx.partition(Decoder(num_layers, jax.random.key(0)), eqx.is_inexact_array)

    def whole(p: Any) -> Any:
        return eqx.combine(p, rest)

    parts = {
        "layers": "layers",
        "embed": lambda p, batch: jax.vmap(jax.vmap(whole(p).embed))(batch["input_ids"]),
        "layer": lambda p, x, batch: jax.vmap(eqx.combine(p, rest.layers[0]))(x),
        "head_loss": lambda p, x, batch: loss_sum(jax.vmap(whole(p).logits)(x), batch["targets"]),
    }
    return Port(
        name="Equinox",
        model=moved(arrays),
        parts=parts,
        whole_loss=lambda p, b: mean_loss(jax.vmap(whole(p))(b["input_ids"]), b["labels"]),
    )


def _haiku(num_layers: int) -> Port:
    def block(x: jax.Array) -> Any:
        h = hk.LayerNorm(-1, True, True)(x)
        attend = hk.MultiHeadAttention(
            4, 8, model_size=WIDTH, w_init=hk.initializers.VarianceScaling(1.0)
        )
        x = x + attend(h, h, h, mask=causal(x.shape[1])[None])
        return x + hk.nets.MLP([2 * WIDTH, WIDTH])(hk.LayerNorm(-1, True, True)(x))

    layer = hk.without_apply_rng(hk.transform(block))
    keys = jax.random.split(jax.random.key(0), num_layers + 2)
    params = {
        "embed": 0.3 * jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "layers": [layer.init(key, jnp.ones((1, 16, WIDTH))) for key in keys[2:]],
        "out": 0.2 * jax.random.normal(keys[1], (WIDTH, VOCAB)),
    }

    def whole_loss(p: Any, batch: Any) -> jax.Array:
        x = p["embed"][batch["input_ids"]]
        for own in p["layers"]:
            x = layer.apply(own, x)
        return mean_loss(x @ p["out"], batch["labels"])

    parts = {
        "layers": "layers",
        "embed": lambda p, batch: p["embed"][batch["input_ids"]],
        "layer": lambda p, x, batch: layer.apply(p, x),
        "head_loss": lambda p, x, batch: loss_sum(x @ p["out"], batch["targets"]),
    }
    return Port(
        name=f"Haiku, {num_layers} layers",
        model=moved(params),
        parts=parts,
        whole_loss=whole_loss,
        # A bias of keys has no gradient but rounding.
        update_tolerance=2.0,
    )
