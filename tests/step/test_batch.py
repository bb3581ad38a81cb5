"""From rows to arrays on devices, held against loops over single tokens, and what must not depend
on how rows are dealt."""

import functools

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_training import initial_parameters, random_batch
from streamed_training import small_config, strategy, train, trainer

from slidedp_jax import UserError
from slidedp_jax.models.batch_arrays import document_offsets, shift_labels
from slidedp_jax.step.batch import prepare
from slidedp_jax.step.pipeline import Pipeline

VOCAB = 97


@st.composite
def batches(draw, max_rows=5):
    """Rows of documents of any length, with padding before, between and after them."""
    num_tokens = draw(st.integers(2, 12))
    num_rows = draw(st.integers(1, max_rows))
    rows = []
    for _ in range(num_rows):
        row: list[int] = []
        document = 0
        while len(row) < num_tokens:
            length = draw(st.integers(1, num_tokens))
            if draw(st.booleans()):
                document += 1
                row += [document] * length
            else:
                row += [0] * length
        rows.append(row[:num_tokens])
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (num_rows, num_tokens))
    labels = np.where(rng.random(ids.shape) < 0.3, -100, rng.integers(0, VOCAB, ids.shape))
    return {"input_ids": ids, "labels": labels, "segment_ids": np.array(rows)}


def target_of(batch, row, position):
    """What position `position` must predict, -100 for nothing."""
    following = position + 1
    if following == batch["labels"].shape[1]:
        return -100
    if "segment_ids" in batch:
        segments = batch["segment_ids"][row]
        if segments[following] == 0 or segments[following] != segments[position]:
            return -100
    return batch["labels"][row, following]


def documents_of(segments):
    """(start, length) of every document of a row, in order."""
    documents, start = [], 0
    while start < len(segments):
        end = start
        while end < len(segments) and segments[end] == segments[start]:
            end += 1
        if segments[start]:
            documents.append((start, end - start))
        start = end
    return documents


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(),
    packed=st.booleans(),
    num_devices=st.integers(1, 4),
    rows_per_microbatch=st.integers(1, 3),
)
def test_every_token_is_where_and_what_it_should_be(
    batch, packed, num_devices, rows_per_microbatch
):
    if not packed:
        del batch["segment_ids"]
    num_rows, num_tokens = batch["input_ids"].shape
    targets = [
        [target_of(batch, row, position) for position in range(num_tokens)]
        for row in range(num_rows)
    ]
    num_supervised = int((np.array(targets) != -100).sum())
    arguments = {
        "vocab_size": VOCAB,
        "num_devices": num_devices,
        "rows_per_microbatch": rows_per_microbatch,
    }
    if num_supervised == 0:
        with pytest.raises(UserError, match="no supervised token"):
            prepare(batch, **arguments)
        return
    prepared = prepare(batch, **arguments)
    assert prepared.num_supervised == num_supervised
    padding = (batch["segment_ids"] == 0).sum() if packed else 0
    assert prepared.num_tokens == num_rows * num_tokens - padding
    rows_at_once = num_devices * rows_per_microbatch
    assert {len(part["targets"]) for part in prepared.microbatches} == {rows_at_once}
    assert 0 <= len(prepared.microbatches) * rows_at_once - num_rows < rows_at_once
    expected_keys = {"input_ids", "targets", "positions"}
    if packed:
        expected_keys |= {"segment_ids", "document_starts", "document_lengths"}
    assert {frozenset(part) for part in prepared.microbatches} == {frozenset(expected_keys)}
    for number, part in enumerate(prepared.microbatches):
        for name, array in part.items():
            assert array.dtype == np.int32, name
        for inner in range(rows_at_once):
            row = number * rows_at_once + inner
            if row >= num_rows:  # fills up; must weigh nothing
                assert (part["targets"][inner] == -100).all()
                assert not part["input_ids"][inner].any()
                assert not packed or not part["segment_ids"][inner].any()
                continue
            np.testing.assert_array_equal(part["input_ids"][inner], batch["input_ids"][row])
            np.testing.assert_array_equal(part["targets"][inner], targets[row])
            segments = batch["segment_ids"][row] if packed else np.ones(num_tokens, int)
            positions = np.zeros(num_tokens, int)
            for start, length in documents_of(segments):
                positions[start : start + length] = range(length)
            np.testing.assert_array_equal(part["positions"][inner], positions)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), documents_per_row=st.integers(1, 9))
def test_offsets_name_every_document_of_a_row(batch, documents_per_row):
    segments = batch["segment_ids"]
    starts, lengths = document_offsets(segments, documents_per_row)
    expected = [documents_of(row) for row in segments]
    most = max(map(len, expected))
    width = lengths.shape[1]
    assert starts.shape == (len(segments), width + 1)
    if most <= documents_per_row:
        assert width == documents_per_row
    else:
        assert most <= width < 2 * most
        assert width & (width - 1) == 0
    for row, documents in enumerate(expected):
        there = len(documents)
        got = list(zip(starts[row, :there], lengths[row, :there], strict=True))
        assert got == documents
        assert not lengths[row, there:].any()
        end = sum(documents[-1]) if documents else 0
        assert (starts[row, there:] == end).all()


def test_a_document_never_predicts_the_next_ones_first_token():
    labels = np.array([[10, 11, 12, 20, 21, 0, 0]])
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]])
    np.testing.assert_array_equal(
        shift_labels(labels, segments), [[11, 12, -100, 21, -100, -100, -100]]
    )
    np.testing.assert_array_equal(shift_labels(labels, None), [[11, 12, 20, 21, 0, 0, -100]])


def test_given_positions_are_kept():
    ids = np.array([[1, 2, 3]])
    prepared = prepare(
        {"input_ids": ids, "labels": ids, "positions": np.array([[5, 6, 7]])},
        vocab_size=VOCAB,
        num_devices=1,
        rows_per_microbatch=1,
    )
    np.testing.assert_array_equal(prepared.microbatches[0]["positions"], [[5, 6, 7]])


def test_seeds_go_with_the_rows_place_in_the_step():
    """Five rows on two devices in microbatches of one: six places, the last of them padding."""
    ids = np.arange(10).reshape(5, 2)
    split = {"vocab_size": VOCAB, "num_devices": 2, "rows_per_microbatch": 1}
    prepared = prepare({"input_ids": ids, "labels": ids}, seed_and_step=(9, 4), **split)
    seeds = np.concatenate([arrays["row_seeds"] for arrays in prepared.microbatches])
    assert seeds.dtype == np.uint32
    np.testing.assert_array_equal(seeds, [[9, 4, place] for place in range(6)])
    plain = prepare({"input_ids": ids, "labels": ids}, **split)
    assert "row_seeds" not in plain.microbatches[0]
    with pytest.raises(UserError, match="seed is -1"):
        prepare({"input_ids": ids, "labels": ids}, seed_and_step=(-1, 4), **split)


GOOD = np.arange(8).reshape(2, 4)


def changed(row, position, value):
    array = GOOD.copy()
    array[row, position] = value
    return array


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": GOOD}, r"lacks \['labels'\]"),
        ({"labels": GOOD}, r"lacks \['input_ids'\]"),
        ({"input_ids": GOOD[0], "labels": GOOD[0]}, r"\[rows, tokens\].*\(4,\)"),
        ({"input_ids": GOOD[:0], "labels": GOOD[:0]}, "not empty"),
        ({"input_ids": GOOD, "labels": GOOD[:, 1:]}, r"labels has shape \(2, 3\)"),
        (
            {"input_ids": GOOD, "labels": GOOD, "segment_ids": GOOD[:1]},
            r"segment_ids has shape \(1, 4\)",
        ),
        ({"input_ids": changed(1, 2, VOCAB), "labels": GOOD}, r"input_ids\[1, 2\] is 97.*97 ids"),
        ({"input_ids": changed(0, 3, -1), "labels": GOOD}, r"input_ids\[0, 3\] is -1"),
        ({"input_ids": changed(0, 3, -100), "labels": GOOD}, r"input_ids\[0, 3\] is -100"),
        ({"input_ids": GOOD, "labels": changed(1, 0, 98)}, r"labels\[1, 0\] is 98"),
        ({"input_ids": GOOD, "labels": changed(1, 0, -1)}, r"labels\[1, 0\] is -1"),
        ({"input_ids": GOOD, "labels": np.full_like(GOOD, -100)}, "no supervised token"),
    ],
)
def test_bad_batches_are_refused_with_the_place(batch, message):
    with pytest.raises(UserError, match=message):
        prepare(batch, vocab_size=VOCAB, num_devices=1, rows_per_microbatch=1)


def test_a_refused_batch_leaves_the_trainer_usable():
    config = small_config(layers=1)
    with trainer(config, optax.sgd(1e-2), strategy(), num_devices=1) as it:
        with pytest.raises(UserError, match="vocabulary"):
            it.step({"input_ids": changed(0, 0, 97), "labels": GOOD})
        assert np.isfinite(it.step({"input_ids": GOOD, "labels": GOOD}).grad_norm)
        assert it.step_count == 1


def test_more_rows_than_were_planned_for_are_refused_and_fewer_are_not():
    """A step keeps what every microbatch passes on; the plan counted those that it knew of."""
    config = small_config(layers=1)
    plan = strategy(rows_per_microbatch=2, num_microbatches=3, num_host_devices=2)
    with trainer(config, optax.sgd(1e-2), plan, num_devices=2) as it:

        def step(rows):
            return it.step(random_batch(config, rows, 8, packed=False)).grad_norm

        with pytest.raises(UserError) as refused:
            step(13)
        for part in (
            "the batch of 13 rows makes 4 microbatches of 2 rows on 2 devices",
            "planned for 3: plan with rows_per_step=13",
            "at most 12 rows per step",
        ):
            assert part in str(refused.value)
        assert all(np.isfinite(step(rows)) for rows in (12, 5, 1))
        assert it.step_count == 3


LENGTHS = (0, 0, 1, 3, 8, 11, 14, 15)
"""Supervised tokens of eight rows of 16: sorted, so devices' and microbatches' loads are uneven.

Some microbatches and devices have none at all.
"""


@functools.cache
def uneven_run(num_devices, rows_per_microbatch):
    config = small_config(layers=1)
    rows = []
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, config.vocab_size, (8, 16))
        index = np.arange(16)[None]
        labels = np.where((index > 0) & (index <= np.array(LENGTHS)[:, None]), ids, -100)
        rows.append({"input_ids": ids, "labels": labels})
    plan = strategy(
        rows_per_step=8,
        num_devices=num_devices,
        rows_per_microbatch=rows_per_microbatch,
        num_host_devices=6 if num_devices == 3 else 8,
    )
    return train(
        config,
        optax.adamw(1e-3, eps=1e-5),
        plan,
        rows,
        parameters=initial_parameters(config),
        max_grad_norm=0.5,
        num_devices=num_devices,
    )


@pytest.mark.parametrize(
    ("num_devices", "rows_per_microbatch"),
    [
        (3, 2),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((1, 4), (1, 2), (1, 1), (2, 4), (2, 1), (4, 2), (8, 1))
        ),
    ],
)
def test_a_token_weighs_the_same_on_any_device_and_in_any_microbatch(
    num_devices, rows_per_microbatch
):
    """Against all eight rows at once on one device; sums are taken in other orders.

    Three devices do not divide the rows: rows without weight fill up.

    A mean of the devices' or microbatches' means would be off by a factor of up to 4 here.
    """
    run, at_once = uneven_run(num_devices, rows_per_microbatch), uneven_run(1, 8)
    np.testing.assert_allclose(run.losses, at_once.losses, rtol=1e-6)
    np.testing.assert_allclose(run.norms, at_once.norms, rtol=1e-5)
    for name, values in at_once.parameters.items():
        np.testing.assert_allclose(run.parameters[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    for state, expected in zip(run.state, at_once.state, strict=True):
        for name, values in expected.items():
            atol = 2e-5 * np.abs(values).max()
            np.testing.assert_allclose(state[name], values, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("num_devices", "rows_per_microbatch"),
    [(2, 3), *(pytest.param(n, n, marks=pytest.mark.thorough) for n in (1, 4))],
)
def test_evaluation_does_not_depend_on_devices_or_batch_size(num_devices, rows_per_microbatch):
    """Five rows, filled up in every way; the figure is that of one device at once."""
    config = small_config(layers=1)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, config.vocab_size, (5, 16))
    labels = np.where(rng.random(ids.shape) < 0.5, -100, ids)
    figures = []
    for devices, rows in ((num_devices, rows_per_microbatch), (1, 5)):
        with trainer(
            config,
            optax.sgd(1e-2),
            strategy(rows_per_microbatch=rows),
            parameters=initial_parameters(config),
            num_devices=devices,
        ) as it:
            figures.append(it.evaluate({"input_ids": ids, "labels": labels}))
    assert figures[0][1] == figures[1][1] == int((labels[:, 1:] != -100).sum())
    np.testing.assert_allclose(figures[0][0], figures[1][0], rtol=1e-6)


IDS = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": [[1, 1, 0]] * 2}, "attention_mask.*segment_ids"),
        ({"positons": IDS}, "positons.*positions"),
        ({"input_ids": [[1.0, 2.5, 3.0]] * 2}, "input_ids is of dtype float64"),
        ({"segment_ids": [[True, True, False]] * 2}, "segment_ids is of dtype bool"),
        ({"input_ids": [[1, 2, 3], [4, 5]]}, "rows of input_ids have different lengths"),
    ],
    ids=["attention_mask", "misspelt", "fractions", "booleans", "ragged"],
)
def test_what_nothing_reads_or_no_id_can_be_is_refused(changes, message):
    batch = {"input_ids": IDS, "labels": IDS} | changes
    with pytest.raises(UserError, match=message):
        prepare(batch, vocab_size=10, num_devices=1, rows_per_microbatch=2)


def test_plain_lists_are_as_good_as_arrays():
    lists = {"input_ids": IDS, "labels": IDS, "segment_ids": [[1, 1, 0], [1, 2, 2]]}
    arrays = {name: np.asarray(values) for name, values in lists.items()}
    one, other = (
        prepare(batch, vocab_size=10, num_devices=1, rows_per_microbatch=2)
        for batch in (lists, arrays)
    )
    for name, values in one.microbatches[0].items():
        np.testing.assert_array_equal(values, other.microbatches[0][name])


def test_more_rows_than_a_step_has_are_evaluated_as_many_at_a_time(monkeypatch):
    passes = []
    losses = Pipeline.losses
    monkeypatch.setattr(
        Pipeline,
        "losses",
        lambda self, weights, some: passes.append(len(some)) or losses(self, weights, some),
    )
    config = small_config(layers=1)
    batch = random_batch(config, 13, 8, packed=True)
    figures = []
    for num_microbatches in (3, 7):
        plan = strategy(rows_per_microbatch=1, num_microbatches=num_microbatches)
        parameters = initial_parameters(config)
        with trainer(config, optax.sgd(1e-2), plan, parameters=parameters, num_devices=2) as it:
            figures.append(it.evaluate(batch))
    assert passes == [3, 3, 1, 7]
    assert figures[0] == figures[1]
