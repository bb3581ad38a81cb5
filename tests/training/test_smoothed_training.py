"""Label smoothing and z-loss in whole trainings equal plain JAX and optax, and so in evaluation.

One pass over the vocabulary, two passes over slices of it, and layers in blocks of tokens; tied and
untied, one device and two.
"""

import functools

import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import assert_close_to_plain_adam, small_config, strategy, train, trainer

from slidedp_jax.models.token_loss import TokenLoss

RATE, ROWS, TOKENS, STEPS = 1e-3, 8, 12, 2
TOKEN_LOSS = TokenLoss(label_smoothing=0.1, z_loss_coef=1e-2)
ADAM = functools.partial(optax.adamw, RATE, eps=1e-5, weight_decay=0.1)

CASES = [
    pytest.param({}, id="one_pass", marks=pytest.mark.thorough),
    pytest.param({"tied": True, "devices": 2, "vocab_slices": 4}, id="slices"),
    pytest.param(
        {"vocab_slices": 4, "slice_head_weights": True, "layer_block_tokens": 5},
        id="slices_and_blocks",
        marks=pytest.mark.thorough,
    ),
    pytest.param(
        {"tied": True, "devices": 2, "kept_chunks": 1}, id="tied", marks=pytest.mark.thorough
    ),
]


def batches(config):
    return [random_batch(config, ROWS, TOKENS, packed=True, seed=i) for i in range(STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_smoothed_steps_equal_plain_optax(case):
    case = {"tied": False, "devices": 1, "loss_chunk_tokens": 10} | case
    config = small_config(tied=case.pop("tied"), layers=2)
    devices = case.pop("devices")
    expected = train_plainly(
        config,
        initial_parameters(config),
        ADAM(),
        batches(config),
        smoothing=TOKEN_LOSS.label_smoothing,
        z_loss=TOKEN_LOSS.z_loss_coef,
    )
    plan = strategy(rows_per_step=ROWS, num_devices=devices, **case)
    options = {
        "parameters": initial_parameters(config),
        "num_devices": devices,
        "max_grad_norm": None,
        "token_loss": TOKEN_LOSS,
    }
    got = train(config, ADAM(), plan, batches(config), **options)
    assert_close_to_plain_adam(got, expected, learning_rate=RATE)
    with trainer(config, ADAM(), plan, **options) as it:
        loss, _ = it.evaluate(batches(config)[0])
    np.testing.assert_allclose(loss, got.losses[0], rtol=1e-6)
