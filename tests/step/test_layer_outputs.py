"""Layers with losses of their own and with choices: streamed training is training in memory.

The reference is `jax.grad` of the whole loss and plain optax (`toy_layers`).
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from lanes import mostly_thorough
from toy_layers import (
    RATE,
    ErringHost,
    assert_equal,
    batches,
    initial_parameters,
    plan,
    streamed,
    train,
    train_plainly,
    trainer,
)

from slidedp_jax import UserError
from slidedp_jax.models.named_results import decided
from slidedp_jax.models.streamed import LayerOutput
from slidedp_jax.state.freezing import frozen_names

KINDS = ("plain", "aux", "router", "aux")

FROZEN = {
    "none": [],
    "lowest": ["embed.*", "layers.[01].*"],
    "routers_and_a_part": ["layers.2.*", "layers.3.v", "scale"],
    "layers": ["embed.*", "layers.*"],
}


@functools.cache
def reference(kinds=KINDS, frozen="none"):
    return train_plainly(kinds, frozen_names(initial_parameters(kinds), FROZEN[frozen]))


# Devices, microbatches, kept chunks, layers per chunk, frozen.
MAIN = {(3, 2, 2, 2, "none")}


@pytest.mark.parametrize(
    "case",
    mostly_thorough(itertools.product((1, 3), (1, 2), (0, 2), (1, 2), FROZEN), MAIN),
    ids=lambda case: "-".join(map(str, case)),
)
def test_steps_are_those_of_plain_optax(case):
    devices, micro, kept, layers, frozen = case
    host = ErringHost()
    model = streamed(KINDS, lambda scores: decided(host(scores)))
    options = {"frozen": FROZEN[frozen]}
    run = train(model, plan(devices, micro, kept, layers), devices, **options)
    assert_equal(run, reference(frozen=frozen))
    assert host.asked_again == 0


@pytest.mark.parametrize("kept", [2, pytest.param(0, marks=pytest.mark.thorough)])
def test_choices_without_the_name_are_made_again(kept):
    """What makes the tests above worth something: the same model, its choices not decided."""
    host = ErringHost()
    steps, _ = train(streamed(KINDS, host), plan(1, 1, kept, 1), 1)
    plain_steps, _ = reference()
    assert host.asked_again
    np.testing.assert_allclose(steps[0][0], plain_steps[0][0], rtol=2e-6)
    gradients = plain_steps[0][2]
    wrong = {n for n, g in gradients.items() if np.abs(steps[0][2][n] - RATE * g).max() > 1e-3}
    # Of the router and of what lies below it.
    assert {"layers.2.gate", "layers.2.experts", "layers.1.w", "embed.table"} <= wrong
    assert not wrong & {"layers.3.w", "layers.3.v", "out", "scale"}


def test_evaluation_is_the_training_loss():
    batch = batches()[0]
    for kept in (0, 2):
        with trainer(streamed(KINDS), plan(3, 2, kept, 2), 3) as it:
            loss, supervised = it.evaluate(batch)
            metrics = it.step(batch)
            assert metrics.loss == loss
            assert metrics.num_supervised_tokens == supervised
            assert 0 < metrics.aux_loss < metrics.loss


def test_a_loss_limit_counts_the_layers_own_losses():
    (loss, aux, _), *_ = reference()[0]
    options = {"max_loss": float(loss - aux / 2), "on_nonfinite": "skip"}
    with trainer(streamed(KINDS), plan(1, 1, 0, 1), 1, **options) as it:
        assert it.step(batches()[0]).skipped


def test_without_losses_of_their_own_there_is_none():
    with trainer(streamed(("plain", "plain")), plan(1, 1, 0, 1), 1) as it:
        assert it.step(batches()[0]).aux_loss == 0


@pytest.mark.parametrize("kind", ["bf16", "vector"])
def test_a_loss_that_is_no_float32_number_is_refused(kind):
    def layer(params, x, batch):
        return LayerOutput(x, jnp.sum(x, axis=None if kind == "bf16" else 0))

    model = streamed(("plain",))
    model = type(model)(**(vars(model) | {"layer_fns": (layer,)}))
    with (
        trainer(model, plan(1, 1, 0, 1, compute_dtype="bfloat16"), 1) as it,
        pytest.raises(UserError, match=r"auxiliary loss is bfloat16\[.*jnp.sum\(..., dtype"),
    ):
        it.step(batches()[0])
