"""Layers with losses of their own and with choices: streamed training is training in memory.

The reference is `jax.grad` of the whole loss and plain optax. Gradients are compared as such, since
AdamW would hide a wrong scale: with SGD without momentum a step's gradient is what the weights have
lost. Both sides compute in fp32 and sum in different orders.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_layers
from streamed_training import strategy
from toy_layers import ErringHost, initial_parameters, streamed, token_batches

from slidedp_jax import Trainer, UserError
from slidedp_jax.models.named_results import decided
from slidedp_jax.models.streamed import LayerOutput
from slidedp_jax.state.freezing import frozen_names

ROWS, TOKENS, RATE = 11, 6, 0.5  # a row fills up on three devices or in two microbatches
OPTIMIZER = optax.sgd(RATE)
KINDS = ("plain", "aux", "router", "aux")

FROZEN = {
    "none": [],
    "lowest": ["embed.*", "layers.[01].*"],
    "routers_and_a_part": ["layers.2.*", "layers.3.v", "scale"],
    "layers": ["embed.*", "layers.*"],
}


def batches():
    return token_batches(ROWS, TOKENS, 3)


@functools.cache
def reference(kinds=KINDS, frozen="none"):
    names = frozen_names(initial_parameters(kinds), FROZEN[frozen])
    return toy_layers.train_plainly(kinds, OPTIMIZER, batches(), names)


def plan(devices, microbatches, kept, layers, **changes):
    return strategy(
        rows_per_microbatch=-(-ROWS // (devices * microbatches)),
        num_microbatches=microbatches,
        kept_chunks=kept,
        layers_per_chunk=layers,
        num_host_devices=2 * devices,
        block_size=64,
        **changes,
    )


def trainer(model, plan, devices, **options):
    options = {"max_grad_norm": None, "kernel_form": "whole"} | options
    return Trainer(model, OPTIMIZER, strategy=plan, num_devices=devices, **options)


def train(model, plan, devices, **options):
    """Per step (loss, own part, weights lost by name); the last weights."""
    with trainer(model, plan, devices, **options) as it:
        steps, before = [], it.parameters()
        for batch in batches():
            metrics = it.step(batch)
            after = it.parameters()
            lost = {name: before[name] - after[name] for name in before}
            steps.append((metrics.loss, metrics.aux_loss, lost))
            before = after
        return steps, before


def assert_equal(run, plain):
    (steps, parameters), (plain_steps, plain_parameters) = run, plain
    for (loss, aux, lost), (plain_loss, plain_aux, gradients) in zip(
        steps, plain_steps, strict=True
    ):
        np.testing.assert_allclose(loss, plain_loss, rtol=2e-6)
        np.testing.assert_allclose(aux, plain_aux, rtol=2e-6)
        for name, gradient in gradients.items():
            # Weights around 1 lose 2e-7 by rounding.
            np.testing.assert_allclose(lost[name], RATE * gradient, atol=1e-6, err_msg=name)
    for name, values in plain_parameters.items():
        np.testing.assert_allclose(parameters[name], values, atol=2e-6, err_msg=name)


# Devices, microbatches, kept chunks, layers per chunk, frozen: every pair of values occurs.
MAIN = {
    (1, 1, 0, 1, "none"),
    (3, 2, 2, 2, "none"),
    (1, 2, 2, 1, "lowest"),
    (3, 1, 0, 2, "lowest"),
    (3, 1, 2, 1, "routers_and_a_part"),
    (1, 2, 0, 2, "routers_and_a_part"),
    (1, 1, 2, 2, "layers"),
    (3, 2, 0, 1, "layers"),
}


@pytest.mark.parametrize(
    "case",
    [
        case if case in MAIN else pytest.param(case, marks=pytest.mark.thorough)
        for case in itertools.product((1, 3), (1, 2), (0, 2), (1, 2), FROZEN)
    ],
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


@pytest.mark.parametrize("kept", [0, 2])
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
            # Kept or not, forward is compiled apart from evaluation's.
            np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
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
