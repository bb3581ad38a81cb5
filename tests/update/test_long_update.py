"""A thousand updates of the split state are those of an fp32 master, and small ones count.

The forms compute the same, so one of them takes all the steps.
"""

import jax
import numpy as np
import optax
import pytest
from test_update_kernel import FORMS, SHAPES, SIZE, KernelRun, blocks_of, masks, sharding, tree_of

__all__ = ["sharding"]  # the fixture

NUM_STEPS = {"blocked": 1000, "fused": 300, "whole": 300}


def powers_of_two():
    """Momentum with factors whose products are exact, so that contraction cannot show."""
    return optax.chain(
        optax.masked(optax.add_decayed_weights(2.0**-6), masks),
        optax.trace(decay=0.5),
        optax.scale(-(2.0**-10)),
    )


@pytest.mark.parametrize(
    "rounding", ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "form", [f if f == "fused" else pytest.param(f, marks=pytest.mark.thorough) for f in FORMS]
)
def test_split_master_equals_an_fp32_master_in_every_bit(form, rounding, sharding):
    """The reference is plain optax on fp32 arrays in a program of its own.

    Factors are powers of two: a product is then exact, and whether XLA contracts it into the
    addition that follows, which differs between two programs, changes nothing.
    """
    transformation = powers_of_two()
    rng = np.random.default_rng(0)
    master = rng.standard_normal(SIZE).astype(np.float32)
    run = KernelRun(blocks_of(transformation), form, sharding, master, rounding)
    params = tree_of(master)
    state = transformation.init(params)

    @jax.jit
    def plain(params, gradients, state):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    gradients = [rng.standard_normal(SIZE).astype(np.float32) for _ in range(7)]
    for step in range(NUM_STEPS[form]):
        gradient = gradients[step % len(gradients)]
        run.step([gradient])
        params, state = plain(params, tree_of(gradient), state)
    expected = np.concatenate([np.asarray(params[name]).reshape(-1) for name in SHAPES])
    assert run.master.tobytes() == expected.tobytes()
    assert np.abs(expected - master).min() > 0


@pytest.mark.parametrize(
    "form", [f if f == "fused" else pytest.param(f, marks=pytest.mark.thorough) for f in FORMS]
)
def test_steps_far_below_a_bfloat16_digit_add_up(form, sharding):
    """Weight decay alone, at a rate of 1e-6 a step: no step changes any bfloat16 weight.

    An fp32 weight moves by 8 to 17 units in its last place per step, so half a unit of rounding is
    at most 6 % of it.
    """
    transformation = optax.adamw(1e-5, weight_decay=0.1)
    master = np.random.default_rng(1).uniform(1, 2, SIZE).astype(np.float32)
    run = KernelRun(blocks_of(transformation), form, sharding, master)
    zero = [np.zeros(SIZE, jax.numpy.bfloat16)]
    run.step(zero)
    assert (run.master != master).all()
    np.testing.assert_array_less(np.abs(run.master / master - 1), 2.0**-10)
    for _ in range(199):
        run.step(zero)
    shrunk = np.log(run.master.astype(np.float64) / master)
    np.testing.assert_allclose(shrunk, 200 * np.log1p(-1e-6), rtol=0.06)
