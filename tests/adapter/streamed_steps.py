"""Streamed training of an adapted model on CPU devices."""

import jax
import numpy as np
import optax

from slidedp_jax import Adapted, Trainer
from slidedp_jax.planner.strategy import Strategy

LEARNING_RATE = 1e-3

TOLERANCE = 0.01 * LEARNING_RATE
"""Of weights. Both sides compute in fp32 and sum in different orders; Adam turns a gradient that is
itself a rounding residue into an arbitrary part of a step, which eps bounds."""


def adamw() -> optax.GradientTransformation:
    return optax.adamw(LEARNING_RATE, eps=1e-5, weight_decay=0.1)


def strategy(
    devices: int, rows: int, *, microbatches: int = 1, layers: int = 1, kept: int = 0
) -> Strategy:
    return Strategy(
        layers_per_chunk=layers,
        kept_chunks=kept,
        rows_per_microbatch=-(-rows // (devices * microbatches)),
        num_microbatches=microbatches,
        compute_dtype="float32",
        num_host_devices=2 * devices,
        block_size=256,
    )


def train(adapted: Adapted, batches, *, devices: int, seed: int = 0, **changes):
    """Losses of every step and the last weights by name."""
    plan = strategy(devices, len(batches[0]["input_ids"]), **changes)
    options = {"max_grad_norm": None, "num_devices": devices, "kernel_form": "whole", "seed": seed}
    with (
        jax.numpy_rank_promotion("allow"),
        Trainer(adapted.model, adamw(), strategy=plan, **options) as trainer,
    ):
        losses = [trainer.step(batch).loss for batch in batches]
        return losses, trainer.parameters()


def assert_equal_training(losses, parameters, plain_losses, plain_parameters) -> None:
    """Losses to a few units in the last place, all weights within `TOLERANCE`."""
    np.testing.assert_allclose(losses, plain_losses, rtol=2e-6)
    assert parameters.keys() == plain_parameters.keys()
    for name, values in plain_parameters.items():
        np.testing.assert_allclose(
            parameters[name], np.asarray(values), rtol=0, atol=TOLERANCE, err_msg=name
        )
