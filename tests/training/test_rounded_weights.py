"""Weights that compute are their masters rounded: by which dither, wherever they lie."""

import functools
import json
import logging
import shutil

import ml_dtypes
import numpy as np
import optax
import pytest
from optax.contrib import muon
from plain_training import initial_parameters, random_batch
from streamed_training import (
    Run,
    assert_bitwise_equal,
    optimizer_state,
    small_config,
    strategy,
    trainer,
)

from slidedp_jax import UserError
from slidedp_jax.checkpoint.record import read_record
from slidedp_jax.state.split_float import rounded
from slidedp_jax.state.weight_rounding import DEFAULT_ROUNDING, WeightRounding

ROWS = 8
HOST_DEVICES = 6
SEED = 3
ROUNDINGS = ("dither", "nearest")
OFTEN_DITHER = ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
OFTEN_NEAREST = ["nearest", pytest.param("dither", marks=pytest.mark.thorough)]
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3, eps=1e-5, weight_decay=0.1),
    "muon": lambda: muon(1e-3),
}


def batches(config, number=2):
    return [random_batch(config, ROWS, 12, packed=True, seed=i) for i in range(number)]


def train(
    rounding,
    *,
    optimizer="adamw",
    devices=1,
    tied=False,
    steps=2,
    seed=SEED,
    options=None,
    **changes,
):
    """(figures, bf16 weights by name) after some steps, by default in bf16 compute."""
    config = small_config(tied=tied, layers=3)
    plan = strategy(
        rows_per_step=ROWS,
        num_devices=devices,
        **{"compute_dtype": "bfloat16", "num_host_devices": HOST_DEVICES} | changes,
    )
    fields = {"num_devices": devices, "max_grad_norm": None} | (options or {})
    with trainer(
        config,
        OPTIMIZERS[optimizer](),
        plan,
        parameters=initial_parameters(config),
        weight_rounding=rounding,
        seed=seed,
        **fields,
    ) as it:
        metrics = [it.step(batch) for batch in batches(config, steps)]
        figures = Run(
            losses=[step.loss for step in metrics],
            norms=[step.grad_norm for step in metrics],
            parameters=it.parameters(),
            state=optimizer_state(it.store) if optimizer == "adamw" else [],
        )
        with it.gate.reading() as reader:
            names = it.gate.parameter_names
            weights = {name: reader.read_rounded(name, it.weight_rounding) for name in names}
    return figures, weights


CASES = {
    "one device": {},
    "three layers a chunk": {"layers_per_chunk": 3, "tied": True},
    "other blocks": {"block_size": 96, "num_host_devices": 4},
    "blocks of runs of 64": {"block_size": 64},
    "three devices": {"devices": 3, "rows_per_microbatch": 1, "weight_route": "shard_all_gather"},
    "on the devices": {"devices": 2, "resident_chunks": 9, "rows_per_microbatch": 2},
    "some on the devices, kept": {"resident_chunks": 2, "kept_chunks": 2},
    "summed by the host": {"devices": 2, "gradient_route": "host_sum", "rows_per_microbatch": 2},
    "whole parameters": {"optimizer": "muon"},
    "frozen and averaged": {
        "options": {"frozen": ("model.layers.0.*", "*norm*"), "ema_decay": 0.9}
    },
    "blocked": {"options": {"kernel_form": "blocked"}},
    "fused": {"options": {"kernel_form": "fused"}},
    "fp32 compute": {"compute_dtype": "float32"},
}
FAST = ("three devices",)


@pytest.mark.parametrize(
    ("case", "rounding"),
    [
        pytest.param(
            case,
            rounding,
            marks=() if case in FAST and rounding == "dither" else pytest.mark.thorough,
        )
        for case in CASES
        for rounding in ROUNDINGS
    ],
)
def test_weights_are_masters_rounded_by_name_and_index(case, rounding):
    """The rule knows of no devices, chunks or layouts, so it is the same bits in all of them."""
    figures, weights = train(rounding, **CASES[case])
    own = WeightRounding.of(rounding, SEED)
    changed = 0
    for name, master in figures.parameters.items():
        expected = rounded(master, own, name)
        assert weights[name].dtype == ml_dtypes.bfloat16
        assert weights[name].tobytes() == expected.tobytes(), name
        other = rounded(master, WeightRounding.of("dither", SEED + 1), name)
        changed += int(np.sum(expected.view(np.uint16) != other.view(np.uint16)))
    assert changed > 1000


@pytest.fixture(scope="module")
def dithered():
    return train("dither")


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 512, "num_host_devices": 8},
        pytest.param({"resident_chunks": 3, "prefetch_depth": 2}, marks=pytest.mark.thorough),
        pytest.param({"weight_route": "shard_all_gather"}, marks=pytest.mark.thorough),
        pytest.param({"options": {"max_grad_norm": 1e9}}, marks=pytest.mark.thorough),
        pytest.param({"update_policy": "eager"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_layouts_and_places_agree_in_every_bit_of_bf16_training(dithered, changes):
    """As in `test_against_plain_optax`; the norm alone adds up other partial sums."""
    figures, weights = train("dither", **changes)
    assert_bitwise_equal(figures, dithered[0], norms=False)
    assert all(weights[name].tobytes() == dithered[1][name].tobytes() for name in weights)


def test_another_seed_is_another_training(dithered):
    figures, _ = train("dither", seed=SEED + 1)
    assert figures.losses != dithered[0].losses
    np.testing.assert_allclose(figures.losses, dithered[0].losses, rtol=1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}], ids=str)
def test_fp32_compute_does_not_depend_on_the_rounding(changes):
    """Both halves are joined on the devices, to the masters that they are of."""
    runs = [train(rounding, compute_dtype="float32", **changes) for rounding in ROUNDINGS]
    assert_bitwise_equal(runs[0][0], runs[1][0])
    assert any(runs[0][1][name].tobytes() != runs[1][1][name].tobytes() for name in runs[0][1])


def losses_of_small_steps(rounding, dtype):
    """Ten steps, each a fraction of a bf16 digit, from weights on the grid, on the same rows."""
    config = small_config(layers=2)
    plan = strategy(rows_per_step=ROWS, compute_dtype=dtype, num_host_devices=HOST_DEVICES)
    start = {
        name: values.astype(ml_dtypes.bfloat16)
        for name, values in initial_parameters(config).items()
    }
    with trainer(
        config,
        optax.adam(5e-6),
        plan,
        parameters=start,
        num_devices=1,
        weight_rounding=rounding,
        max_grad_norm=None,
    ) as it:
        return np.array([it.step(batches(config)[0]).loss for _ in range(10)])


def test_steps_far_below_a_digit_reach_the_forward_pass_with_dither_alone():
    exact = losses_of_small_steps("dither", "float32")
    dither, nearest = (losses_of_small_steps(name, "bfloat16") for name in ROUNDINGS)
    learnt = [losses[0] - losses[-1] for losses in (exact, dither, nearest)]
    print(learnt)
    assert learnt[0] > 0
    assert 0.7 < learnt[1] / learnt[0] < 1.3
    assert learnt[2] / learnt[0] < 0.5


# Checkpoints


def make(rounding=None, *, seed=SEED, dtype="bfloat16", **options):
    config = small_config(layers=2)
    return trainer(
        config,
        OPTIMIZERS["adamw"](),
        strategy(rows_per_step=ROWS, compute_dtype=dtype, num_host_devices=HOST_DEVICES),
        parameters=initial_parameters(config),
        num_devices=1,
        weight_rounding=rounding,
        seed=seed,
        **options,
    )


def rows(number):
    return batches(small_config(layers=2), number)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    @functools.cache
    def run(rounding):
        with make(rounding) as it:
            it.step(rows(2)[0])
            path, masters = it.save(tmp_path_factory.mktemp(rounding)), it.parameters()
            loss = it.step(rows(2)[1]).loss
            return path, masters, loss, it.parameters()

    return run


@pytest.fixture
def saved(request, saved_once, tmp_path):
    """(rounding, checkpoint of step 1, masters there, loss and masters of step 2).

    A test may change the checkpoint.
    """
    path, *rest = saved_once(request.param)
    return request.param, shutil.copytree(path, tmp_path / path.name), *rest


def same(one, other):
    return all(one[name].tobytes() == values.tobytes() for name, values in other.items())


@pytest.mark.parametrize("saved", OFTEN_DITHER, indirect=True)
def test_a_restored_trainer_goes_on_with_the_recorded_rounding_and_seed(saved):
    rounding, path, masters, loss, later = saved
    for stated in (None, rounding):
        with make(stated, seed=SEED + 5) as it:
            it.step(rows(2)[1])
            it.restore(path)
            assert it.weight_rounding == WeightRounding.of(rounding, SEED)
            assert same(it.parameters(), masters)
            assert it.step(rows(2)[1]).loss == loss
            assert same(it.parameters(), later)


@pytest.mark.parametrize("saved", OFTEN_DITHER, indirect=True)
def test_checkpoints_move_between_the_two(saved, caplog):
    rounding, path, masters, loss, _ = saved
    other = ROUNDINGS[1 - ROUNDINGS.index(rounding)]
    with caplog.at_level(logging.WARNING), make(other, seed=SEED + 5) as it:
        it.restore(path)
        assert f"weight_rounding={rounding!r}" in caplog.text and repr(other) in caplog.text
        assert it.weight_rounding == WeightRounding.of(other, SEED + 5)
        assert same(it.parameters(), masters)
        assert it.step(rows(2)[1]).loss != loss
        again = it.save(path.parent / "other")
    assert WeightRounding.recorded(read_record(again)["weight_rounding"]).rounding == other


@pytest.mark.parametrize("saved", OFTEN_DITHER, indirect=True)
def test_fp32_compute_goes_on_from_either(saved):
    """The keys that join halves on the devices are those of the restored seed."""
    _, path, masters, _, _ = saved
    with make("dither", dtype="float32", seed=SEED + 1) as it:
        before = it.evaluate(rows(1)[0])
        it.restore(path)
        restored = it.evaluate(rows(1)[0])
    with make("nearest", dtype="float32", seed=SEED + 2) as it:
        with it.gate.writing(it.gate.rounding) as writer:
            for name, values in masters.items():
                writer.write(name, values)
            writer.finish(0, it.gate.shared)
        assert it.evaluate(rows(1)[0]) == restored != before


@pytest.mark.parametrize("saved", OFTEN_NEAREST, indirect=True)
def test_checkpoints_of_before_there_was_a_choice_were_rounded_to_nearest(saved):
    rounding, path, masters, loss, _ = saved
    record = json.loads((path / "trainer.json").read_text())
    del record["weight_rounding"], record["digest"]
    (path / "trainer.json").write_text(json.dumps(record))
    with make() as it:
        it.restore(path)
        assert it.weight_rounding == WeightRounding.of("nearest", 0)
        assert same(it.parameters(), masters)
        assert (it.step(rows(2)[1]).loss == loss) == (rounding == "nearest")
    if rounding == "nearest":
        with make() as it:
            it.restore(path)
            assert it.save(path.parent) == path  # the very state that is there
    assert DEFAULT_ROUNDING == "dither"


@pytest.mark.parametrize(
    "entry",
    [
        {"rounding": "up", "seed": 1},
        pytest.param({"rounding": "dither", "seed": None}, marks=pytest.mark.thorough),
        pytest.param("dither", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_record_that_says_nothing_clear_is_refused_and_nothing_is_lost(entry, tmp_path):
    with make("dither") as it:
        it.step(rows(1)[0])
        path = it.save(tmp_path)
        record = read_record(path) | {"weight_rounding": entry}
        (path / "trainer.json").write_text(json.dumps(record))
        before = it.parameters()
        it.step(rows(2)[1])
        after = it.parameters()
        with pytest.raises(UserError, match=r"weight_rounding|dither"):
            it.restore(path)
        assert same(it.parameters(), after) and not same(after, before)
        assert it.weight_rounding == WeightRounding.of("dither", SEED)


def test_a_damaged_checkpoint_leaves_the_rounding_as_it_was(tmp_path):
    """With another one the halves that are there would be of other masters."""
    with make("nearest") as it:
        path = it.save(tmp_path)
    with make(None) as it:
        it.step(rows(1)[0])
        before, own = it.parameters(), it.weight_rounding
        assert own.rounding == DEFAULT_ROUNDING
        for file in (path / "head").rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(UserError, match="head"):
            it.restore(path)
        assert it.weight_rounding == own
        assert same(it.parameters(), before)


def test_an_unknown_rounding_is_refused_before_weights_are_read():
    with (
        pytest.raises(ValueError, match=r"weight_rounding='up'.*dither.*nearest"),
        make("up", max_grad_norm=None),
    ):
        pass


# Exports


@pytest.mark.parametrize("rounding", OFTEN_DITHER)
def test_what_is_read_for_an_export_is_what_the_last_pass_computed_with(rounding):
    """A trainer that is given those weights, which lie on the grid, computes the same loss."""
    with make(rounding) as it:
        it.step(rows(2)[0])
        it.step(rows(2)[1])
        loss = it.evaluate(rows(1)[0])
        with it.gate.reading() as reader:
            weights = {
                name: reader.read_rounded(name, it.weight_rounding)
                for name in it.gate.parameter_names
            }
            other = it.weight_rounding.named(ROUNDINGS[1 - ROUNDINGS.index(rounding)], SEED)
            others = {name: reader.read_rounded(name, other) for name in weights}
    config = small_config(layers=2)
    plan = strategy(rows_per_step=ROWS, compute_dtype="bfloat16", num_host_devices=HOST_DEVICES)
    found = []
    for given in (weights, others):
        with trainer(config, optax.sgd(0.0), plan, parameters=given, num_devices=1) as it:
            found.append(it.evaluate(rows(1)[0]))
    assert found[0] == loss != found[1]


def test_averages_are_rounded_in_the_same_way():
    with make("dither", ema_decay=0.5) as it:
        it.step(rows(1)[0])
        averages, own = it.averaged_parameters(), it.weight_rounding
        with it.gate.reading() as reader:
            for name, values in averages.items():
                found = reader.read_rounded(name, own, averaged=True)
                assert found.tobytes() == rounded(values, own, name).tobytes()
