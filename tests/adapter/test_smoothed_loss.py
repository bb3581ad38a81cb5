"""An adapted model whose loss has label smoothing and z-loss: step, gradients and evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from streamed_training import strategy

import slidedp_jax
from slidedp_jax import Trainer
from slidedp_jax.models.loss import cross_entropy_sum
from slidedp_jax.models.token_loss import TokenLoss

DIM, VOCAB, ROWS, TOKENS = 8, 23, 4, 9
TOKEN_LOSS = TokenLoss(label_smoothing=0.2, z_loss_coef=1e-2)


def layer(p, x, batch):
    return x + jnp.tanh(x @ p["w"])


def head_loss(p, x, batch):
    targets = batch["targets"].reshape(-1)
    flat = x.reshape(-1, DIM)
    return cross_entropy_sum(flat, p["out"], targets, chunk_tokens=7, token_loss=TOKEN_LOSS)


def plain(tree, ids, labels):
    """The mean of the smoothed cross-entropy and the z-loss, from all logits."""
    x = tree["table"][ids]
    for own in tree["layers"]:
        x = x + jnp.tanh(x @ own["w"])
    logits = x[:, :-1] @ tree["out"].T
    wanted = labels[:, 1:]
    smoothed = 0.8 * jax.nn.one_hot(wanted, VOCAB) + 0.2 / VOCAB
    losses = -jnp.sum(smoothed * jax.nn.log_softmax(logits), axis=-1)
    losses += 1e-2 * jax.nn.logsumexp(logits, axis=-1) ** 2
    counts = wanted != -100
    return jnp.sum(losses * counts) / jnp.sum(counts)


def test_an_adapted_models_smoothed_loss_is_that_of_plain_jax():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    tree = {
        "table": draw(VOCAB, DIM),
        "layers": [{"w": draw(DIM, DIM)}, {"w": draw(DIM, DIM)}],
        "out": draw(VOCAB, DIM),
    }
    ids = rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
    labels = np.where(rng.random(ids.shape) < 0.3, -100, ids).astype(np.int32)
    adapted = slidedp_jax.adapt(
        tree,
        layers="layers",
        embed=lambda p, batch: p["table"][batch["input_ids"]],
        layer=layer,
        head_loss=head_loss,
        vocab_size=VOCAB,
    )
    with jax.numpy_rank_promotion("allow"):
        loss, gradients = jax.jit(jax.value_and_grad(plain))(tree, ids, labels)
    batch = {"input_ids": ids, "labels": labels}
    with Trainer(
        adapted.model,
        optax.sgd(1e-2),
        strategy=strategy(rows_per_microbatch=2, num_microbatches=2),
        kernel_form="whole",
        num_devices=1,
    ) as trainer:
        evaluated, _ = trainer.evaluate(batch)
        got = trainer.gradients(batch)
        stepped = trainer.step(batch).loss
    np.testing.assert_allclose([evaluated, stepped], [loss, loss], rtol=2e-6)
    for name, expected in (("table", gradients["table"]), ("out", gradients["out"])):
        np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-6)
