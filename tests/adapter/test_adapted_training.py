"""Adapted NNX, Linen and plain models: streamed training is training in memory."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_steps import next_token_loss, token_batches
from plain_steps import train as train_plainly
from streamed_steps import adamw, assert_equal_training, train
from toy_nnx import PARTS, VOCAB, WIDTH, Hybrid, sum_of_losses

import slidedp_jax
from slidedp_jax.adapter.paths import named_leaves

ROWS, TOKENS, STEPS = 6, 9, 5


def batches():
    return token_batches(VOCAB, ROWS, TOKENS, STEPS)


@pytest.mark.parametrize(
    ("tied", "devices"), [(True, 3), pytest.param(False, 1, marks=pytest.mark.thorough)]
)
def test_a_hybrid_nnx_model(tied, devices):
    model = Hybrid(nnx.Rngs(1), tied=tied)
    adapted = slidedp_jax.adapt(model, **PARTS)
    fns = adapted.model.layer_fns
    assert fns[0] is fns[2]
    assert fns[1] is fns[3]
    assert fns[0] is not fns[1]
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def loss(parameters, batch, number):
        return next_token_loss(
            nnx.merge(graph, parameters, rest)(batch["input_ids"]), batch["labels"]
        )

    plain_losses, plain = train_plainly(loss, parameters, adamw(), batches())
    losses, trained = train(adapted, batches(), devices=devices, layers=2, microbatches=2)
    assert_equal_training(losses, trained, plain_losses, named_leaves(nnx.to_pure_dict(plain)))
    assert adapted.write_back(trained) is model
    after = jax.jit(lambda ids, labels: next_token_loss(model(ids), labels))(*batches()[0].values())
    assert float(after) < losses[0]
    for name, values in named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))).items():
        np.testing.assert_array_equal(values, trained[name], err_msg=name)


class Block(nn.Module):
    """A Linen layer: what came before, averaged, then a feed-forward."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(WIDTH)(nn.RMSNorm()(x))
        x = x + jnp.cumsum(y, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


class LinenDecoder(nn.Module):
    """Three blocks between an embedding and an output projection of its own."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(ids)
        for index in range(3):
            x = Block(name=f"block_{index}")(x)
        return nn.Dense(VOCAB, name="output")(nn.RMSNorm(name="norm")(x))


def linen_parts():
    return {
        "layers": [f"block_{index}" for index in range(3)],
        "embed": lambda p, batch: nn.Embed(VOCAB, WIDTH).apply(
            {"params": p["tokens"]}, batch["input_ids"]
        ),
        "layer": lambda p, x, batch: Block().apply({"params": p}, x),
        "head_loss": lambda p, x, batch: sum_of_losses(
            nn.Dense(VOCAB).apply(
                {"params": p["output"]}, nn.RMSNorm().apply({"params": p["norm"]}, x)
            ),
            batch["targets"],
        ),
        "vocab_size": VOCAB,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [3, 1])
def test_a_linen_model(devices):
    model = LinenDecoder()
    with jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), batches()[0]["input_ids"])["params"]
        adapted = slidedp_jax.adapt(params, **linen_parts())
        assert not adapted.model.tied
        assert len(set(adapted.model.layer_fns)) == 1

        def loss(params, batch, number):
            return next_token_loss(
                model.apply({"params": params}, batch["input_ids"]), batch["labels"]
            )

        plain_losses, plain = train_plainly(loss, params, adamw(), batches())
    losses, trained = train(adapted, batches(), devices=devices)
    assert_equal_training(losses, trained, plain_losses, named_leaves(plain))
    new = adapted.write_back(trained)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    np.testing.assert_array_equal(
        new["block_2"]["Dense_1"]["kernel"], trained["block_2.Dense_1.kernel"]
    )


def plain_layer(layer, x):
    y = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * layer["scale"][None, None]
    return x + jnp.tanh(jnp.cumsum(y, axis=1) @ layer["w"])


@pytest.mark.parametrize("devices", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_plain_pytree_with_a_loss_of_its_own(devices):
    """Each token has a weight, the logits' size a penalty; on four devices rows fill up."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.2 * rng.standard_normal(shape), jnp.float32)

    layers = tuple({"scale": 1 + draw(WIDTH), "w": draw(WIDTH, WIDTH)} for _ in range(3))
    params = {"table": draw(VOCAB, WIDTH), "layers": layers, "bias": draw(VOCAB)}

    def token_losses(params, x, targets):
        logits = x @ params["table"].T + params["bias"][None, None]
        z = jax.nn.logsumexp(logits, axis=-1)
        wanted = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(targets >= 0, z - wanted + 0.01 * z**2, 0.0)

    adapted = slidedp_jax.adapt(
        params,
        layers="layers",
        embed=lambda p, batch: p["table"][batch["input_ids"]],
        layer=lambda p, x, batch: plain_layer(p, x),
        head_loss=lambda p, x, batch: jnp.sum(
            token_losses(p, x, batch["targets"]) * batch["weights"]
        ),
        vocab_size=VOCAB,
        token_arrays={"weights": "float32"},
    )
    assert adapted.model.tied

    def loss(params, batch, number):
        x = params["table"][batch["input_ids"]]
        for layer in params["layers"]:
            x = plain_layer(layer, x)
        losses = token_losses(params, x[:, :-1], batch["labels"][:, 1:])
        weighted = losses * batch["weights"][:, :-1]
        return jnp.sum(weighted) / jnp.sum(batch["labels"][:, 1:] >= 0)

    weighted = [batch | {"weights": rng.random((ROWS, TOKENS))} for batch in batches()]
    plain_losses, plain = train_plainly(loss, params, adamw(), weighted)
    losses, trained = train(adapted, weighted, devices=devices, layers=2)
    assert_equal_training(losses, trained, plain_losses, named_leaves(plain))
    new = adapted.write_back(trained)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    np.testing.assert_array_equal(new["layers"][1]["w"], trained["layers.1.w"])
