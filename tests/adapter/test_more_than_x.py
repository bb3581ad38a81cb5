"""What layers read and hand on beside x: their index, and values for the layers above."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_steps import next_token_loss, token_batches
from plain_steps import train as train_plainly
from streamed_steps import adamw, assert_equal_training, strategy, train
from toy_nnx import VOCAB, WIDTH, sum_of_losses

import slidedp_jax
from slidedp_jax import Trainer, UserError
from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.adapter.workload import measured_workload

ROWS, TOKENS, LAYERS, KEYS = 4, 8, 4, 3


def batches():
    return token_batches(VOCAB, ROWS, TOKENS, 3)


def tree():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    layers = [{"w": draw(WIDTH, WIDTH), "k": draw(WIDTH, KEYS)} for _ in range(LAYERS)]
    return {"table": draw(VOCAB, WIDTH), "layers": layers, "scale": draw(WIDTH)}


def mix(layer, x, keys):
    """Attends to earlier tokens by `keys` [B, T, K]."""
    scores = jnp.einsum("btd,dk,bsk->bts", x, layer["k"], keys)
    near = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None]
    weights = jax.nn.softmax(jnp.where(near, scores, -1e9), axis=-1)
    return x + jnp.tanh(weights @ x @ layer["w"])


def logits(p, x):
    return (x * p["scale"][None, None]) @ p["table"].T


PARTS = {
    "layers": "layers",
    "embed": lambda p, batch: p["table"][batch["input_ids"]],
    "head_loss": lambda p, x, batch: sum_of_losses(logits(p, x), batch["targets"]),
    "vocab_size": VOCAB,
}


def trained_plainly(forward):
    def loss(p, batch, number):
        return next_token_loss(logits(p, forward(p, batch["input_ids"])), batch["labels"])

    losses, plain = train_plainly(loss, tree(), adamw(), batches())
    return losses, named_leaves(plain)


def indexed(layer, x, index):
    rate = jnp.asarray([1.0, 0.5, 0.25, 0.125])[index]
    return mix(layer, x, rate * (x @ layer["k"]))


@pytest.mark.parametrize(
    ("devices", "layers", "kept"), [(2, 2, 0), pytest.param(1, 1, 2, marks=pytest.mark.thorough)]
)
def test_a_layers_index(devices, layers, kept):
    adapted = slidedp_jax.adapt(
        tree(), **PARTS, layer=lambda p, x, batch: indexed(p, x, batch["layer_index"])
    )
    assert adapted.model.indexed
    assert len(set(adapted.model.layer_fns)) == 1

    def forward(p, ids):
        x = p["table"][ids]
        for number, layer in enumerate(p["layers"]):
            x = indexed(layer, x, number)
        return x

    losses, trained = train(
        adapted, batches(), devices=devices, layers=layers, microbatches=2, kept=kept
    )
    assert_equal_training(losses, trained, *trained_plainly(forward))
    plan = strategy(devices, ROWS, layers=layers, microbatches=2, kept=kept)
    options = {"num_devices": devices, "kernel_form": "whole"}
    with Trainer(adapted.model, adamw(), strategy=plan, **options) as trainer:
        value, _ = trainer.evaluate(batches()[0])
    np.testing.assert_allclose(value, losses[0], rtol=2e-6)
    with jax.numpy_rank_promotion("allow"):
        assert measured_workload(adapted.model, tokens_per_row=8).layers[0].matmul_parameters > 0


def test_an_index_that_is_not_read_costs_nothing():
    adapted = slidedp_jax.adapt(tree(), **PARTS, layer=lambda p, x, _: mix(p, x, x @ p["k"]))
    assert not adapted.model.indexed
    with pytest.raises(UserError, match=r"batch\['layer_index'\].*only layer has an index"):
        slidedp_jax.adapt(
            tree(),
            **PARTS | {"embed": lambda p, batch: p["table"][batch["layer_index"]]},
            layer=lambda p, x, _: x,
        )


def shared_layer(p, states, batch):
    """The first layer's keys are what all layers attend by; `of_layers` holds an input of each."""
    x, keys = states["x"], states["keys"]
    keys = jnp.where(batch["layer_index"] == 0, x @ p["k"], keys)
    own = jnp.take(states["of_layers"], batch["layer_index"], axis=2)
    return states | {"x": mix(p, x + own, keys), "keys": keys}


def begin(p, batch):
    x = p["table"][batch["input_ids"]]
    of_layers = x[:, :, None] * jnp.arange(1.0, LAYERS + 1)[None, None, :, None]
    return {"x": x, "keys": jnp.zeros((*x.shape[:2], KEYS), x.dtype), "of_layers": of_layers}


SHARED_PARTS = PARTS | {
    "embed": begin,
    "layer": shared_layer,
    "head_loss": lambda p, states, batch: sum_of_losses(logits(p, states["x"]), batch["targets"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "layers"), [(2, 2), (1, 1)])
def test_values_for_the_layers_above(devices, layers):
    adapted = slidedp_jax.adapt(tree(), **SHARED_PARTS)

    def forward(p, ids):
        states = begin(p, {"input_ids": ids})
        keys = states["x"] @ p["layers"][0]["k"]
        x = states["x"]
        for number, layer in enumerate(p["layers"]):
            x = mix(layer, x + states["of_layers"][:, :, number], keys)
        return x

    losses, trained = train(adapted, batches(), devices=devices, layers=layers, microbatches=2)
    assert_equal_training(losses, trained, *trained_plainly(forward))
    work = measured_workload(adapted.model, tokens_per_row=8)
    # Of bf16, in which it is planned, states that stay in float32 are twice as many.
    assert work.hidden_size == 2 * (WIDTH + KEYS + LAYERS * WIDTH)

    def whole(p, batch):
        return next_token_loss(logits(p, forward(p, batch["input_ids"])), batch["labels"])

    assert adapted.check(whole).largest_difference < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
def test_parts_of_a_dict_come_back_as_they_were_joined(dtype):
    adapted = slidedp_jax.adapt(tree(), **SHARED_PARTS, check_loss=False)
    params = jax.tree.map(lambda a: a.astype(dtype), {"table": tree()["table"]})
    batch = {"input_ids": jnp.arange(6).reshape(2, 3)}
    x = adapted.model.embed_fn(params, batch)
    assert x.shape == (2, 3, WIDTH + KEYS + LAYERS * WIDTH)
    layer = jax.tree.map(lambda a: a.astype(dtype), tree()["layers"][0])
    index = {"layer_index": jnp.zeros(1, jnp.int32)}
    out = adapted.model.layer_fns[0](layer, x, batch | index)
    assert out.dtype == x.dtype
    # Sorted by name: keys, of_layers, x.
    states = begin(params, batch)
    wanted = shared_layer(layer, states, batch | {"layer_index": 0})
    np.testing.assert_allclose(
        out[..., :KEYS].astype(np.float32), wanted["keys"].astype(np.float32), rtol=1e-2
    )
    np.testing.assert_array_equal(
        out[..., KEYS:-WIDTH].reshape(2, 3, LAYERS, WIDTH), states["of_layers"].astype(x.dtype)
    )


def test_dicts_that_do_not_fit():
    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            slidedp_jax.adapt(tree(), **(SHARED_PARTS | changes))

    refused(
        r"layer at layers\.0 returned .*a dict of the floats \['keys', 'of_layers', 'x'\]",
        layer=lambda p, states, batch: shared_layer(p, states, batch)["x"],
    )
    refused(
        r"layer at layers\.0 turned hidden states of shape \(1, 16, 3\) into \(1, 16, 2\)",
        layer=lambda p, states, batch: states | {"keys": states["keys"][..., :2]},
    )
    refused(
        r"embed returned .*'mask': 'bool",
        embed=lambda p, batch: begin(p, batch) | {"mask": batch["input_ids"][..., None] > 0},
    )
    refused(
        r"layer at layers\.0 returned .*one array.*dict of arrays",
        embed=PARTS["embed"],
        layer=lambda p, x, batch: {"x": x, "keys": x},
    )


@pytest.mark.thorough
def test_a_dict_and_a_loss_of_the_layers():
    def layer(p, states, batch):
        states = shared_layer(p, states, batch)
        size = jnp.sum(jnp.square(states["keys"]), axis=-1, dtype=jnp.float32)
        return states, 0.01 * jnp.sum(size * (batch["targets"] >= 0))

    adapted = slidedp_jax.adapt(tree(), **(SHARED_PARTS | {"layer": layer}))
    one, _ = train(adapted, batches(), devices=1)
    three, _ = train(adapted, batches(), devices=3)
    np.testing.assert_allclose(one, three, rtol=2e-6)
