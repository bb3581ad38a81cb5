"""A small NNX decoder of two kinds of layers, written as a user would, and its parts."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCAB, WIDTH = 41, 16


class Mixer(nnx.Module):
    """A causal running mean, mixed by a matrix."""

    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        y = self.mix(self.norm(x))
        mean = jnp.cumsum(y, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]
        return x + self.drop(mean)


class Gate(nnx.Module):
    """A gated feed-forward layer."""

    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.gain = nnx.Variable(jnp.linspace(0.5, 1.5, WIDTH))  # no nnx.Param: stays as it is

    def __call__(self, x):
        gate, value = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        return x + self.gain[None, None] * self.down(self.drop(jax.nn.silu(gate) * value))


class Hybrid(nnx.Module):
    """Mixers and gates in turn, with learned positions."""

    def __init__(self, rngs, *, tied=True, rate=0.0, max_tokens=32):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (max_tokens, WIDTH)))
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.blocks = nnx.List([kind(rngs, rate) for kind in (Mixer, Gate, Mixer, Gate)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.output = None if tied else nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def logits(self, x):
        x = self.norm(x)
        return self.tokens.attend(x) if self.output is None else self.output(x)

    def __call__(self, ids):
        x = self.drop(self.tokens(ids) + self.places[None, : ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def embed(model, batch):
    places = model.places[...][batch["positions"]]
    return model.drop(model.tokens(batch["input_ids"]) + places)


def layer(block, x, batch):
    return block(x)


def sum_of_losses(logits, targets):
    logits = logits.astype(jnp.float32)
    per_token = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(per_token * (targets >= 0))


def head_loss(model, x, batch):
    return sum_of_losses(model.logits(x), batch["targets"])


PARTS = {
    "layers": "blocks",
    "embed": embed,
    "layer": layer,
    "head_loss": head_loss,
    "vocab_size": VOCAB,
}
