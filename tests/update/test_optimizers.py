"""Optimizers beyond AdamW through the same trainer, against plain optax.

Both sides sum in different orders, so gradients agree to rounding. Tolerances are relative to what
a step may move a weight: Muon's orthogonalisation runs in products of matrices that amplify
rounding residues, hence a fiftieth of the learning rate instead of a hundredth.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import optimizer_state, small_config, strategy, train, trainer

RATE, EPS, LIMIT = 1e-3, 1e-5, 0.7
CONFIG = small_config(layers=2)
NUM_STEPS, ROWS = 3, 8


def batches():
    return [random_batch(CONFIG, ROWS, 12, packed=True, seed=i) for i in range(NUM_STEPS)]


def rates(params):
    return {name: "slow" if ".layers.0." in name else "fast" for name in params}


def hidden_matrices(params):
    """Muon for the layers' matrices alone, as its authors advise."""
    return {
        name: contrib.MuonDimensionNumbers() if name.endswith("_proj.weight") else None
        for name in params
    }


OPTIMIZERS = {
    "muon": lambda: contrib.muon(
        RATE, eps=EPS, weight_decay=0.1, muon_weight_dimension_numbers=hidden_matrices
    ),
    "muon_bf16_scheduled": lambda: contrib.muon(
        optax.linear_schedule(RATE, RATE / 10, 4), eps=EPS, mu_dtype=jnp.bfloat16
    ),
    # Small enough here that some matrices are factored and some are not.
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=40),
    "adafactor_masked": lambda: optax.adafactor(
        RATE,
        min_dim_size_to_factor=16,
        momentum=0.9,
        weight_decay_rate=1e-3,
        weight_decay_mask=lambda params: {name: leaf.ndim > 1 for name, leaf in params.items()},
    ),
    "different_kinds": lambda: optax.multi_transform(
        {"slow": optax.sgd(RATE / 2, momentum=0.9), "fast": optax.adamw(RATE, eps=EPS)}, rates
    ),
    "masked_rates": lambda: optax.chain(
        optax.adamw(RATE, eps=EPS, mu_dtype=jnp.bfloat16),
        optax.masked(optax.scale(0.1), lambda p: {k: v == "slow" for k, v in rates(p).items()}),
    ),
    "lion": lambda: optax.lion(RATE * 1e-2, weight_decay=0.1),
}
TOLERANCES = {"muon": 0.02, "muon_bf16_scheduled": 0.05, "masked_rates": 0.05, "lion": 2e-2}


@functools.cache
def plain(name, limit):
    optimizer = OPTIMIZERS[name]()
    if limit is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(limit), optimizer)
    return train_plainly(CONFIG, initial_parameters(CONFIG), optimizer, batches())[2]


CASES = [
    (name, policy, devices, layers)
    for number, name in enumerate(OPTIMIZERS)
    for policy, devices, layers in (
        ("deferred", 2, 1 + number % 2),
        *((("eager", 1, 2),) if name in ("muon", "adafactor", "different_kinds") else ()),
    )
]


@pytest.mark.parametrize(
    "case",
    [
        c
        if c[0] in ("adafactor", "different_kinds") and c[1] == "deferred"
        else pytest.param(c, marks=pytest.mark.thorough)
        for c in CASES
    ],
    ids=lambda c: "-".join(map(str, c)),
)
def test_steps_are_those_of_plain_optax(case):
    name, policy, devices, layers = case
    limit = LIMIT if policy == "deferred" else None
    plan = strategy(
        rows_per_step=ROWS,
        num_devices=devices,
        layers_per_chunk=layers,
        rows_per_microbatch=4,
        update_policy=policy,
        num_host_devices=4,
        gradient_route="host_sum" if name == "adafactor" else "reduce_scatter",
    )
    run = train(
        CONFIG,
        OPTIMIZERS[name](),
        plan,
        batches(),
        parameters=initial_parameters(CONFIG),
        max_grad_norm=limit,
        num_devices=devices,
    )
    start = initial_parameters(CONFIG)
    for key, values in plain(name, limit).items():
        moved = np.abs(values - start[key]).max()
        assert moved > 0, key
        atol = TOLERANCES.get(name, 0.01) * max(RATE, moved)
        np.testing.assert_allclose(run.parameters[key], values, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("name", ["adafactor", pytest.param("muon", marks=pytest.mark.thorough)])
def test_whole_parameter_state_is_saved_and_restored_into_other_chunks(name, tmp_path):
    def start(layers, host_devices, seed):
        plan = strategy(
            rows_per_step=ROWS,
            layers_per_chunk=layers,
            rows_per_microbatch=4,
            num_host_devices=host_devices,
        )
        return trainer(CONFIG, OPTIMIZERS[name](), plan, seed=seed, num_devices=1)

    rows = batches()
    with start(1, 4, 0) as it:
        it.step(rows[0])
        path = it.save(tmp_path)
        saved = [it.parameters(), *optimizer_state(it.store)]
        it.step(rows[1])
        expected = it.parameters()
        sizes = sum(leaf.nbytes for leaves in it.store.whole_state.values() for leaf in leaves)
        flat = sum(array.nbytes for part in it.store.parts for array in part.arrays)
        assert sizes > 0 and it.store.owned_bytes == sizes + flat
    with start(2, 2, 1) as it:
        assert it.restore(path).step == 1
        for got, wanted in zip([it.parameters(), *optimizer_state(it.store)], saved, strict=True):
            assert all(got[key].tobytes() == wanted[key].tobytes() for key in wanted)
        it.step(rows[1])
        for key, values in it.parameters().items():
            moved = np.abs(expected[key] - saved[0][key]).max()
            np.testing.assert_allclose(values, expected[key], rtol=0, atol=0.01 * max(RATE, moved))
