"""Weights of adapted models on their way in, back, and through checkpoints."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_steps import token_batches
from streamed_steps import adamw, strategy
from toy_nnx import PARTS, VOCAB, Hybrid

import slidedp_jax
from slidedp_jax import Trainer, UserError

ROWS, TOKENS = 4, 9


def trainer(devices: int, layers: int, seed: int = 1) -> Trainer:
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(seed)), **PARTS, check_loss=False)
    plan = strategy(devices, ROWS, layers=layers)
    return Trainer(adapted.model, adamw(), strategy=plan, num_devices=devices, kernel_form="whole")


@pytest.mark.thorough
def test_a_checkpoint_goes_on_with_other_devices_and_chunks(tmp_path):
    batches = token_batches(VOCAB, ROWS, TOKENS, 3)
    with trainer(2, 2) as first:
        first.step(batches[0])
        folder = first.save(tmp_path)
        saved = first.parameters()
        expected = first.step(batches[1]).loss
    with trainer(1, 4, seed=2) as second:
        assert second.restore(folder).step == 1
        for name, values in second.parameters().items():
            np.testing.assert_array_equal(values, saved[name], err_msg=name)
        np.testing.assert_allclose(second.step(batches[1]).loss, expected, rtol=2e-6)


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    def start(**configuration):
        adapted = slidedp_jax.adapt(
            Hybrid(nnx.Rngs(1)), **PARTS, check_loss=False, configuration=configuration
        )
        return Trainer(adapted.model, adamw(), strategy=strategy(1, ROWS), num_devices=1)

    with start(rope_theta=10_000, shape=(2, 3)) as first:
        folder = first.save(tmp_path)
    with start(rope_theta=10_000, shape=[2, 3]) as second:
        assert second.restore(folder).step == 0
    with (
        start(rope_theta=500_000, shape=[2, 3]) as third,
        pytest.raises(UserError, match="another model configuration: rope_theta"),
    ):
        third.restore(folder)
    with pytest.raises(UserError, match=r"cannot be written as JSON.*str\(\) of a dtype"):
        start(dtype=jnp.bfloat16)


def test_each_weight_returns_in_its_own_dtype():
    model = Hybrid(nnx.Rngs(1))
    up = model.blocks[1].up
    up.kernel = nnx.Param(up.kernel[...].astype(jnp.bfloat16))
    adapted = slidedp_jax.adapt(model, **PARTS, check_loss=False)
    names = [name for stage in adapted.model.stages() for name in stage.parameter_names()]
    start = {name: adapted.model.initial_value(name, (), 0) for name in names}
    assert {values.dtype for values in start.values()} == {np.dtype(np.float32)}
    adapted.write_back({name: values + 1 for name, values in start.items()})
    kernel = up.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    wanted = (start["blocks.1.up.kernel"] + 1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(kernel), wanted)
    assert model.norm.scale[...].dtype == jnp.float32
    np.testing.assert_array_equal(model.norm.scale[...], start["norm.scale"] + 1)


def test_one_variable_at_two_places_ties_embedding_and_head():
    model = Hybrid(nnx.Rngs(1))
    model.a_projection = model.tokens.embedding

    def head_loss(module, x, batch):
        hidden = module.norm(x)
        scores = (hidden @ module.a_projection[...].T).astype(jnp.float32)
        return jnp.sum(scores.max(axis=-1) * (batch["targets"] >= 0))

    adapted = slidedp_jax.adapt(model, **(PARTS | {"head_loss": head_loss}))
    assert adapted.model.tied
    names = [name for stage in adapted.model.stages() for name in stage.parameter_names()]
    assert "a_projection" in names
    assert "tokens.embedding" not in names
    trained = {name: adapted.model.initial_value(name, (), 0) * 2 for name in names}
    adapted.write_back(trained)
    np.testing.assert_array_equal(model.tokens.embedding[...], trained["a_projection"])
