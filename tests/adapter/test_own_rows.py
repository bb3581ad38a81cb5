"""Arrays that a user's batches bring: several numbers per token, and labels that are targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_steps import IGNORED, token_batches
from plain_steps import train as train_plainly
from streamed_steps import adamw, assert_equal_training, strategy, train
from toy_nnx import VOCAB, WIDTH, sum_of_losses

import slidedp_jax
from slidedp_jax import Trainer, UserError
from slidedp_jax.adapter.paths import named_leaves

ROWS, TOKENS, TOP = 5, 6, 3


def tree():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    layers = [draw(WIDTH, WIDTH) for _ in range(2)]
    return {"table": draw(VOCAB, WIDTH), "layers": layers, "out": draw(WIDTH, VOCAB)}


def layer(w, x):
    return x + jnp.tanh(jnp.cumsum(x, axis=1) @ w)


def logits(p, ids):
    x = p["table"][ids]
    for w in p["layers"]:
        x = layer(w, x)
    return x @ p["out"]


PARTS = {
    "layers": "layers",
    "embed": lambda p, batch: p["table"][batch["input_ids"]],
    "layer": lambda w, x, batch: layer(w, x),
    "vocab_size": VOCAB,
}


def distance(logits, batch):
    """Of the student's from the teacher's best guesses, summed over supervised tokens."""
    guesses = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(guesses, batch["teacher_ids"], axis=-1)
    wanted = batch["teacher_log_probs"]
    return jnp.sum((jnp.exp(wanted) * (wanted - own)).sum(axis=-1) * (batch["targets"] >= 0))


def with_teacher():
    rng = np.random.default_rng(1)
    for batch in token_batches(VOCAB, ROWS, TOKENS, 2):
        yield batch | {
            "teacher_ids": rng.integers(0, VOCAB, (ROWS, TOKENS, TOP)),
            "teacher_log_probs": np.log(rng.dirichlet(np.ones(TOP), (ROWS, TOKENS))),
        }


ARRAYS = {
    "teacher_ids": jax.ShapeDtypeStruct((TOP,), "int32"),
    "teacher_log_probs": jax.ShapeDtypeStruct((TOP,), "float32"),
}


def test_several_numbers_for_each_token():
    """On two devices a row fills up."""

    def loss(p, batch, number):
        targets = jnp.pad(batch["labels"][:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        total = distance(logits(p, batch["input_ids"]), {**batch, "targets": targets})
        return total / jnp.sum(targets >= 0)

    parts = PARTS | {
        "head_loss": lambda p, x, batch: distance(x @ p["out"], batch),
        "token_arrays": ARRAYS,
    }
    adapted = slidedp_jax.adapt(tree(), **parts, whole_loss=lambda p, batch: loss(p, batch, 0))
    plain_losses, plain = train_plainly(loss, tree(), adamw(), list(with_teacher()))
    losses, trained = train(adapted, list(with_teacher()), devices=2)
    assert_equal_training(losses, trained, plain_losses, named_leaves(plain))
    plan = strategy(1, ROWS)
    with Trainer(adapted.model, adamw(), strategy=plan, num_devices=1) as trainer:
        (batch, *_) = with_teacher()
        wrong = batch | {"teacher_ids": batch["teacher_ids"][..., :2]}
        with pytest.raises(UserError, match=r"\(5, 6, 2\).*with \(3,\) for each token"):
            trainer.step(wrong)
        del wrong["teacher_ids"]
        with pytest.raises(UserError, match=r"lacks \['teacher_ids'\]"):
            trainer.evaluate(wrong)


@pytest.mark.parametrize("packed", [False, True])
def test_labels_that_are_targets_already(packed):
    """As of masked tokens: what is hidden at t is what t predicts."""
    hidden = []
    for batch in token_batches(VOCAB, ROWS, TOKENS, 2):
        masked = batch["labels"] != IGNORED
        ids = np.where(masked, 0, batch["input_ids"])
        segments = {"segment_ids": np.tile([1, 1, 1, 2, 2, 0], (ROWS, 1))} if packed else {}
        hidden.append({"input_ids": ids, "labels": batch["labels"]} | segments)

    def loss(p, batch, number):
        targets = batch["labels"]
        if packed:
            targets = jnp.where(batch["segment_ids"] > 0, targets, IGNORED)
        return sum_of_losses(logits(p, batch["input_ids"]), targets) / jnp.sum(targets >= 0)

    adapted = slidedp_jax.adapt(
        tree(),
        **PARTS,
        head_loss=lambda p, x, batch: sum_of_losses(x @ p["out"], batch["targets"]),
        shift_labels=False,
        packed=packed,
        whole_loss=lambda p, batch: loss(p, batch, 0),
    )
    plain_losses, plain = train_plainly(loss, tree(), adamw(), hidden)
    losses, trained = train(adapted, hidden, devices=3)
    assert_equal_training(losses, trained, plain_losses, named_leaves(plain))
    with Trainer(adapted.model, adamw(), strategy=strategy(1, ROWS), num_devices=1) as trainer:
        none = hidden[0] | {"labels": np.full((ROWS, TOKENS), IGNORED)}
        with pytest.raises(UserError, match="no supervised token; drop"):
            trainer.step(none)
