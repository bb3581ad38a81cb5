"""The moving average of the weights, against one computed from the weights after every step."""

import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from plain_training import initial_parameters, random_batch
from streamed_training import small_config, strategy, trainer

from slidedp_jax import UserError
from slidedp_jax.update.average import with_average

CONFIG = small_config(layers=2)
DECAY = 0.75


def labels(params):
    return {name: "frozen" if ".layers.0." in name else "trained" for name in params}


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "whole_parameters": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "some_frozen": optax.multi_transform(
        {"trained": optax.sgd(1e-1), "frozen": optax.set_to_zero()}, labels
    ),
}


def start(name, **options):
    options = {"ema_decay": DECAY, "num_devices": 1, "kernel_form": "blocked"} | options
    return trainer(
        CONFIG,
        OPTIMIZERS[name],
        strategy(),
        parameters=initial_parameters(CONFIG),
        frozen=["model.norm.weight"],
        **options,
    )


def batches():
    return [random_batch(CONFIG, 4, 12, packed=False, seed=i) for i in range(4)]


@pytest.mark.parametrize("name", mostly_thorough(OPTIMIZERS, ("adamw",)))
def test_the_average_is_that_of_the_weights_after_each_step(name):
    """Both in fp32; a contraction may save the kernel one rounding per step."""
    expected = initial_parameters(CONFIG)
    with start(name) as it:
        for batch in batches():
            it.step(batch)
            for key, values in it.parameters().items():
                expected[key] += np.float32(1 - DECAY) * (values - expected[key])
        weights, averages = it.parameters(), it.averaged_parameters()
        for key, values in expected.items():
            np.testing.assert_allclose(averages[key], values, rtol=2e-6, atol=1e-7, err_msg=key)
            still = key == "model.norm.weight" or (name == "some_frozen" and ".layers.0." in key)
            assert np.array_equal(averages[key], weights[key]) == still, key


@pytest.mark.thorough
def test_the_average_changes_no_weight_but_by_rounding():
    runs = []
    for decay in (None, DECAY):
        with start("adamw", ema_decay=decay) as it:
            for batch in batches():
                it.step(batch)
            runs.append(it.parameters())
    for key, values in runs[0].items():
        np.testing.assert_allclose(runs[1][key], values, rtol=0, atol=2e-5, err_msg=key)


def test_the_average_is_in_checkpoints_and_costs_four_bytes(tmp_path):
    rows = batches()
    with start("adamw") as it:
        for batch in rows[:2]:
            it.step(batch)
        path = it.save(tmp_path)
        it.step(rows[2])
        expected = it.averaged_parameters()
        with_it, elements = it.store.owned_bytes, sum(p.layout.padded_size for p in it.store.parts)
        frozen = sum(p.layout.padded_size for p in it.store.parts if not p.layout.trained)
    with start("adamw") as it:
        it.restore(path)
        it.step(rows[2])
        averages = it.averaged_parameters()
        assert all(averages[key].tobytes() == values.tobytes() for key, values in expected.items())
    with start("adamw", ema_decay=None) as it:
        assert with_it - it.store.owned_bytes == 4 * (elements - frozen)
        with pytest.raises(UserError, match="no average is kept"):
            it.averaged_parameters()
        with pytest.raises(UserError, match="holds optimizer state"):
            it.restore(path)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1, float("nan")])
def test_a_decay_outside_is_refused(decay):
    with pytest.raises(ValueError, match=r"between 0 and 1"):
        with_average(optax.sgd(1.0), decay)
