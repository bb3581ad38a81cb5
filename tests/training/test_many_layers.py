"""More than ten layers: names sorted as text would run, save or restore them in another order."""

import jax
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, mean_loss, random_batch
from streamed_training import small_config, strategy, trainer

OPTIMIZER = optax.adamw(1e-2)


@pytest.mark.parametrize("layers", [12, pytest.param(101, marks=pytest.mark.thorough)])
def test_the_decoder_runs_its_layers_in_order(layers, tmp_path):
    config = small_config(layers=layers)
    params = initial_parameters(config)
    batch = random_batch(config, 8, 6, packed=False)
    plan = strategy(layers_per_chunk=layers // 5)
    with trainer(config, OPTIMIZER, plan, parameters=params, num_devices=2) as it:
        segments = np.ones_like(batch["input_ids"])
        with jax.numpy_rank_promotion("allow"):
            expected = mean_loss(config, params, batch["input_ids"], batch["labels"], segments)
        # fp32 through many layers, in another order of sums.
        np.testing.assert_allclose(it.evaluate(batch)[0], expected, rtol=1e-5)
        saved = it.save(tmp_path)
    other = strategy(layers_per_chunk=7)
    with trainer(config, OPTIMIZER, other, num_devices=2) as it:
        it.restore(saved)
        for name, values in it.parameters().items():
            np.testing.assert_array_equal(values, params[name], err_msg=name)
