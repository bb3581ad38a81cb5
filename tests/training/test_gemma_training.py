"""Gemma's flags in streamed training: gradients are those of the model's functions in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import small_config, strategy, trainer

from slidedp_jax.models import decoder
from slidedp_jax.models.config import RopeParameters

CONFIG = dataclasses.replace(
    small_config(tied=True, layers=3),
    hidden_size=36,  # of which the root is 6, exact in any dtype
    layer_windows=(4, None, 4),
    local_rope_parameters=RopeParameters(rope_theta=100.0),
    hidden_act="gelu_pytorch_tanh",
    norms_add_one=True,
    norms_after=True,
    scale_embeddings=True,
    query_pre_attn_scalar=24.0,
)
ROWS, TOKENS = 8, 12


def loss(model, params, arrays, num_supervised):
    """The mean loss of the whole batch, by the model's stages one after the other."""

    def tree(stage):
        names = iter(stage.parameter_names())
        return jax.tree.map(lambda _: params[next(names)], stage.shapes)

    x = model.embed_fn(tree(model.embed), arrays)
    for stage, fn in zip(model.layers, model.layer_fns, strict=True):
        x = fn(tree(stage), x, arrays)
    return model.head_loss_fn(tree(model.head), tree(model.embed), x, arrays) / num_supervised


def test_gradients_of_windows_scales_and_ties_are_those_in_memory():
    parameters = initial_parameters(CONFIG)
    batch = random_batch(CONFIG, ROWS, TOKENS, packed=True)
    plan = strategy(
        rows_per_microbatch=2, num_microbatches=2, layers_per_chunk=2, num_host_devices=4
    )
    sgd = optax.sgd(1.0)
    with trainer(CONFIG, sgd, plan, parameters=parameters, num_devices=2) as it:
        got = it.gradients(batch)
        prepared = it.passes.prepare(batch)
    arrays = {
        name: jnp.concatenate([jnp.asarray(part[name]) for part in prepared.microbatches])
        for name in prepared.microbatches[0]
    }
    params = {name: jnp.asarray(value) for name, value in parameters.items()}
    model = decoder.build(CONFIG)
    expected = jax.jit(jax.grad(lambda p: loss(model, p, arrays, prepared.num_supervised)))(params)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.linalg.norm(got[name] - gradient)
        assert error <= 3e-5 * np.linalg.norm(gradient), name  # sums in another order


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_lookup_is_differentiated_with_the_scale_that_forward_used(dtype):
    """The root of 32 is 5.657, and 5.65625 in bf16; a row that occurs 300 times gets that often."""
    config = dataclasses.replace(CONFIG, hidden_size=32)
    with trainer(config, optax.sgd(1.0), strategy(compute_dtype=dtype), num_devices=1) as it:
        ids = jnp.full((1, 300), 7, jnp.int32)
        dx = jnp.ones((1, 300, 32), dtype)
        embed = {"weight": jnp.ones((config.vocab_size, 32), dtype)}
        gradient = it._programs._embed_gradients(embed, {"input_ids": ids}, dx)["weight"]
        forward = decoder.build(config).embed_fn(embed, {"input_ids": ids})
    assert gradient.dtype == jnp.float32
    scale = np.float32(forward[0, 0, 0])
    np.testing.assert_allclose(gradient[7], np.full(32, 300 * scale), rtol=1e-6)
    assert scale == np.float32(jnp.asarray(32**0.5, dtype))
