"""What a row draws depends on seed, step, its place and the layer, and on nothing else.

The reference runs the user's own module row by row, with keys folded by hand.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_steps import next_token_loss, token_batches
from plain_steps import train as train_plainly
from streamed_steps import adamw, assert_equal_training, strategy, train
from toy_nnx import PARTS, VOCAB, WIDTH, Hybrid, head_loss, sum_of_losses

import slidedp_jax
from slidedp_jax import Trainer
from slidedp_jax.adapter.paths import named_leaves

ROWS, TOKENS, STEPS, RATE = 3, 9, 2, 0.4


def batches():
    return token_batches(VOCAB, ROWS, TOKENS, STEPS)


def folded(*parts):
    key = jax.random.key(parts[0], impl="threefry2x32")
    for part in parts[1:]:
        key = jax.random.fold_in(key, part)
    return key


def with_key(module: nnx.Module, key: jax.Array, path: bytes) -> nnx.Module:
    """The module with its one stream of random numbers started anew at `key`."""
    graph, keys, counts, rest = nnx.split(module, nnx.RngKey, nnx.RngCount, ...)
    assert len(jax.tree.leaves(keys)) == 1
    keys = jax.tree.map(lambda _: jax.random.fold_in(key, zlib.crc32(path)), keys)
    return nnx.merge(graph, keys, jax.tree.map(jnp.zeros_like, counts), rest)


def starting_values(model, stage):
    return {
        name: jnp.asarray(model.initial_value(name, leaf.shape, 0))
        for name, leaf in stage.shapes.items()
    }


@pytest.fixture(scope="module")
def reference():
    graph, parameters, rest = nnx.split(Hybrid(nnx.Rngs(1), rate=RATE), nnx.Param, ...)

    def loss(parameters, batch, step):
        def of_row(row):
            model = nnx.merge(graph, parameters, rest)
            ids = batch["input_ids"][row][None]
            x = model.tokens(ids) + model.places[...][None, :TOKENS]
            x = with_key(model.drop, folded(7, step, row, 0), b"drop.rngs.key")(x)
            for index, block in enumerate(model.blocks):
                x = with_key(block, folded(7, step, row, index + 1), b"drop.rngs.key")(x)
            return model.logits(x)[0]

        return next_token_loss(jax.lax.map(of_row, jnp.arange(ROWS)), batch["labels"])

    losses, parameters = train_plainly(loss, parameters, adamw(), batches())
    return losses, named_leaves(nnx.to_pure_dict(parameters))


@pytest.mark.parametrize(
    ("devices", "microbatches", "layers"),
    [(2, 2, 3), pytest.param(3, 1, 2, marks=pytest.mark.thorough)],
)
def test_masks_are_those_of_the_rule(devices, microbatches, layers, reference):
    """On two devices padding rows fill up and the chunks' layers differ."""
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=RATE), **PARTS, dropout=True)
    losses, parameters = train(
        adapted, batches(), devices=devices, microbatches=microbatches, layers=layers, seed=7
    )
    assert_equal_training(losses, parameters, *reference)


def test_masks_differ_between_steps_rows_and_seeds():
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=RATE), **PARTS, dropout=True)
    model = adapted.model
    params = starting_values(model, model.embed)
    row = jnp.asarray(batches()[0]["input_ids"][:1])
    batch = {"input_ids": jnp.tile(row, (2, 1)), "positions": jnp.tile(jnp.arange(TOKENS), (2, 1))}

    def hidden(seed, step):
        seeds = jnp.asarray([[seed, step, 0], [seed, step, 1]], jnp.uint32)
        return np.asarray(model.embed_fn(params, {**batch, "row_seeds": seeds}))

    first = hidden(0, 1)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, hidden(0, 2))
    assert not np.array_equal(first, hidden(1, 1))
    np.testing.assert_array_equal(first, hidden(0, 1))


@pytest.mark.thorough
def test_evaluation_draws_nothing():
    model = Hybrid(nnx.Rngs(1), rate=RATE)
    adapted = slidedp_jax.adapt(model, **PARTS, dropout=True)
    with Trainer(
        adapted.model, adamw(), strategy=strategy(3, ROWS), num_devices=3, kernel_form="whole"
    ) as trainer:
        loss, _ = trainer.evaluate(batches()[0])
        again, _ = trainer.evaluate(batches()[0])
        trained = trainer.step(batches()[0]).loss
    assert loss == again
    assert abs(trained - loss) > 1e-3
    model.eval()
    expected = next_token_loss(model(batches()[0]["input_ids"]), batches()[0]["labels"])
    np.testing.assert_allclose(loss, expected, rtol=2e-6)


def test_functions_find_their_key_in_the_batch():
    """A plain model with noise in its layers, against the noise drawn by hand."""
    rng = np.random.default_rng(0)
    params = {
        "table": jnp.asarray(rng.standard_normal((VOCAB, WIDTH)), jnp.float32),
        "layers": [jnp.ones(WIDTH), jnp.ones(WIDTH)],
        "scale": jnp.ones(WIDTH),
    }

    def noisy(w, x, key):
        return x * w[None, None] + 0.1 * jax.random.normal(key, x.shape)

    adapted = slidedp_jax.adapt(
        params,
        layers=["layers.0", "layers.1"],
        embed=lambda p, batch: p["table"][batch["input_ids"]],
        layer=lambda w, x, batch: noisy(w, x, batch["key"]) if "key" in batch else x,
        head_loss=lambda p, x, batch: sum_of_losses(
            (x * p["scale"][None, None]) @ p["table"].T, batch["targets"]
        ),
        vocab_size=VOCAB,
        dropout=True,
    )

    def loss(params, batch, step):
        rows = []
        for row in range(ROWS):
            x = params["table"][batch["input_ids"][row : row + 1]]
            for index, w in enumerate(params["layers"]):
                x = noisy(w, x, folded(7, step, row, index + 1))
            rows.append((x * params["scale"][None, None]) @ params["table"].T)
        return next_token_loss(jnp.concatenate(rows), batch["labels"])

    plain_losses, plain = train_plainly(loss, params, adamw(), batches())
    losses, trained = train(adapted, batches(), devices=2, layers=1, seed=7)
    assert_equal_training(losses, trained, plain_losses, named_leaves(plain))


@pytest.mark.thorough
def test_a_head_that_draws_is_summed_over_rows():
    def noisy_head(model, x, batch):
        return head_loss(model, model.drop(x), batch)

    parts = PARTS | {"head_loss": noisy_head}
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=RATE), **parts, dropout=True)
    model = adapted.model
    head = starting_values(model, model.head)
    table = starting_values(model, model.embed)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, TOKENS, WIDTH)), jnp.float32)
    batch = {"targets": jnp.ones((2, TOKENS), jnp.int32)}
    seeds = jnp.asarray([[7, 1, 0], [7, 1, 1]], jnp.uint32)

    def loss(rows):
        own = {"targets": batch["targets"][rows], "row_seeds": seeds[rows]}
        return float(model.head_loss_fn(head, table, x[rows], own))

    apart = loss(slice(0, 1)) + loss(slice(1, 2))
    np.testing.assert_allclose(loss(slice(0, 2)), apart, rtol=1e-6)
    assert abs(apart - float(model.head_loss_fn(head, table, x, batch))) > 1e-3


class Handed(nnx.Module):
    """A layer that holds no random numbers and is handed them in the call."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(RATE, deterministic=False)

    def __call__(self, x, rngs):
        return x + self.drop(self.linear(x), rngs=rngs, deterministic=rngs is None)


def of_batch(batch):
    key = batch.get("key")
    return None if key is None else nnx.Rngs(dropout=key)


def handed():
    model = Hybrid(nnx.Rngs(1))
    model.blocks = nnx.List([Handed(nnx.Rngs(n)) for n in range(2)])
    return model


def test_rngs_that_modules_are_handed():
    parts = PARTS | {"layer": lambda block, x, batch: block(x, of_batch(batch))}
    adapted = slidedp_jax.adapt(handed(), **parts, dropout=True)
    graph, parameters, rest = nnx.split(handed(), nnx.Param, ...)

    def loss(parameters, batch, step):
        model = nnx.merge(graph, parameters, jax.tree.map(jnp.asarray, rest))
        logits = []
        for row in range(ROWS):
            x = model.tokens(batch["input_ids"][row : row + 1]) + model.places[...][None, :TOKENS]
            for index, block in enumerate(model.blocks):
                x = block(x, nnx.Rngs(dropout=folded(7, step, row, index + 1)))
            logits.append(model.logits(x))
        return next_token_loss(jnp.concatenate(logits), batch["labels"])

    plain_losses, plain = train_plainly(loss, parameters, adamw(), batches())
    losses, trained = train(adapted, batches(), devices=2, seed=7)
    plain = named_leaves(nnx.to_pure_dict(plain))
    assert_equal_training(losses, trained, plain_losses, plain)


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("where", ["layer", "layer in a loop", "embed", "head_loss"])
def test_a_key_made_inside_a_function_is_noticed(where, dropout):
    def noise(x):
        return x + 0.1 * nnx.Rngs(0).normal(x.shape)

    def looped(x):
        return jax.lax.fori_loop(0, 2, lambda _, y: jax.checkpoint(noise)(y), x)

    parts = {
        "layer": {"layer": lambda block, x, batch: noise(block(x))},
        "layer in a loop": {"layer": lambda block, x, batch: looped(block(x))},
        "embed": {"embed": lambda model, batch: noise(PARTS["embed"](model, batch))},
        "head_loss": {"head_loss": lambda model, x, batch: head_loss(model, noise(x), batch)},
    }[where]
    what = where.split(" ")[0]
    with pytest.raises(slidedp_jax.UserError, match=f"{what}.* draws random numbers from a key"):
        slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=0.0), **(PARTS | parts), dropout=dropout)


def test_numbers_that_are_always_the_same_are_drawn_outside():
    fixed = jax.random.normal(jax.random.key(0), (WIDTH,))
    parts = PARTS | {"layer": lambda block, x, batch: block(x) + fixed[None, None]}
    slidedp_jax.adapt(Hybrid(nnx.Rngs(1)), **parts)
    unread = PARTS | {
        "layer": lambda block, x, batch: block(x) + 0 * len(nnx.Rngs(0).normal((2,)).shape)
    }
    slidedp_jax.adapt(Hybrid(nnx.Rngs(1)), **unread)


def test_dropout_that_nothing_uses_is_warned_of(caplog):
    slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=0.0), **PARTS, dropout=True)
    assert "dropout=True, but neither" in caplog.text
    caplog.clear()
    slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=RATE), **PARTS, dropout=True)
    assert not caplog.text
