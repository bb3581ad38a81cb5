"""Steps: order, coverage, resuming, shapes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp_jax.data import (
    IGNORED,
    BatchSource,
    Examples,
    ExamplesBuilder,
    StepSize,
    row_widths,
)
from slidedp_jax.errors import UserError
from slidedp_jax.step.batch import prepare


def make_examples(lengths, seed=0) -> Examples:
    """Random examples; the last half of each is supervised."""
    rng = np.random.default_rng(seed)
    builder = ExamplesBuilder()
    for i, length in enumerate(lengths):
        supervised = np.arange(length) >= length / 2
        builder.append(rng.integers(1, 100, length).astype(np.int32), supervised, i)
    return builder.finish()


LENGTHS = [3 + (7 * i) % 29 for i in range(64)]


def source_of(lengths=LENGTHS, rows=8, **kwargs):
    return BatchSource(make_examples(lengths), **{"max_seq_length": 32, "step_size": rows} | kwargs)


def ids_of(batches):
    return [row for batch in batches for row in batch.row_ids]


# Order and coverage.


@pytest.mark.parametrize("packing", [False, True])
def test_each_epoch_is_complete_and_different(packing):
    source = source_of(packing=packing)
    epochs = [ids_of(islice(source, source.steps_per_epoch)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = source_of(packing=packing)
    assert [ids_of(islice(again, again.steps_per_epoch)) for _ in range(3)] == epochs
    other = source_of(packing=packing, seed=7)
    assert ids_of(islice(other, other.steps_per_epoch)) != epochs[0]


def test_order_does_not_depend_on_the_devices_or_the_batch():
    whole = ids_of(islice(source_of(rows=64), 2))
    for size in (StepSize(per_device=8), StepSize(per_device=2, accumulation=2, num_devices=2), 3):
        source = source_of(rows=size)
        assert ids_of(islice(source, 2 * source.steps_per_epoch)) == whole


def test_without_shuffling_the_order_is_the_files():
    source = source_of(shuffle=False)
    assert ids_of(islice(source, 16)) == list(range(64)) * 2


def test_leftover_rows_make_a_smaller_step():
    source = source_of(lengths=LENGTHS[:10], rows=4)
    assert source.steps_per_epoch == 3 and source.num_steps(2) == 6
    batches = list(islice(source, 6))
    assert [len(batch.row_ids) for batch in batches] == [4, 4, 2] * 2
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1]
    assert sorted(ids_of(batches)) == sorted(list(range(10)) * 2)


def test_parts_of_epochs_round_up_to_steps():
    source = source_of(rows=10)  # 7 steps
    assert [source.num_steps(n) for n in (0, 0.5, 1, 1.1, 2.5)] == [0, 4, 7, 8, 18]


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_every_row_once_per_epoch(num_rows, rows_per_step, seed):
    source = source_of(lengths=[4] * num_rows, rows=rows_per_step, seed=seed)
    for epoch in range(2):
        batches = list(islice(source, source.steps_per_epoch))
        assert sorted(ids_of(batches)) == list(range(num_rows))
        assert {batch.epoch for batch in batches} == {epoch}


# Resuming.


@pytest.mark.parametrize("packing", [False, True])
def test_resumed_run_continues_the_sequence(packing):
    reference = source_of(rows=6, packing=packing)
    total = reference.num_steps(2.5)
    batches = list(islice(reference, total))
    boundary = reference.steps_per_epoch
    for stop in (0, 1, 2, boundary - 1, boundary, boundary + 2, total):
        source = source_of(rows=6, packing=packing)
        list(islice(source, stop))
        state = json.loads(json.dumps(source.state()))
        resumed = source_of(rows=6, packing=packing)
        resumed.restore(state)
        for expected in batches[stop:]:
            batch = next(resumed)
            assert (batch.row_ids, batch.epoch) == (expected.row_ids, expected.epoch)
            for name, array in expected.arrays.items():
                np.testing.assert_array_equal(batch.arrays[name], array)


def test_resuming_with_another_batch_size_uses_each_row_once():
    first = source_of(rows=10)
    seen = ids_of(islice(first, 3))
    second = source_of(rows=7)
    second.restore(first.state())
    assert second.steps_until(1) == 5
    seen += ids_of(islice(second, 5))
    assert sorted(seen) == list(range(64))
    assert next(second).epoch == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"packing": True}, "packing"),
        ({"shuffle": False}, "shuffle"),
        ({"lengths": LENGTHS[:-1]}, "num_rows"),
    ],
)
def test_state_of_other_data_or_order_is_refused(change, named):
    with pytest.raises(UserError, match=rf"belongs to other data or another order.*{named} was"):
        source_of(**change).restore(source_of().state())


def test_state_of_rows_with_other_tokens_is_refused():
    other = BatchSource(make_examples(LENGTHS, seed=1), max_seq_length=32, step_size=8)
    with pytest.raises(UserError, match="other data or another order: token ids, labels or"):
        other.restore(source_of().state())


def test_damaged_state_is_refused():
    state = source_of().state()
    with pytest.raises(UserError, match="row 64 of 64"):
        source_of().restore(state | {"next_row": 64})


def test_position_deep_in_two_million_rows_is_found_at_once():
    count = 2_000_000
    examples = Examples(
        coded=np.ones(4 * count, np.int32),
        offsets=np.arange(count + 1, dtype=np.int64) * 4,
        row_ids=np.arange(count, dtype=np.int64),
    )
    start = time.perf_counter()
    source = BatchSource(examples, max_seq_length=8, step_size=16)
    source.restore(source.state() | {"epoch": 2, "next_row": 1_999_990})
    batch = next(source)
    assert (len(batch.row_ids), batch.epoch, next(source).epoch) == (10, 2, 3)
    assert time.perf_counter() - start < 20


# Contents.


@pytest.mark.parametrize("packing", [False, True])
def test_documents_are_whole_and_apart(packing):
    examples = make_examples(LENGTHS)
    source = BatchSource(examples, max_seq_length=32, step_size=8, packing=packing, pad_id=100)
    seen = []
    for batch in islice(source, source.steps_per_epoch):
        rows = iter(batch.row_ids)
        assert ("segment_ids" in batch.arrays) == packing
        positions = batch.arrays["positions"]
        no_padding = (batch.arrays["input_ids"] != 100).astype(int)
        segments = batch.arrays.get("segment_ids", no_padding)
        assert all(a.dtype == np.int32 and a.shape == segments.shape for a in batch.arrays.values())
        for r in range(len(segments)):
            last = segments[r].max()
            assert segments[r][segments[r] > 0].tolist() == sorted(segments[r][segments[r] > 0])
            assert packing or last == 1
            for segment in range(1, last + 1):
                here, index = segments[r] == segment, next(rows)
                ids, labels = batch.arrays["input_ids"][r], batch.arrays["labels"][r]
                assert ids[here].tolist() == examples.input_ids(index).tolist()
                assert labels[here].tolist() == examples.labels(index).tolist()
                assert positions[r][here].tolist() == list(range(here.sum()))
                seen.append(index)
            padding = segments[r] == 0
            assert (batch.arrays["labels"][r][padding] == IGNORED).all()
            assert (batch.arrays["input_ids"][r][padding] == 100).all()
            assert not positions[r][padding].any()
        assert batch.num_tokens == (segments > 0).sum()
        assert batch.num_supervised_tokens == (batch.arrays["labels"] != IGNORED).sum()
    assert sorted(seen) == list(range(64))
    if packing:
        assert source.num_rows < 64
        assert examples.num_tokens > 0.9 * source.num_rows * source.widths[-1]


def test_first_token_of_a_packed_document_is_never_a_target():
    builder = ExamplesBuilder()
    for i in range(4):
        supervised = np.arange(5) > 0  # as load_examples leaves it
        builder.append(np.arange(1, 6, dtype=np.int32), supervised, i)
    batch = next(BatchSource(builder.finish(), max_seq_length=20, step_size=1, packing=True))
    starts = (batch.arrays["positions"] == 0) & (batch.arrays["segment_ids"] > 0)
    assert starts.sum() == 4 and (batch.arrays["labels"][starts] == IGNORED).all()


def test_num_tokens_does_not_count_padding():
    totals = []
    for multiple in (8, 512):
        source = source_of(pad_to_multiple_of=multiple)
        totals.append([batch.num_tokens for batch in source.one_epoch()])
    assert totals[0] == totals[1] and sum(totals[0]) == sum(LENGTHS)


@pytest.mark.parametrize("packing", [False, True])
def test_the_runtime_counts_what_is_announced(packing):
    source = source_of(packing=packing, rows=5)
    for batch in source.one_epoch():
        prepared = prepare(batch.arrays, vocab_size=100, num_devices=2, rows_per_microbatch=2)
        assert prepared.num_supervised == batch.num_supervised_tokens
        # Without segment ids nothing tells padding from tokens.
        announced = batch.num_tokens if packing else batch.arrays["input_ids"].size
        assert prepared.num_tokens == announced


# Shapes.


@given(st.integers(2, 200_000), st.sampled_from([1, 8, 64, 128, 100]))
def test_few_widths_the_last_holds_everything(max_seq_length, multiple):
    widths = row_widths(max_seq_length, multiple)
    assert 1 <= len(widths) <= 8
    assert list(widths) == sorted(set(widths))
    assert all(width % multiple == 0 for width in widths)
    assert max_seq_length <= widths[-1] < max_seq_length + multiple


def test_widths_by_hand():
    assert row_widths(32) == (32,)
    assert row_widths(1000) == (128, 256, 384, 512, 640, 768, 896, 1000)
    assert row_widths(4096) == tuple(range(512, 4097, 512))
    assert row_widths(200) == (64, 128, 192, 200)
    assert row_widths(1001) == (128, 256, 384, 512, 640, 768, 896, 1008)


def test_padded_rows_get_the_smallest_width_and_packed_rows_the_full():
    lengths = [10] * 4 + [70] + [10] * 3
    source = source_of(lengths=lengths, rows=4, shuffle=False, max_seq_length=300)
    assert [b.arrays["input_ids"].shape[1] for b in source.one_epoch()] == [64, 128]
    packed = source_of(lengths=lengths, rows=1, max_seq_length=300, packing=True)
    assert next(packed).arrays["input_ids"].shape == (1, 304)


# Too little, and evaluation.


def test_fewer_rows_than_a_step_names_the_numbers():
    size = StepSize(per_device=2, accumulation=4, num_devices=2)
    source = source_of(lengths=[5, 6, 7], rows=size)
    message = r"3 rows, fewer than.*16 = micro batch 2 x accumulation 4 x 2 devices; lower"
    with pytest.raises(UserError, match=message):
        source.require_whole_step()
    packed = source_of(lengths=[5, 6, 7], rows=size, packing=True)
    with pytest.raises(UserError, match=r"1 row \(packed from 3 examples\)"):
        packed.require_whole_step()
    source_of(lengths=[5] * 16, rows=size).require_whole_step()


def test_fewer_rows_than_a_step_names_those_that_were_dropped(load):
    rows = [{"text": "abc"}] * 6 + [{"input_ids": [1, 2], "labels": [-100, -100]}] * 2
    examples, report = load(rows)
    source = BatchSource(examples, max_seq_length=512, step_size=8)
    with pytest.raises(UserError, match=r"8 rows in the files were dropped: 2 nothing to learn in"):
        source.require_whole_step(report)
    examples, report = load(rows[:6])
    source = BatchSource(examples, max_seq_length=512, step_size=8)
    with pytest.raises(UserError, match=r"or give more rows\.$"):
        source.require_whole_step(report)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_evaluation_takes_any_number_of_rows(count, packing):
    source = source_of(lengths=LENGTHS[:count], rows=8, shuffle=False, packing=packing)
    for _ in range(2):
        batches = list(source.one_epoch())
        assert len(batches) == 1 and sorted(ids_of(batches)) == list(range(count))


def test_one_epoch_leaves_the_position_alone():
    source = source_of()
    expected = next(source_of()).row_ids
    list(source.one_epoch())
    assert next(source).row_ids == expected


def test_rows_made_ahead_are_those_of_the_next_step_and_leave_the_position_alone():
    plain, ahead = source_of(rows=6), source_of(rows=6)
    for step in range(2 * plain.steps_per_epoch + 1):
        state = plain.state()
        ahead.make_ahead()
        assert ahead.state() == state
        made = ahead._ahead[1]
        expected, found = next(plain), next(ahead)
        assert found is made and found.row_ids == expected.row_ids
        for name, array in expected.arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)
        if step == 2:  # what was made for another place is not taken
            ahead.make_ahead()
            ahead.restore(state)
            assert next(ahead).row_ids == expected.row_ids
    ahead.make_ahead()
    ahead.resize(4)
    plain.resize(4)
    assert next(ahead).row_ids == next(plain).row_ids


def test_settings_are_checked():
    for bad, message in (
        ({"seed": -1}, "seed"),
        ({"max_seq_length": 8}, "longest example has 31 tokens"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"most_documents_per_row": 0}, "most_documents_per_row is 0"),
        ({"rows": 0}, "per_device is 0"),
    ):
        with pytest.raises(UserError, match=message):
            source_of(**bad)


def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, slidedp_jax.data; "
        "print({'jax', 'grain', 'torch', 'transformers', 'flax'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"


def test_typical_documents_are_those_of_the_row_of_mean_attention():
    """Rows of 8: [8], [4, 4], [2, 2, 2, 2]; squares 64, 32, 16, mean 37: the second."""
    packed = source_of([8, 4, 4, 2, 2, 2, 2], packing=True, max_seq_length=8)
    assert packed.num_rows == 3
    assert packed.typical_documents == (4, 4)
    assert source_of([5, 5, 3], max_seq_length=8).typical_documents == (5,)
