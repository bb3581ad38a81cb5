"""Every policy takes the same step, in every bit, as a serial run of the same programs.

The serial run computes a step's gradients, then their norm, then updates one chunk after another
with the runtime's kernel: no thread, no overlap. Policies, clipping and the order of bytes must
not change a bit against it. Against plain optax the tolerances of `test_against_plain_optax` hold.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import (
    Run,
    assert_bitwise_equal,
    assert_close_to_plain_adam,
    optimizer_state,
    small_config,
    strategy,
    train,
    trainer,
)

LEARNING_RATE, EPS = 1e-3, 1e-5
NUM_ROWS, NUM_TOKENS = 16, 10
LIMIT = 4.0
"""Between the norms of batches with all tokens supervised and with a few."""
LIMITS = {"off": None, "not_hit": 1e9, "alternating": LIMIT, "hit": 0.1}

CONFIG = small_config(layers=2)
OPTIMIZER = optax.adamw(LEARNING_RATE, eps=EPS, weight_decay=0.1)

SPLITS = [
    (devices, microbatches, route)
    for devices in (1, 2, 4)
    for microbatches in (1, 4)
    for route in ("reduce_scatter", "host_sum")
    if devices > 1 or route == "reduce_scatter"
]
OFTEN = {(1, 4, "reduce_scatter")}


def batches():
    """In turn: many supervised tokens and a small norm, few and a large one."""
    rows = [random_batch(CONFIG, NUM_ROWS, NUM_TOKENS, packed=False, seed=i) for i in range(4)]
    for batch in rows[1::2]:
        batch["labels"][:] = -100
        batch["labels"][0, 1:4] = batch["input_ids"][0, 1:4]
    return rows


def plan(devices, microbatches, route, policy):
    return strategy(
        rows_per_microbatch=NUM_ROWS // devices // microbatches,
        num_microbatches=microbatches,
        gradient_route=route,
        weight_route="shard_all_gather" if microbatches > 1 else "replicate",
        update_policy=policy,
        num_host_devices=4,
    )


def streamed(split, policy, clip, rounding="dither") -> Run:
    return train(
        CONFIG,
        OPTIMIZER,
        plan(*split, policy),
        batches(),
        parameters=initial_parameters(CONFIG),
        max_grad_norm=LIMITS[clip],
        num_devices=split[0],
        weight_rounding=rounding,
    )


def serial(split, clip, rounding="dither") -> Run:
    """The same programs, one after the other."""
    limit = np.inf if LIMITS[clip] is None else LIMITS[clip]
    with trainer(
        CONFIG,
        OPTIMIZER,
        plan(*split, "deferred"),
        parameters=initial_parameters(CONFIG),
        max_grad_norm=None,
        num_devices=split[0],
        weight_rounding=rounding,
    ) as it:
        shared, losses, norms = it.gate.shared, [], []
        for batch in batches():
            prepared, gradients = it.passes.prepare(batch), {}

            def keep(chunk, wire, gradients=gradients):
                gradients[chunk] = it.passes.send(chunk, wire)

            it.weights.require(0)
            outputs = it.passes.forward_backward(it.weights, prepared, keep)
            jax.block_until_ready(outputs.squares)
            squares = outputs.squares
            updates = it._updates._updates
            if it._gradients.sums_on_host:
                squares = [
                    updates.sum_of_squares(gradients[chunk].summands())
                    for chunk in sorted(gradients)
                ]
            total = sum(float(np.sum(np.asarray(part, np.float64))) for part in squares)
            norms.append(float(np.float32(np.sqrt(total))))
            losses.append(
                sum(float(np.sum(np.asarray(part, np.float64))) for part in outputs.losses)
                / prepared.num_supervised
            )
            scalars = updates.scalars(shared)
            norm = 0.0 if np.isinf(limit) else norms[-1]
            for chunk, parts in enumerate(it.store.chunks):
                for part, summands in zip(parts, gradients[chunk].summands(), strict=True):
                    updates.start(part, summands, scalars, norm, limit)()
            shared = updates.advance(shared)
        parameters = {name: it.store.read(name) for name in it.store.parameter_names}
        return Run(
            losses=losses, norms=norms, parameters=parameters, state=optimizer_state(it.store)
        )


@functools.cache
def plain(clip):
    optimizer = OPTIMIZER
    if LIMITS[clip] is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(LIMITS[clip]), optimizer)
    return train_plainly(CONFIG, initial_parameters(CONFIG), optimizer, batches())


def hits(run, clip) -> list[bool]:
    return [norm > LIMITS[clip] for norm in run.norms]


@pytest.mark.parametrize(
    "rounding", ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "split",
    [s if s in OFTEN else pytest.param(s, marks=pytest.mark.thorough) for s in SPLITS],
    ids=lambda s: "-".join(map(str, s)),
)
def test_eager_deferred_and_serial_steps_are_one(split, rounding):
    """Without a clip, with one that is never hit, and (deferred) with one hit every other step."""
    expected = serial(split, "off", rounding)
    for policy, clip in (("eager", "off"), ("deferred", "not_hit")):
        assert_bitwise_equal(streamed(split, policy, clip, rounding), expected)
    clipped = streamed(split, "deferred", "alternating", rounding)
    assert hits(clipped, "alternating") == [False, True, False, True]
    assert_bitwise_equal(clipped, serial(split, "alternating", rounding))
    assert_close_to_plain_adam(expected, plain("off"), learning_rate=LEARNING_RATE)
    assert_close_to_plain_adam(clipped, plain("alternating"), learning_rate=LEARNING_RATE)


@pytest.mark.thorough
@pytest.mark.parametrize("split", SPLITS[1::3], ids=lambda s: "-".join(map(str, s)))
def test_a_clip_that_is_always_hit(split):
    run = streamed(split, "deferred", "hit")
    assert hits(run, "hit") == [True] * 4
    assert_bitwise_equal(run, serial(split, "hit"))
    assert_close_to_plain_adam(run, plain("hit"), learning_rate=LEARNING_RATE)
