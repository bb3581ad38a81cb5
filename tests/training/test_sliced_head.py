"""The head in slices of the vocabulary trains as plain optax does.

Tolerances against plain optax: `test_against_plain_optax`. Among strategies, the number of slices
changes the order in which the hidden states' gradient is added up, and nothing else does: where the
weights lie, and when they are uploaded, changes no bit.
"""

import dataclasses
import functools

import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import (
    assert_bitwise_equal,
    assert_close_to_plain_adam,
    small_config,
    strategy,
    train,
    trainer,
)

from slidedp_jax import Trainer, UserError
from slidedp_jax.models import decoder

RATE, EPS, ROWS, TOKENS, STEPS = 1e-3, 1e-5, 8, 12, 3
CLIP = 0.7


def decayed(params):
    return {name: not name.endswith("norm.weight") for name in params}


ADAM = functools.partial(optax.adamw, RATE, eps=EPS, weight_decay=0.1)

OPTIMIZERS = {
    "alike": ADAM,
    "masked": functools.partial(ADAM, mask=decayed),  # the norm is in another group
    "apart": lambda: optax.multi_transform(  # the norm is in another part, without a momentum
        {"matrix": ADAM(), "norm": optax.sgd(RATE)},
        lambda params: {
            name: "norm" if name.endswith("norm.weight") else "matrix" for name in params
        },
    ),
}


def batches(config, packed):
    return [random_batch(config, ROWS, TOKENS, packed=packed, seed=i) for i in range(STEPS)]


@functools.cache
def plain(tied, packed, optimizer, clip):
    config = small_config(tied=tied, layers=2)
    transformation = OPTIMIZERS[optimizer]()
    if clip is not None:
        transformation = optax.chain(optax.clip_by_global_norm(clip), transformation)
    parameters = initial_parameters(config)
    return train_plainly(config, parameters, transformation, batches(config, packed))


@functools.cache
def run(*, tied=False, packed=True, optimizer="alike", clip=CLIP, devices=1, frozen=(), **changes):
    config = small_config(tied=tied, layers=2)
    changes = {"vocab_slices": 4, "loss_chunk_tokens": 10} | changes
    return train(
        config,
        OPTIMIZERS[optimizer](),
        strategy(
            rows_per_step=ROWS,
            num_devices=devices,
            update_policy="eager" if clip is None else "deferred",
            **changes,
        ),
        batches(config, packed),
        parameters=initial_parameters(config),
        num_devices=devices,
        max_grad_norm=clip,
        frozen=frozen,
    )


# rows_per_microbatch 4 on one device is two microbatches, on two devices one.
CASES = [
    {"vocab_slices": 8, "slice_head_weights": True},
    {"tied": True, "devices": 2},
    {"clip": None, "devices": 2, "gradient_route": "host_sum", "slice_head_weights": True},
    {"tied": True, "slice_head_weights": True, "weight_route": "shard_all_gather", "clip": None},
    {"kept_chunks": 1, "resident_chunks": 2, "optimizer": "masked"},
]
MORE_CASES = [
    {"devices": 2, "weight_route": "shard_all_gather", "optimizer": "masked", "packed": False},
    {"tied": True, "gradient_route": "host_sum", "devices": 2, "vocab_slices": 2},
    {"devices": 4, "vocab_slices": 2, "rows_per_microbatch": 1, "slice_head_weights": True},
    {"tied": True, "devices": 4, "vocab_slices": 2, "rows_per_microbatch": 1},
    {"vocab_slices": 2, "slice_head_weights": True, "weight_route": "shard_all_gather"},
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.thorough) for case in MORE_CASES)],
    ids=lambda case: "_".join(f"{key}={value}" for key, value in case.items()),
)
def test_slices_equal_plain_optax(case):
    case = {"tied": False, "packed": True, "optimizer": "alike", "clip": CLIP} | case
    expected = plain(*(case[name] for name in ("tied", "packed", "optimizer", "clip")))
    if case["clip"] is not None:
        assert min(expected[1]) > CLIP
    assert_close_to_plain_adam(run(**case), expected, learning_rate=RATE)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_where_weights_lie_changes_no_bit(tied):
    assert_bitwise_equal(run(tied=tied), run(tied=tied, slice_head_weights=True, prefetch_depth=2))


@pytest.mark.parametrize(
    ("tied", "frozen"),
    [
        (False, ("lm_head.weight",)),
        (True, ("model.embed_tokens.*",)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (False, ("model.norm.weight", "model.embed_tokens.*")),
                (True, ("model.norm.weight",)),
                (False, ("model.layers.*", "model.embed_tokens.*")),
                (False, ("lm_head.weight", "model.norm.weight")),
            )
        ),
    ],
)
def test_frozen_parts_are_as_in_one_pass(tied, frozen):
    """Which `test_freezing` compares with plain optax."""
    sliced = run(tied=tied, frozen=frozen, devices=2)
    whole = run(tied=tied, frozen=frozen, devices=2, vocab_slices=1)
    np.testing.assert_allclose(sliced.losses, whole.losses, rtol=1e-6)
    np.testing.assert_allclose(sliced.norms, whole.norms, rtol=1e-5)
    for name, values in whole.parameters.items():
        np.testing.assert_allclose(sliced.parameters[name], values, atol=2e-5, err_msg=name)


def test_parameters_that_need_another_update_are_sent_with_the_slices():
    sliced, whole = (run(optimizer="apart", vocab_slices=slices, devices=2) for slices in (4, 1))
    assert sliced.parameters["model.norm.weight"].std() > 0
    for name, values in whole.parameters.items():
        np.testing.assert_allclose(sliced.parameters[name], values, atol=2e-5, err_msg=name)


def test_bfloat16_learns_as_in_one_pass():
    narrow = {"compute_dtype": "bfloat16", "devices": 2}
    sliced, whole = (run(vocab_slices=slices, **narrow) for slices in (4, 1))
    np.testing.assert_allclose(sliced.losses, whole.losses, rtol=3e-3)
    np.testing.assert_allclose(sliced.norms, whole.norms, rtol=1e-2)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_evaluation_is_the_first_pass_and_gives_the_steps_loss(tied):
    config = small_config(tied=tied, layers=2)
    plan = strategy(rows_per_step=ROWS, num_devices=2, vocab_slices=4, slice_head_weights=True)
    with trainer(config, optax.sgd(0.0), plan, num_devices=2) as it:
        batch = batches(config, True)[0]
        loss, _ = it.evaluate(batch)
        assert it.step(batch).loss == loss
        fetched = it.weights.bytes_fetched
        it.evaluate(batch)
        chunks = {layout.name: layout for layout in it.store.layouts}
        every = sum(2 * 2 * layout.padded_size for layout in chunks.values())  # both halves
        again = 2 * 2 * chunks["embed"].padded_size if tied else 0  # its slices
        assert it.weights.bytes_fetched - fetched == 2 * (every + again)  # to each device


def test_gradients_by_name_are_those_of_one_pass():
    config = small_config(layers=1)
    found = []
    for slices in (1, 4):
        plan = strategy(rows_per_step=ROWS, vocab_slices=slices)
        parameters = initial_parameters(config)
        with trainer(config, optax.sgd(1.0), plan, num_devices=1, parameters=parameters) as it:
            found.append(it.gradients(batches(config, True)[0]))
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        atol = 1e-6 * np.abs(values).max()
        np.testing.assert_allclose(found[1][name], values, rtol=0, atol=atol, err_msg=name)


def test_slices_are_refused_where_they_cannot_be():
    model = decoder.build(small_config(layers=1))
    own = dataclasses.replace(model, vocabulary=None)
    for changed, plan, devices, message in (
        (own, strategy(vocab_slices=2), 1, "affair of its own"),
        (model, strategy(vocab_slices=8), 2, "multiple of the 2 compute devices"),
        (model, strategy(vocab_slices=2, resident_chunks=3), 1, "fewer resident_chunks"),
    ):
        with pytest.raises(UserError, match=message):
            Trainer(changed, optax.sgd(1.0), strategy=plan, num_devices=devices)
