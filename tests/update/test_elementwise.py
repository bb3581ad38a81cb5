"""An optax transformation taken apart: groups, kinds, blocks that step as a whole, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from optax import contrib

from slidedp_jax import UserError
from slidedp_jax.state.layout import FROZEN
from slidedp_jax.update.decompose import DecomposedOptimizer
from slidedp_jax.update.elementwise import ElementwiseOptimizer
from slidedp_jax.update.treatments import Treatments

SHAPES = {
    "embed.weight": (40, 24),
    "layers.0.proj.weight": (24, 64),
    "layers.1.proj.weight": (24, 64),
    "layers.0.norm.weight": (24,),
    "head.bias": (8,),
}
SMALL_RATE = 1e-6
"""An update is then below the last digits of a weight of size 1, which must hide nothing."""


def is_matrix(params):
    return {name: len(SHAPES[name]) > 1 for name in params}


def by_layer(params):
    return {name: "slow" if name.startswith("layers") else "fast" for name in params}


def groups_of(transformation) -> list[set[str]]:
    """Names of each group, in order of first appearance."""
    groups = DecomposedOptimizer(transformation, SHAPES).groups
    return [
        {name for name in groups if groups[name] == number} for number in sorted({*groups.values()})
    ]


MATRICES = {name for name, shape in SHAPES.items() if len(shape) > 1}
VECTORS = SHAPES.keys() - MATRICES
LAYERS = {name for name in SHAPES if name.startswith("layers")}


@pytest.mark.parametrize(
    ("transformation", "expected"),
    [
        (optax.adamw(1e-3), [set(SHAPES)]),
        (optax.lion(optax.linear_schedule(0.0, 1e-3, 10)), [set(SHAPES)]),
        (optax.adamw(1e-3, mask=is_matrix), [MATRICES, VECTORS]),
        (
            optax.adamw(1e-3, mask={name: name in MATRICES for name in SHAPES}),
            [MATRICES, VECTORS],
        ),
        (
            optax.multi_transform({"fast": optax.adamw(1e-3), "slow": optax.adamw(1e-4)}, by_layer),
            [set(SHAPES) - LAYERS, LAYERS],
        ),
        (
            optax.multi_transform(
                {"fast": optax.adamw(1e-3), "slow": optax.adamw(1e-4, mask=is_matrix)}, by_layer
            ),
            [set(SHAPES) - LAYERS, LAYERS & MATRICES, LAYERS & VECTORS],
        ),
        (
            optax.multi_transform({"fast": optax.adamw(1e-3), "slow": optax.adamw(1e-3)}, by_layer),
            None,
        ),
    ],
    ids=[
        "alike",
        "schedule",
        "mask_function",
        "mask_tree",
        "rates",
        "rates_and_mask",
        "equal_rates",
    ],
)
def test_parameters_are_grouped_by_what_is_done_to_them(transformation, expected):
    got = groups_of(transformation)
    if expected is None:  # equal programs with counters of their own may stay apart
        assert set.union(*got) == set(SHAPES)
    else:
        assert got == expected


ACCEPTED = {
    "adamw": lambda: optax.adamw(1e-2, mask=is_matrix),
    "adamw_bf16_mu": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "nadamw": lambda: optax.nadamw(1e-2),
    "lion": lambda: optax.lion(1e-2, weight_decay=0.1),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-2),
    "schedule": lambda: optax.adamw(optax.linear_schedule(0.0, 1e-2, 3)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-3, 1e-2, 3), weight_decay=0.1
    ),
    "rates": lambda: optax.multi_transform(
        {"fast": optax.adamw(1e-2), "slow": optax.adamw(1e-3)}, by_layer
    ),
    "apply_every": lambda: optax.chain(optax.adamw(1e-2), optax.apply_every(2)),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "clip_by_value": lambda: optax.chain(optax.clip(0.5), optax.adamw(1e-2)),
}


@pytest.mark.parametrize(
    "name", mostly_thorough(ACCEPTED, ("adamw", "schedule", "rates", "apply_every"))
)
def test_blocks_step_as_whole_parameters_do_in_plain_optax(name):
    """Five steps; every parameter cut into blocks of 8 elements, each with a state of its own.

    Blocks are a batch dimension, so none can read another. Compiled otherwise, XLA may contract
    other products into additions: a few units in the last place.
    """
    transformation = ACCEPTED[name]()
    treatments = Treatments(transformation, SHAPES)
    (optimizer,) = treatments.optimizers
    assert isinstance(optimizer, ElementwiseOptimizer)
    rng = np.random.default_rng(0)

    def random(scale):
        draw = {key: scale * rng.standard_normal(shape) for key, shape in SHAPES.items()}
        return {key: np.float32(values) for key, values in draw.items()}

    def cut(params):
        return {key: np.asarray(values).reshape(-1, 8) for key, values in params.items()}

    @jax.jit
    def init(blocks):
        return {
            key: jax.vmap(partial(optimizer.init_block, treatments.groups[key]))(values)
            for key, values in blocks.items()
        }

    @jax.jit
    def step(blocks, gradients, states, shared):
        pairs = {
            key: jax.vmap(
                partial(optimizer.update_block, treatments.groups[key]), in_axes=(0, 0, 0, None)
            )(values, gradients[key], states[key], shared)
            for key, values in blocks.items()
        }
        new = [{key: pair[part] for key, pair in pairs.items()} for part in range(2)]
        return *new, optimizer.advance_shared(shared)

    params = random(1.0)
    blocks, shared = cut(params), optimizer.initial_shared()
    states = init(blocks)
    state = jax.jit(transformation.init)(params)

    @jax.jit
    def plain_step(params, gradients, state):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for scale in (1.0, 3.0, 1e-3, 1.0, 0.1):
        gradients = random(scale)
        blocks, states, shared = step(blocks, cut(gradients), states, shared)
        params, state = plain_step(params, gradients, state)
        for key, values in cut(params).items():
            np.testing.assert_allclose(blocks[key], values, rtol=1e-6, atol=1e-6, err_msg=key)


def kinds_of(transformation) -> dict[str, set[str]]:
    """Names by what is done to them: dtypes of flat state, "whole" or "frozen"."""
    treatments = Treatments(transformation, SHAPES)
    kinds: dict[str, set[str]] = {}
    for name, kind in treatments.kinds.items():
        if kind == FROZEN:
            text = "frozen"
        elif name in treatments.whole_parameters:
            text = "whole"
        else:
            text = " ".join(map(str, treatments.optimizers[kind].state_dtypes))
        kinds.setdefault(text, set()).add(name)
    return kinds


ADAM, EVERYTHING = "float32 float32", set(SHAPES)
KINDS = {
    "adamw": (lambda rate: optax.adamw(rate), {ADAM: EVERYTHING}),
    "adamw_bf16_mu": (
        lambda rate: optax.adamw(rate, mu_dtype=jnp.bfloat16),
        {"bfloat16 float32": EVERYTHING},
    ),
    "sgd": (optax.sgd, {"": EVERYTHING}),
    "sgd_for_some": (
        lambda rate: optax.multi_transform(
            {"fast": optax.adamw(rate), "slow": optax.sgd(rate)}, by_layer
        ),
        {ADAM: EVERYTHING - LAYERS, "": LAYERS},
    ),
    "none_for_some": (
        lambda rate: optax.multi_transform(
            {"fast": optax.adamw(rate), "slow": optax.set_to_zero()}, by_layer
        ),
        {ADAM: EVERYTHING - LAYERS, "frozen": LAYERS},
    ),
    # Nothing but decay, and that only after a while: not the same as frozen.
    "late_decay_for_some": (
        lambda rate: optax.multi_transform(
            {
                "fast": optax.sgd(rate),
                "slow": optax.chain(
                    optax.set_to_zero(),
                    optax.add_decayed_weights(0.1),
                    optax.scale_by_schedule(lambda count: -rate * (count > 9)),
                ),
            },
            by_layer,
        ),
        {"": EVERYTHING},
    ),
    "muon": (contrib.muon, {"whole": MATRICES, ADAM: VECTORS}),
    # Its root mean squares are those of whole vectors too.
    "adafactor": (optax.adafactor, {"whole": EVERYTHING}),
    "lamb": (optax.lamb, {"whole": EVERYTHING}),
    "lars": (lambda rate: optax.lars(rate), {"whole": EVERYTHING}),
    "trust_ratio": (
        lambda rate: optax.chain(
            optax.scale_by_adam(),
            optax.scale_by_trust_ratio(),
            optax.scale_by_learning_rate(rate),
        ),
        {"whole": EVERYTHING},
    ),
    "clip_by_block_rms": (
        lambda rate: optax.chain(optax.clip_by_block_rms(1.0), optax.adamw(rate)),
        {"whole": EVERYTHING},
    ),
    "clip_before_sgd": (
        lambda rate: optax.chain(optax.clip_by_block_rms(1.0), optax.scale_by_learning_rate(rate)),
        {"whole": EVERYTHING},
    ),
    "adaptive_clip": (
        lambda rate: optax.chain(optax.adaptive_grad_clip(0.1), optax.adamw(rate)),
        {"whole": EVERYTHING},
    ),
    "centralize": (
        lambda rate: optax.chain(optax.centralize(), optax.adamw(rate)),
        {"whole": MATRICES, ADAM: VECTORS},
    ),
}


OFTEN = ("adamw", "none_for_some", "late_decay_for_some", "trust_ratio", "centralize")


@pytest.mark.parametrize("name", mostly_thorough(KINDS, OFTEN))
def test_kinds_of_update_at_a_small_rate(name):
    make, expected = KINDS[name]
    assert kinds_of(make(SMALL_RATE)) == expected


REFUSED = {
    "clip_by_global_norm": (
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)),
        "pass max_grad_norm instead",
    ),
    "global_norm_of_updates": (
        lambda rate: optax.chain(optax.adamw(rate), optax.normalize_by_update_norm()),
        "reads other parameters",
    ),
    "d_adaptation": (lambda rate: contrib.dadapt_adamw(rate), "state that depends on all param"),
    "prodigy": (contrib.prodigy, "state that depends on all param"),
    "apply_if_finite": (
        lambda rate: optax.apply_if_finite(optax.adamw(rate), 3),
        "on_nonfinite='skip'",
    ),
    "add_noise": (
        lambda rate: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(rate)),
        "a random key in its state",
    ),
    "noise_of_an_old_key": (lambda rate: noise(), "draws random numbers"),
    "polyak_sgd": (lambda rate: optax.polyak_sgd(), "wants more than gradients"),
    "lbfgs": (optax.lbfgs, "wants more than gradients"),
}


def noise():
    """With a key of two integers, which does not show that it is one."""

    def update(gradients, key, params=None):
        key, *keys = jax.random.split(key, len(gradients) + 1)
        keyed = zip(keys, gradients.items(), strict=True)
        return {name: jax.random.normal(k, leaf.shape) for k, (name, leaf) in keyed}, key

    return optax.GradientTransformation(lambda params: jax.random.PRNGKey(0), update)


def test_one_transformation_per_parameter_by_its_name_is_not_taken_for_a_list():
    each = optax.multi_transform({n: optax.sgd(0.1, 0.9) for n in SHAPES}, {n: n for n in SHAPES})
    assert Treatments(each, SHAPES).whole_parameters == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_other_parameters_is_refused_in_words(name):
    make, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        DecomposedOptimizer(make(SMALL_RATE), SHAPES)


@pytest.mark.parametrize("rate", [SMALL_RATE, pytest.param(1e-2, marks=pytest.mark.thorough)])
def test_muon_is_found_out_among_matrices_alone(rate):
    """Its state looks like momentum: only a trial shows that it is not element-wise."""
    matrices = {"a.weight": (256, 128), "b.weight": (128, 256)}
    assert Treatments(contrib.muon(rate), matrices).whole_parameters == list(matrices)


@pytest.mark.parametrize("make", [optax.adamw, optax.lion, optax.adan])
def test_element_wise_ones_are_accepted_at_a_small_rate(make):
    (optimizer,) = Treatments(make(SMALL_RATE), SHAPES).optimizers
    assert isinstance(optimizer, ElementwiseOptimizer) and optimizer.num_groups == 1
