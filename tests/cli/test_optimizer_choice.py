"""`--optim`: what each name does to a matrix and a norm, and runs of two that are not AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import losses

from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.optimizers import make_optimizer, state_bytes
from slidedp_jax.train import main

RATE, DECAY = 1e-2, 0.1
MATRIX, NORM, EMBED = (
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)
SHAPES = {MATRIX: (160, 130), NORM: (130,), EMBED: (140, 130)}


def optimizer(name, **settings):
    return make_optimizer(
        TrainArguments(
            model_name_or_path="m",
            train_file=["f"],
            output_dir="o",
            optim=name,
            learning_rate=RATE,
            weight_decay=DECAY,
            lr_scheduler_type="constant",
            **settings,
        ),
        10,
    )


@pytest.fixture(scope="module")
def params_and_gradients():
    rng = np.random.default_rng(0)
    return [
        {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in s.items()}
        for s in (SHAPES, SHAPES)
    ]


def first_update(name, params, gradients, **settings):
    made = optimizer(name, **settings)
    return jax.jit(lambda g, p: made.update(g, made.init(p), p)[0])(gradients, params)


def test_every_optimizer_decays_matrices_and_not_norms(params_and_gradients):
    params, _ = params_and_gradients
    zero = {name: jnp.zeros_like(value) for name, value in params.items()}
    for name in ("adamw", "lion", "sgd", "adafactor", "muon"):
        updates = first_update(name, params, zero)
        np.testing.assert_allclose(updates[MATRIX], -RATE * DECAY * params[MATRIX], rtol=1e-5)
        assert not updates[NORM].any(), name


def test_first_updates_by_hand(params_and_gradients):
    params, gradients = params_and_gradients
    p, g = params[MATRIX], gradients[MATRIX]
    decay = DECAY * p
    adamw = first_update("adamw", params, gradients)[MATRIX]
    np.testing.assert_allclose(adamw, -RATE * (jnp.sign(g) + decay), rtol=1e-4, atol=1e-7)
    lion = first_update("lion", params, gradients)[MATRIX]
    np.testing.assert_allclose(lion, -RATE * (jnp.sign(g) + decay), rtol=1e-5)
    sgd = first_update("sgd", params, gradients)[MATRIX]
    np.testing.assert_allclose(sgd, -RATE * (g + decay), rtol=1e-5, atol=1e-8)
    made = optimizer("sgd", adam_beta1=0.7)
    zero = {name: jnp.zeros_like(value) for name, value in gradients.items()}

    @jax.jit
    def two_updates(params, gradients, zero):
        state = made.update(gradients, made.init(params), params)[1]
        return made.update(zero, state, params)[0]

    second = two_updates(params, gradients, zero)[MATRIX]
    np.testing.assert_allclose(second, -RATE * (0.7 * g + decay), rtol=1e-5, atol=1e-8)
    # Rows and columns of g**2 have nearly the same mean here, so the factors are nearly its mean.
    adafactor = first_update("adafactor", params, gradients)[MATRIX]
    steepest = np.asarray(-(adafactor / RATE + decay))
    assert np.corrcoef(steepest.ravel(), np.asarray(g).ravel())[0, 1] > 0.98
    assert np.sqrt(np.mean(steepest**2)) == pytest.approx(1, rel=0.05)


def test_muon_takes_the_layers_matrices_and_adam_the_rest(params_and_gradients):
    params, gradients = params_and_gradients
    updates = first_update("muon", params, gradients)
    orthogonal = np.asarray(-(updates[MATRIX] / RATE + DECAY * params[MATRIX]))
    values = np.linalg.svd(orthogonal, compute_uv=False)
    assert values.max() / values.min() < 2  # of the gradient itself: more than 10
    assert np.sqrt(np.mean(orthogonal**2)) == pytest.approx(0.2, rel=0.2)
    for name in (NORM, EMBED):  # not orthogonal, but of one size and the gradient's sign
        # The first step with Nesterov's momentum of 0.9, corrected for bias.
        size = RATE * (0.9 * 0.1 / (1 - 0.9**2) + 0.1 / (1 - 0.9))
        np.testing.assert_allclose(updates[name], -size * jnp.sign(gradients[name]), rtol=1e-3)


def test_state_bytes_are_those_of_the_state():
    size = {name: np.prod(shape) for name, shape in SHAPES.items()}
    total = sum(size.values())
    assert state_bytes(optimizer("adamw"), SHAPES) == pytest.approx(
        ADAMW_STATE_BYTES * total, abs=8
    )
    assert state_bytes(optimizer("lion"), SHAPES) == pytest.approx(4 * total, abs=8)
    assert state_bytes(optimizer("sgd"), SHAPES) == pytest.approx(4 * total, abs=8)
    assert state_bytes(optimizer("sgd", adam_beta1=0.0), SHAPES) <= 8
    factors = 4 * (160 + 130 + 140 + 130 + 130)
    assert factors <= state_bytes(optimizer("adafactor"), SHAPES) < 1.1 * factors
    muon = 4 * size[MATRIX] + 8 * (size[NORM] + size[EMBED])
    assert state_bytes(optimizer("muon"), SHAPES) == pytest.approx(muon, abs=64)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_a_run_with_another_optimizer_learns_and_resumes(name, inputs, tmp_path, capsys):
    out = tmp_path / "run"
    settings = {"optim": name, "learning_rate": 3e-4}
    inputs.train(out, max_steps=2, **settings)
    inputs.train(out, max_steps=4, **settings)
    assert losses(out)[-1] < losses(out)[0]
    assert main(inputs.command(out, max_steps=5, optim="adamw", learning_rate=3e-4)) == 1
    assert f"optim was '{name}', now 'adamw'" in capsys.readouterr().err
