"""Mixtures of experts, streamed: the steps of plain optax, whose reference runs every expert.

Tolerances as in `test_against_plain_optax`. Layers with and without experts alternate in one model,
whose routers' losses are on: those are of the whole step, whatever devices and microbatches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, loss_and_gradients, random_batch
from plain_training import train as train_plainly
from shared_programs import unshared
from streamed_training import (
    assert_bitwise_equal,
    assert_close_to_plain_adam,
    small_config,
    strategy,
    train,
    trainer,
)

from slidedp_jax import TO_BE_RESTORED
from slidedp_jax.models import decoder, experts
from slidedp_jax.models.named_results import decided
from slidedp_jax.models.router_losses import RouterLosses
from slidedp_jax.state.freezing import frozen_names

ROWS, TOKENS, STEPS, RATE = 12, 12, 3, 1e-3
OPTIMIZER = optax.adamw(RATE, eps=1e-5, weight_decay=0.1)
CLIP = 0.5
CONFIG = dataclasses.replace(
    small_config(),
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=24,
    norm_topk_prob=True,
    sparse_layers=(True, False, True, True),
    router_aux_loss_coef=0.3,
)
LOSSES = RouterLosses(load_balance=0.3, z=0.05)


@functools.cache
def batches():
    return [random_batch(CONFIG, ROWS, TOKENS, packed=True, seed=i) for i in range(STEPS)]


@functools.cache
def reference():
    transformation = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZER)
    parameters = initial_parameters(CONFIG)
    return train_plainly(CONFIG, parameters, transformation, batches(), LOSSES.z)


def run(*, devices=1, micro=1, **changes):
    names = {"frozen", "ema_decay"} & changes.keys()
    options = {name: changes.pop(name) for name in names}
    plan = strategy(
        rows_per_microbatch=-(-ROWS // (devices * micro)),
        num_microbatches=micro,
        num_host_devices=2 * devices,
        **changes,
    )
    options = {"max_grad_norm": CLIP, "router_losses": LOSSES, **options}
    parameters = initial_parameters(CONFIG)
    return train(
        CONFIG, OPTIMIZER, plan, batches(), parameters=parameters, num_devices=devices, **options
    )


# Devices, microbatches, kept chunks, layers per chunk, weight and gradient routes.
CASES = {
    (3, 2, 0, 3, "shard_all_gather", "reduce_scatter"),
    (2, 2, 2, 1, "replicate", "host_sum"),
}


@pytest.mark.parametrize(
    "case",
    [
        *sorted(CASES),
        *(
            pytest.param((*numbers, weights, gradients), marks=pytest.mark.thorough)
            for numbers in ((1, 1, 0, 1), (1, 3, 4, 1), (2, 1, 0, 2), (4, 1, 1, 1))
            for weights in ("replicate", "shard_all_gather")
            for gradients in ("reduce_scatter", "host_sum")
        ),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_streamed_steps_equal_plain_optax(case):
    devices, micro, kept, layers, weights, gradients = case
    got = run(
        devices=devices,
        micro=micro,
        kept_chunks=kept,
        layers_per_chunk=layers,
        weight_route=weights,
        gradient_route=gradients,
    )
    assert all(norm > CLIP for norm in reference()[1])
    assert_close_to_plain_adam(got, reference(), learning_rate=RATE)


@pytest.mark.thorough
def test_two_runs_are_one_bit_for_bit():
    assert_bitwise_equal(run(devices=2), run(devices=2))


class OtherChoices:
    """Top-k as it is when it is asked first, and the worst experts when it is asked again."""

    def __init__(self):
        self.asked_again = 0
        self._asked = set()

    def top_k(self, shares, k):
        chosen = jax.ShapeDtypeStruct((*shares.shape[:-1], k), jnp.int32)
        return shares, jax.pure_callback(functools.partial(self._answer, k), chosen, shares)

    def _answer(self, k, shares):
        shares = np.asarray(shares)
        order = np.argsort(-shares, axis=-1, kind="stable").astype(np.int32)
        if shares.tobytes() not in self._asked:
            self._asked.add(shares.tobytes())
            return order[..., :k]
        self.asked_again += 1
        return order[..., -k:]


def gradients_with(monkeypatch, kept, name_it):
    """Gradients of one batch where a second top-k would choose otherwise."""
    host = OtherChoices()

    class Lax:
        top_k = staticmethod(host.top_k)

        def __getattr__(self, name):
            return getattr(jax.lax, name)

    monkeypatch.setattr(experts, "lax", Lax())
    if not name_it:
        monkeypatch.setattr(experts, "decided", lambda values: values)
    config, plan = CONFIG, strategy(rows_per_microbatch=ROWS, kept_chunks=kept)
    parameters = initial_parameters(config)
    with (
        unshared(),  # programs that were traced with another host's choices
        trainer(config, OPTIMIZER, plan, LOSSES, parameters=parameters, num_devices=1) as it,
    ):
        gradients = it.gradients(batches()[0])
    batch = batches()[0]
    with jax.numpy_rank_promotion("allow"):
        _, expected = loss_and_gradients(
            config,
            {name: jnp.asarray(value) for name, value in parameters.items()},
            batch["input_ids"],
            batch["labels"],
            batch["segment_ids"],
            LOSSES.z,
        )
    errors = {n: np.abs(gradients[n] - expected[n]).max() for n in gradients}
    return host.asked_again, errors


@pytest.mark.parametrize("kept", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_backward_is_given_the_choices_of_forward(monkeypatch, kept):
    asked_again, errors = gradients_with(monkeypatch, kept, True)
    assert asked_again == 0
    assert max(errors.values()) < 1e-5


@pytest.mark.thorough
def test_choices_without_the_name_would_be_made_again(monkeypatch):
    """What makes the test above worth something."""
    asked_again, errors = gradients_with(monkeypatch, 0, False)
    assert asked_again
    assert max(errors.values()) > 1e-3
    assert decided is not experts.decided


def one_trainer(losses=LOSSES, config=CONFIG, devices=2, micro=2, **options):
    plan = strategy(
        rows_per_microbatch=ROWS // (devices * micro),
        num_microbatches=micro,
        num_host_devices=2 * devices,
    )
    options = {"parameters": initial_parameters(config), "num_devices": devices} | options
    return trainer(config, OPTIMIZER, plan, losses, **options)


def test_evaluation_and_metrics_have_the_routers_losses():
    batch = batches()[0]
    with one_trainer() as it:
        loss, _ = it.evaluate(batch)
        metrics = it.step(batch)
    assert metrics.loss == loss
    figures = metrics.figures
    expected = 0.3 * figures["load_balance_loss"] + 0.05 * figures["router_z_loss"]
    assert metrics.aux_loss == pytest.approx(expected, rel=1e-6)
    assert metrics.loss == pytest.approx(reference()[0][0], rel=2e-6)
    assert 1 / CONFIG.num_experts < figures["busiest_expert_share"] <= 0.5
    assert 0 < figures["router_entropy"] < np.log(CONFIG.num_experts)


@pytest.mark.thorough
def test_more_rows_than_a_step_takes_are_evaluated_as_one_batch():
    """Router losses are not additive: those of two halves are others than of both together."""
    batch = batches()[0]
    twice = {
        name: np.concatenate([a, b])
        for (name, a), b in zip(batch.items(), batches()[1].values(), strict=True)
    }
    with one_trainer() as it:
        loss, _ = it.evaluate(twice)
    with jax.numpy_rank_promotion("allow"):
        parameters = {n: jnp.asarray(v) for n, v in initial_parameters(CONFIG).items()}
        arrays = (twice["input_ids"], twice["labels"], twice["segment_ids"])
        expected, _ = loss_and_gradients(CONFIG, parameters, *arrays, LOSSES.z)
    assert loss == pytest.approx(float(expected), rel=2e-6)


def test_without_router_losses_there_are_figures_alone():
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=0.0)
    with one_trainer(None, config) as it:
        metrics = it.step(batches()[0])
    assert metrics.aux_loss == 0
    assert metrics.figures["load_balance_loss"] > 1


def test_dense_models_have_no_router_losses():
    with pytest.raises(ValueError, match="no experts, so there are no router losses"):
        decoder.build(small_config(), router_losses=LOSSES)


def test_where_the_state_lies_changes_no_bit():
    """The lowest chunks' experts, routers and moments on the devices, the top ones' results too."""
    changes = {"devices": 2, "micro": 1, "update_policy": "deferred"}
    on_host = run(**changes)
    assert_bitwise_equal(run(resident_chunks=3, **changes), on_host)


FREEZING = {
    "routers": ["*.mlp.gate.weight"],
    "experts": ["*.mlp.experts.*"],
    "below": ["model.embed_tokens.*", "model.layers.[01].*"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", FREEZING)
def test_frozen_parts_are_as_in_plain_optax(what):
    frozen = frozen_names(CONFIG.parameter_shapes(), FREEZING[what])
    labels = {name: "frozen" if name in frozen else "trained" for name in CONFIG.parameter_shapes()}
    trained = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZER)
    plain = optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)
    parameters = initial_parameters(CONFIG)
    losses, _, expected, _ = train_plainly(CONFIG, parameters, plain, batches(), LOSSES.z)
    got = run(devices=2, micro=2, frozen=FREEZING[what])
    np.testing.assert_allclose(got.losses, losses, rtol=2e-6)
    for name, values in expected.items():
        if name in frozen:
            np.testing.assert_array_equal(got.parameters[name], parameters[name], err_msg=name)
        np.testing.assert_allclose(
            got.parameters[name], values, rtol=0, atol=0.01 * RATE, err_msg=name
        )


@pytest.mark.thorough
def test_a_checkpoint_goes_on_as_if_nothing_had_been(tmp_path):
    """Saved on two devices: the same bits on two, the same training on three with other chunks."""
    with one_trainer() as it:
        it.step(batches()[0])
        it.save(tmp_path)
        it.step(batches()[1])
        expected = it.parameters()
    with one_trainer(parameters=TO_BE_RESTORED) as it:
        it.restore(tmp_path)
        it.step(batches()[1])
        again = it.parameters()
    assert all(again[name].tobytes() == values.tobytes() for name, values in expected.items())
    plan = strategy(
        layers_per_chunk=3, rows_per_microbatch=2, num_microbatches=2, num_host_devices=6
    )
    options = {"parameters": TO_BE_RESTORED, "num_devices": 3}
    with trainer(CONFIG, OPTIMIZER, plan, LOSSES, **options) as it:
        it.restore(tmp_path)
        it.step(batches()[1])
        elsewhere = it.parameters()
    for name, values in expected.items():
        np.testing.assert_allclose(elsewhere[name], values, rtol=0, atol=0.01 * RATE, err_msg=name)
