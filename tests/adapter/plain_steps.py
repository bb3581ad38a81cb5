"""Training in memory of a user's own model: jax.grad, optax and nothing of the project."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

IGNORED = -100


def token_batches(vocab_size: int, num_rows: int, num_tokens: int, num_steps: int):
    """Batches of random rows with a few unsupervised tokens."""
    rng = np.random.default_rng(3)
    shape = (num_steps, num_rows, num_tokens)
    ids = rng.integers(0, vocab_size, shape, dtype=np.int32)
    labels = np.where(rng.random(shape) < 0.3, IGNORED, ids).astype(np.int32)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def next_token_loss(logits, labels):
    """Mean cross-entropy of the supervised next tokens."""
    log_probabilities = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
    wanted = labels[:, 1:]
    counts = wanted != IGNORED
    index = jnp.where(counts, wanted, 0)[..., None]
    picked = jnp.take_along_axis(log_probabilities, index, axis=-1)[..., 0]
    return -jnp.sum(picked * counts) / jnp.sum(counts)


def train(loss, parameters, optimizer: optax.GradientTransformation, batches):
    """One step per batch of `loss(parameters, batch, step)`; losses and the last parameters."""
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch, number):
        value, gradients = jax.value_and_grad(loss)(parameters, batch, number)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    losses = []
    for number, batch in enumerate(batches, start=1):
        parameters, state, value = step(parameters, state, batch, number)
        losses.append(float(value))
    return losses, parameters
