"""What a script sees and changes between steps: hyperparameters, state, gradients, weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from optax import contrib
from toy_layers import batches, initial_parameters, plain_losses, plan, streamed

from slidedp_jax import Trainer, UserError

KINDS = ("plain", "aux", "plain")
RATE = 1e-2


def start(optimizer, strategy=None, devices=2, **options):
    return Trainer(
        streamed(KINDS),
        optimizer,
        strategy=strategy or plan(devices, 1, 0, 2),
        parameters=initial_parameters(KINDS),
        num_devices=devices,
        kernel_form="whole",
        **{"max_grad_norm": None} | options,
    )


@jax.jit
def value_and_grad(params, batch):
    def loss(params):
        return plain_losses(KINDS, params, batch["input_ids"], batch["labels"])[0]

    return jax.value_and_grad(loss)(params)


def plain_steps(optimizer):
    """A function of parameters, state and batch to parameters and state."""

    @jax.jit
    def step(params, state, batch):
        _, gradients = value_and_grad(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def params_and_state(optimizer):
    params = {name: jnp.asarray(values) for name, values in initial_parameters(KINDS).items()}
    return params, optimizer.init(params)


def assert_near(got, wanted, atol=1e-6):
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=atol, err_msg=name)


def injected():
    return optax.inject_hyperparams(optax.adamw)(learning_rate=RATE, weight_decay=0.1, eps=1e-4)


@pytest.mark.thorough
def test_hyperparameters_change_between_steps(tmp_path):
    optimizer = injected()
    stepped = plain_steps(optimizer)
    params, state = params_and_state(optimizer)
    for number, batch in enumerate(batches()):
        if number == 1:
            state.hyperparams["learning_rate"] = jnp.float32(RATE / 10)
            state.hyperparams["weight_decay"] = jnp.float32(0.5)
        params, state = stepped(params, state, batch)
    first, *others = batches()
    with start(optimizer) as trainer:
        assert trainer.hyperparameters["learning_rate"] == np.float32(RATE)
        trainer.step(first)
        trainer.set_hyperparameters(learning_rate=RATE / 10, weight_decay=0.5)
        assert trainer.hyperparameters["learning_rate"] == np.float32(RATE / 10)
        folder = trainer.save(tmp_path)
    with start(optimizer) as trainer:
        trainer.restore(folder)
        assert trainer.hyperparameters["weight_decay"] == 0.5
        for batch in others:
            trainer.step(batch)
        assert_near(trainer.parameters(), params)


def test_hyperparameters_that_cannot_be_set():
    scheduled = optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.0, RATE, 3)
    )
    with start(scheduled) as trainer:
        assert "learning_rate" not in trainer.hyperparameters
        with pytest.raises(UserError, match="learning_rate follows a schedule"):
            trainer.set_hyperparameters(learning_rate=1.0)
    with start(optax.adamw(RATE)) as trainer:
        assert trainer.hyperparameters == {}
        with pytest.raises(UserError, match=r"keeps no hyperparameter 'rate'.*inject_hyperparams"):
            trainer.set_hyperparameters(rate=1.0)


def test_hyperparameters_of_one_name_have_their_label():
    def labels(params):
        return {name: "slow" if name.startswith("layers.0") else "fast" for name in params}

    def sgd(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    with start(optax.multi_transform({"slow": sgd(0.1), "fast": sgd(0.2)}, labels)) as trainer:
        rates = trainer.hyperparameters
        assert rates == {
            "fast.learning_rate": pytest.approx(0.2),
            "slow.learning_rate": pytest.approx(0.1),
        }
        before, batch = trainer.parameters(), batches()[0]
        trainer.set_hyperparameters(**{"slow.learning_rate": 0.0})
        trainer.step(batch)
        after = trainer.parameters()
    assert {n for n in before if (before[n] == after[n]).all()} == {"layers.0.w"}


def test_optimizer_state_by_name():
    optimizer = optax.adamw(RATE)
    stepped = plain_steps(optimizer)
    params, state = params_and_state(optimizer)
    for batch in batches():
        params, state = stepped(params, state, batch)
    with start(optimizer, frozen=["scale"], ema_decay=0.5) as trainer:
        for batch in batches():
            trainer.step(batch)
        found = {name: trainer.optimizer_state(name) for name in ("scale", "layers.1.v")}
        with pytest.raises(UserError, match="no parameter 'layer'"):
            trainer.optimizer_state("layer")
    assert found["scale"] == {}
    wanted = ["ScaleByAdamState.mu", "ScaleByAdamState.nu", "WithAverageState.average"]
    assert list(found["layers.1.v"]) == wanted
    moment = found["layers.1.v"]["ScaleByAdamState.mu"]
    assert np.abs(moment).max() > 1e-5
    # `scale` is not trained there, which moves the gradients of later steps a little.
    np.testing.assert_allclose(moment, state[0].mu["layers.1.v"], rtol=0.1, atol=1e-4)
    with start(optax.sm3(RATE)) as trainer:
        trainer.step(batches()[0])
        rows = trainer.optimizer_state("out")
    assert [(key, values.shape) for key, values in rows.items()] == [
        ("ScaleBySM3State.mu[0]", (8,)),
        ("ScaleBySM3State.mu[1]", (29,)),
        ("ScaleBySM3State.nu", (8, 29)),
    ]


PLANS = {
    "two devices": (2, {}),
    "host sum": (2, {"gradient_route": "host_sum"}),
    "resident": (2, {"resident_chunks": 2}),
    "eager": (1, {"update_policy": "eager"}),
}


@pytest.mark.parametrize("name", mostly_thorough(PLANS, ("two devices",)))
def test_gradients_change_nothing(name):
    devices, changes = PLANS[name]
    strategy = plan(devices, 2, 0, 2, **changes)
    first, second, _ = batches()
    optimizer = optax.adamw(RATE)
    with start(optimizer, strategy, devices) as trainer:
        trainer.step(first)
        trainer.step(second)
        undisturbed = trainer.parameters()
    with start(optimizer, strategy, devices) as trainer:
        trainer.step(first)
        found = trainer.gradients(second)
        chosen = trainer.gradients(second, ["layers.1.v", "out"])
        params = {key: jnp.asarray(values) for key, values in trainer.parameters().items()}
        _, wanted = value_and_grad(params, second)
        trainer.step(second)
        for key, values in trainer.parameters().items():
            np.testing.assert_array_equal(values, undisturbed[key], err_msg=key)
        with pytest.raises(UserError, match=r"\['w'\] are no trained parameters"):
            trainer.gradients(second, ["w"])
    assert_near(found, wanted)
    assert chosen.keys() == {"layers.1.v", "out"}
    np.testing.assert_array_equal(chosen["out"], found["out"])


def test_gradients_of_frozen_parameters_and_of_an_idle_trainer():
    with start(optax.sgd(RATE), frozen=["out"]) as trainer:
        assert "out" not in trainer.gradients(batches()[0])
        with pytest.raises(UserError, match=r"\['out'\] are no trained"):
            trainer.gradients(batches()[0], ["out"])
    with (
        start(optax.sgd(RATE), inference_only=True) as trainer,
        pytest.raises(UserError, match="inference_only"),
    ):
        trainer.gradients(batches()[0])


def loss_at(params, batch):
    values = {name: jnp.asarray(value) for name, value in params.items()}
    return float(value_and_grad(values, batch)[0])


@pytest.mark.parametrize("resident", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_evaluation_at_the_average(resident):
    strategy = plan(2, 1, 0, 2, resident_chunks=resident)
    first, second, last = batches()
    options = {"frozen": ["scale"], "ema_decay": 0.6}
    with start(optax.adamw(RATE), strategy, **options) as trainer:
        for batch in (first, second, last):
            trainer.step(batch)
        undisturbed = trainer.parameters()
    with start(optax.adamw(RATE), strategy, **options) as trainer:
        trainer.step(first)
        trainer.step(second)
        weights, averages = trainer.parameters(), trainer.averaged_parameters()
        here, _ = trainer.evaluate(last)
        with trainer.evaluating():
            there, _ = trainer.evaluate(last)
            for key, values in trainer.parameters().items():
                np.testing.assert_array_equal(values, averages[key], err_msg=key)
            assert trainer.step_count == 2
        assert trainer.evaluate(last)[0] == here
        for key, values in trainer.averaged_parameters().items():
            np.testing.assert_array_equal(values, averages[key], err_msg=key)
        trainer.step(last)
        for key, values in trainer.parameters().items():
            np.testing.assert_array_equal(values, undisturbed[key], err_msg=key)
    np.testing.assert_allclose(here, loss_at(weights, last), rtol=2e-6)
    np.testing.assert_allclose(there, loss_at(averages, last), rtol=2e-6)
    assert abs(here - there) > 1e-4


def test_evaluation_at_weights_of_ones_own():
    """As of schedule-free optimizers, whose weights to use are made of weights and state."""
    optimizer = contrib.schedule_free_adamw(RATE, b1=0.9)
    params, state = params_and_state(optimizer)
    stepped = plain_steps(optimizer)
    first, second, last = batches()
    for batch in (first, second):
        params, state = stepped(params, state, batch)
    wanted = contrib.schedule_free_eval_params(state, params)
    with start(optimizer) as trainer:
        trainer.step(first)
        trainer.step(second)
        own = {
            name: (y - 0.1 * trainer.optimizer_state(name)["ScheduleFreeState.z"]) / 0.9
            for name, y in trainer.parameters().items()
        }
        assert_near(own, wanted, atol=1e-5)
        before = trainer.parameters()
        with trainer.evaluating(own):
            there, _ = trainer.evaluate(last)
        for key, values in trainer.parameters().items():
            np.testing.assert_array_equal(values, before[key], err_msg=key)
    np.testing.assert_allclose(there, loss_at(wanted, last), rtol=1e-5)


def test_there_is_no_step_and_no_checkpoint_of_other_weights(tmp_path):
    (batch, *_) = batches()
    with start(optax.adamw(RATE), ema_decay=0.6) as trainer:
        trainer.step(batch)
        folder = trainer.save(tmp_path)
        before = trainer.parameters()
        with pytest.raises(ZeroDivisionError), trainer.evaluating():
            for action in (
                lambda: trainer.step(batch),
                lambda: trainer.save(tmp_path / "other"),
                lambda: trainer.restore(folder),
                lambda: trainer.evaluating({}).__enter__(),
            ):
                with pytest.raises(UserError, match="leave the `with` block first"):
                    action()
            raise ZeroDivisionError
        for key, values in trainer.parameters().items():
            np.testing.assert_array_equal(values, before[key], err_msg=key)
        for weights, match in (
            ({"w": np.ones(2)}, "no parameter 'w'"),
            ({"scale": np.ones(2)}, r"scale has shape \(8,\), the weights \(2,\)"),
        ):
            with pytest.raises(UserError, match=match), trainer.evaluating(weights):
                pass
        trainer.step(batch)
    with (
        start(optax.adamw(RATE)) as trainer,
        pytest.raises(UserError, match="no average is kept"),
        trainer.evaluating(),
    ):
        pass
