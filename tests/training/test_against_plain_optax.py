"""A streamed step is the in-memory step of plain optax, and all ways to run it are one step.

Tolerances. Against the reference, both sides compute in fp32 but sum in different orders (rows by
device and microbatch, tokens by block, the vocabulary by chunk): losses and norms agree to a few
units in the last place, mu and nu to 2e-5 of the largest value of their parameter. Adam divides a
gradient by its own size, so where a gradient is itself a rounding residue (1e-8 here) its update is
arbitrary; an eps of 1e-5 bounds that to a thousandth of the learning rate per step, and weights are
compared at a hundredth.

Among streamed runs equality is bitwise wherever the same sums are taken in the same order; each
test says where that holds and why.
"""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from lanes import mostly_thorough
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import (
    assert_bitwise_equal,
    assert_close_to_plain_adam,
    differing,
    small_config,
    strategy,
    train,
    trainer,
)

from slidedp_jax.update.update_kernel import KernelForm

NUM_ROWS, NUM_TOKENS, NUM_STEPS = 32, 12, 5
LEARNING_RATE, EPS = 1e-3, 1e-5


def decayed(params):
    return {name: not name.endswith("norm.weight") for name in params}


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(LEARNING_RATE, eps=EPS, weight_decay=0.1),
    "scheduled_and_masked": lambda: optax.adamw(
        optax.warmup_cosine_decay_schedule(0.2e-3, LEARNING_RATE, 2, 6),
        b2=0.95,
        eps=EPS,
        weight_decay=1.0,
        mask=decayed,
    ),
}

# Gradient norms of these batches lie between 1.1 and 1.6.
CLIPS = {"off": None, "not_hit": 100.0, "hit": 0.7}


def data(*, tied: bool, packed: bool):
    config = small_config(tied=tied)
    batches = [
        random_batch(config, NUM_ROWS, NUM_TOKENS, packed=packed, seed=step)
        for step in range(NUM_STEPS)
    ]
    return config, initial_parameters(config), batches


@pytest.fixture(scope="module")
def reference():
    runs = {}

    def run(tied: bool, packed: bool, optimizer: str, clip: str):
        key = (tied, packed, optimizer, clip)
        if key not in runs:
            transformation = OPTIMIZERS[optimizer]()
            if CLIPS[clip] is not None:
                transformation = optax.chain(optax.clip_by_global_norm(CLIPS[clip]), transformation)
            config, parameters, batches = data(tied=tied, packed=packed)
            runs[key] = train_plainly(config, parameters, transformation, batches)
        return runs[key]

    return run


# Every pair of values of two columns occurs at least once. "off" runs eagerly, the others deferred.
# The two of 2 devices that always run differ in all other columns but one.
CASES = """
devices weights          gradients      layers micro tied  packed clip    optimizer
1       shard_all_gather reduce_scatter 1      1     True  True   off     adamw
1       shard_all_gather host_sum       3      1     True  True   not_hit adamw
1       replicate        reduce_scatter 1      4     False False  hit     scheduled_and_masked
2       replicate        host_sum       3      4     False True   off     adamw
2       replicate        reduce_scatter 1      1     False False  not_hit adamw
2       shard_all_gather reduce_scatter 1      1     True  True   hit     scheduled_and_masked
3       shard_all_gather host_sum       1      4     True  False  off     scheduled_and_masked
3       shard_all_gather reduce_scatter 1      1     False True   not_hit scheduled_and_masked
3       replicate        host_sum       3      1     True  True   hit     adamw
8       replicate        reduce_scatter 3      1     True  False  off     scheduled_and_masked
8       shard_all_gather host_sum       1      4     False True   not_hit adamw
8       replicate        host_sum       1      1     False False  hit     scheduled_and_masked
"""


@pytest.mark.parametrize(
    "rounding", ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "case",
    [
        case if number in (3, 5) else pytest.param(case, marks=pytest.mark.thorough)
        for number, case in enumerate(CASES.strip().splitlines()[1:])
    ],
    ids=lambda c: "-".join(c.split()),
)
def test_streamed_steps_equal_plain_optax(case, rounding, reference):
    devices, weights, gradients, layers, micro, tied, packed, clip, optimizer = case.split()
    devices, micro = int(devices), int(micro)
    tied, packed = tied == "True", packed == "True"
    config, parameters, batches = data(tied=tied, packed=packed)
    plan = strategy(
        layers_per_chunk=int(layers),
        rows_per_microbatch=-(-NUM_ROWS // (devices * micro)),
        num_microbatches=micro,
        weight_route=weights,
        gradient_route=gradients,
        update_policy="eager" if clip == "off" else "deferred",
        num_host_devices=devices if devices in (3, 8) else 4,
    )
    run = train(
        config,
        OPTIMIZERS[optimizer](),
        plan,
        batches,
        parameters=parameters,
        max_grad_norm=CLIPS[clip],
        num_devices=devices,
        weight_rounding=rounding,
    )
    plain = reference(tied, packed, optimizer, clip)
    if CLIPS[clip] is not None:
        assert {norm > CLIPS[clip] for norm in plain[1]} == {clip == "hit"}
    assert_close_to_plain_adam(run, plain, learning_rate=LEARNING_RATE)


def run_small(*, tied=False, rows=8, steps=3, clip=None, devices=2, form="whole", **changes):
    """AdamW on packed rows, two microbatches on each of two devices unless changed."""
    config = small_config(tied=tied)
    optimizer = changes.pop("optimizer", None) or optax.adamw(LEARNING_RATE, weight_decay=0.1)
    batches = [random_batch(config, rows, NUM_TOKENS, packed=True, seed=i) for i in range(steps)]
    return train(
        config,
        optimizer,
        strategy(**({"rows_per_microbatch": 2, "num_microbatches": 2} | changes)),
        batches,
        parameters=initial_parameters(config),
        max_grad_norm=clip,
        num_devices=devices,
        kernel_form=form,
    )


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.thorough)],
    ids=["untied", "tied"],
)
def tied(request):
    return request.param


@pytest.fixture(scope="module")
def deferred(tied):
    return run_small(tied=tied)


@pytest.mark.parametrize(
    "changes",
    [
        {"update_policy": "eager"},
        {"clip": 1e9},
        {"prefetch_depth": 3},
        pytest.param({"weight_route": "shard_all_gather"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_policies_depths_and_weight_routes_agree_in_every_bit(tied, deferred, changes):
    """The same programs read the same values: only order and route of the bytes differ."""
    assert_bitwise_equal(run_small(tied=tied, **changes), deferred)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_host_devices": 4}, marks=pytest.mark.thorough),
        {"block_size": 512},
    ],
    ids=str,
)
def test_layouts_agree_in_every_bit_below_the_limit(tied, deferred, changes):
    """No sum over rows or tokens depends on how the flat arrays are padded and cut.

    The norm does: it adds up partial sums per chunk and device, and may differ in its last bits.
    Below the limit it is not applied.
    """
    run = run_small(tied=tied, clip=1e9, **changes)
    assert_bitwise_equal(run, deferred, norms=False)
    np.testing.assert_allclose(run.norms, deferred.norms, rtol=3e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [0.7, 1e9])
def test_chunkings_agree_to_rounding(clip):
    """Layers of one program are compiled together, where XLA may fuse and contract otherwise."""
    one, three = (run_small(clip=clip, layers_per_chunk=layers) for layers in (1, 3))
    assert (min(one.norms) > clip) == (clip == 0.7)
    assert_close(one, three)


def test_prefetch_depths_agree_in_every_bit_when_the_clip_is_hit():
    assert_bitwise_equal(run_small(clip=0.7), run_small(clip=0.7, prefetch_depth=3))


@pytest.fixture(
    scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (3, 8))]
)
def devices(request):
    return request.param


def sum_gradients(devices: int, *, microbatches: int = 1, route="reduce_scatter"):
    """One row per device and microbatch, one step; the state is the gradient, nothing is scaled."""
    return run_small(
        devices=devices,
        rows=devices * microbatches,
        rows_per_microbatch=1,
        num_microbatches=microbatches,
        num_host_devices=devices * microbatches,
        gradient_route=route,
        optimizer=optax.trace(decay=0.0),
        steps=1,
    )


@pytest.fixture(scope="module")
def scattered(devices):
    return sum_gradients(devices)


def test_gradients_summed_by_the_host_are_those_that_devices_sum(devices, scattered):
    """Both add in the order of the devices. The norm is added up over other pieces."""
    host = sum_gradients(devices, route="host_sum")
    assert_bitwise_equal(scattered, host, norms=False)
    np.testing.assert_allclose(scattered.norms, host.norms, rtol=3e-7)


def test_devices_sum_as_microbatches_do(devices, scattered):
    """Rows on n devices, or one after the other on one: the same gradients, added in one order.

    The head is the exception: with microbatches, XLA contracts the product of its gradient with
    1 / tokens into the addition, which rounds once instead of twice. It is computed first, from
    weights alone, so in one step nothing else sees the difference.
    """
    alone = sum_gradients(1, microbatches=devices)
    np.testing.assert_allclose(scattered.losses, alone.losses, rtol=1e-15)
    assert set(differing(scattered, alone)) <= {"lm_head.weight"}
    assert_close(scattered, alone)


@pytest.mark.thorough
def test_gradient_routes_agree_to_rounding_under_adamw(tied, deferred):
    """The kernel that sums is another program: XLA may contract other products into additions."""
    run = run_small(tied=tied, gradient_route="host_sum")
    assert_close(run, deferred)


@pytest.mark.parametrize(
    "form", mostly_thorough(sorted({*get_args(KernelForm)} - {"whole"}), ("blocked",))
)
def test_kernel_forms_agree_to_rounding(tied, deferred, form):
    """The forms are compiled apart, so XLA may contract other products into additions."""
    assert_close(run_small(tied=tied, form=form), deferred)


def test_two_runs_of_the_same_seed_are_one():
    first, second = (run_small() for _ in range(2))
    assert_bitwise_equal(first, second)


def test_bfloat16_compute_learns_the_same_within_its_precision(tied, deferred):
    """Weights are rounded to 8 bits of mantissa on upload, gradients on their way back."""
    narrow = run_small(tied=tied, compute_dtype="bfloat16")
    np.testing.assert_allclose(narrow.losses, deferred.losses, rtol=3e-3)
    np.testing.assert_allclose(narrow.norms, deferred.norms, rtol=3e-2)
    assert differing(narrow, deferred)


@pytest.mark.parametrize(
    ("devices", "microbatches"), [(1, 8), pytest.param(8, 1, marks=pytest.mark.thorough)]
)
def test_bfloat16_gradients_add_up_in_float32_and_are_rounded_once(devices, microbatches):
    """Eight equal rows give eight times an eighth of one row's gradient: exact, but for rounding
    in between, of which bfloat16 sums would need some (three times 1.01 has more digits)."""
    config = small_config(layers=1)
    row = random_batch(config, 1, NUM_TOKENS, packed=False)

    def gradients(num_devices, num_microbatches):
        rows = num_devices * num_microbatches
        plan = strategy(
            rows_per_microbatch=1, num_microbatches=num_microbatches, compute_dtype="bfloat16"
        )
        batch = {name: np.repeat(values, rows, axis=0) for name, values in row.items()}
        return train(
            config,
            optax.trace(decay=0.0),
            plan,
            [batch],
            parameters=initial_parameters(config),
            max_grad_norm=None,
            num_devices=num_devices,
        )

    one, many = gradients(1, 1), gradients(devices, microbatches)
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-12)
    for name, gradient in one.state[0].items():
        assert gradient.any(), name
        np.testing.assert_array_equal(many.state[0][name], gradient, err_msg=name)


def assert_close(run, other):
    """A few units in the last place, carried over three steps of Adam."""
    np.testing.assert_allclose(run.losses, other.losses, rtol=1e-6)
    np.testing.assert_allclose(run.norms, other.norms, rtol=1e-6)
    for name, values in run.parameters.items():
        np.testing.assert_allclose(
            other.parameters[name], values, rtol=0, atol=0.002 * LEARNING_RATE, err_msg=name
        )
    for state, other_state in zip(run.state, other.state, strict=True):
        for name, values in state.items():
            atol = 1e-5 * np.abs(values).max()
            np.testing.assert_allclose(other_state[name], values, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(("dtype", "full"), [("float32", True), ("bfloat16", False)])
def test_float32_products_ask_for_full_precision(dtype, full):
    """GPUs would multiply in TF32; on CPUs no result tells."""
    with trainer(
        small_config(layers=1), optax.sgd(1.0), strategy(compute_dtype=dtype), num_devices=1
    ) as it:
        same = PartitionSpec()
        program = it._programs._on_devices(lambda x: x @ x, (same,), same)
        assert ("HIGHEST" in program.lower(jnp.ones((4, 4), dtype)).as_text()) == full
