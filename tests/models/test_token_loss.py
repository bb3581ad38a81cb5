"""Label smoothing and z-loss in both forms of the head's loss, against the formula and PyTorch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from slidedp_jax.models.loss import cross_entropy_sum
from slidedp_jax.models.sliced_loss import (
    add_to_statistics,
    log_sums,
    no_statistics,
    slice_gradients,
    token_losses,
)
from slidedp_jax.models.token_loss import TokenLoss

TOKENS, HIDDEN, VOCAB, BLOCK = 19, 12, 37, 8
SETTINGS = [
    TokenLoss(label_smoothing=0.1, z_loss_coef=3e-2),
    pytest.param(TokenLoss(label_smoothing=0.3), marks=pytest.mark.thorough),
    pytest.param(TokenLoss(z_loss_coef=0.1), marks=pytest.mark.thorough),
]


def draw(scale=1.0):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32)
    weight = jnp.asarray(scale * rng.standard_normal((VOCAB, HIDDEN)), jnp.float32)
    targets = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    targets[::5] = -100
    return x, weight, jnp.asarray(targets)


def plain(x, weight, targets, token_loss):
    """From all logits at once, by the definition: cross-entropy with a smoothed distribution."""
    logits = x @ weight.T
    wanted = jax.nn.one_hot(targets, VOCAB)
    smoothing = token_loss.label_smoothing
    wanted = (1 - smoothing) * wanted + smoothing / VOCAB
    losses = -jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)
    losses += token_loss.z_loss_coef * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(targets == -100, 0.0, losses).sum()


def in_slices(x, weight, targets, token_loss, rows):
    """Loss, and gradients of hidden states and weight, by the two passes."""
    padded = jnp.pad(weight, ((0, -VOCAB % rows), (0, 0)))
    slices = [(jnp.int32(first), padded[first : first + rows]) for first in range(0, VOCAB, rows)]
    sizes = {"vocab_size": VOCAB, "hidden_fn": lambda x: x, "block_tokens": BLOCK}
    found = no_statistics(TOKENS, token_loss)
    for first, own in slices:
        found = add_to_statistics(found, own, first, x, targets, **sizes)
    loss = token_losses(found, targets, token_loss, vocab_size=VOCAB).sum()
    d_hidden, d_weight = jnp.zeros(x.shape), []
    for first, own in slices:
        d_hidden, d_rows = slice_gradients(
            d_hidden,
            jnp.zeros(own.shape),
            own,
            first,
            x,
            targets,
            log_sums(found),
            jnp.where(targets == -100, 0.0, -1.0),
            token_loss=token_loss,
            **sizes,
        )
        d_weight.append(d_rows)
    return loss, (d_hidden, jnp.concatenate(d_weight))


@pytest.mark.parametrize("scale", [1.0, pytest.param(50.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("token_loss", SETTINGS)
def test_one_pass_and_slices_equal_the_formula(token_loss, scale):
    x, weight, targets = draw(scale)

    def by_definition(x, weight):
        return plain(x, weight, targets, token_loss)

    loss, gradients = plain_model.quick_jit(jax.value_and_grad(by_definition, (0, 1)))(x, weight)

    def one_pass(x, weight):
        return cross_entropy_sum(x, weight, targets, chunk_tokens=BLOCK, token_loss=token_loss)

    got, own = plain_model.quick_jit(jax.value_and_grad(one_pass, argnums=(0, 1)))(x, weight)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    np.testing.assert_allclose(plain_model.quick_jit(one_pass)(x, weight), loss, rtol=1e-5)
    for gradient, expected in zip(own, gradients, strict=True):
        assert np.linalg.norm(gradient - expected) <= 1e-5 * np.linalg.norm(expected)
    with jax.debug_nans(True):
        got, own = jax.jit(in_slices, static_argnums=(3, 4))(x, weight, targets, token_loss, 10)
    np.testing.assert_allclose(got, loss, rtol=2e-5)
    for gradient, expected in zip((own[0], own[1][:VOCAB]), gradients, strict=True):
        assert np.linalg.norm(gradient - expected) <= 2e-5 * np.linalg.norm(expected)
    assert not own[1][VOCAB:].any()  # rows after the vocabulary's end have no share in the mean


@pytest.mark.parity
def test_smoothing_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    x, weight, targets = draw()
    settings = {"chunk_tokens": BLOCK, "token_loss": TokenLoss(label_smoothing=0.2)}
    got = plain_model.quick_jit(functools.partial(cross_entropy_sum, **settings))(
        x, weight, targets
    )
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(np.asarray(x @ weight.T)),
        torch.tensor(np.asarray(targets)).long(),
        label_smoothing=0.2,
        reduction="sum",
    )
    np.testing.assert_allclose(got, expected.item(), rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"label_smoothing": 1.0}, {"z_loss_coef": -1e-4}])
def test_coefficients_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        TokenLoss(**wrong)
