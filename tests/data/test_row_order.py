"""Files with weights: counted by hand, the same at any place, and nothing else without weights."""

from collections import Counter

import grain
import numpy as np
import pytest
from byte_tokenizer import ENDOFTEXT

from slidedp_jax.data import BatchSource, ExamplesBuilder
from slidedp_jax.data.row_order import RowOrder, checked_weights
from slidedp_jax.errors import UserError


def made_up(*files, length=lambda row: 3 + row % 5):
    """Examples of rows whose first token is their number; `files` are numbers of rows."""
    builder, row = ExamplesBuilder(), 0
    for count in files:
        for _ in range(count):
            ids = np.full(length(row), row, np.int32)
            builder.append(ids, np.arange(len(ids)) > 0, row)
            row += 1
    return builder.finish(files)


def epochs(source, number):
    """Row ids of each epoch."""
    found = [[] for _ in range(number)]
    for batch in source:
        if batch.epoch == number:
            return found
        found[batch.epoch] += batch.row_ids


def test_without_weights_the_order_is_graind_permutation_as_it_always_was():
    order = RowOrder([5, 6], None, 7)
    plain = grain.MapDataset.range(11).seed(7).shuffle().repeat()
    for epoch in range(3):
        expected = [int(plain[epoch * 11 + i]) for i in range(11)]
        assert [order.row(epoch, i) for i in range(11)] == expected
    assert checked_weights([1, 1], 2) is None and checked_weights([], 2) is None


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", [False, True])
def test_each_file_gives_its_rows_as_often_as_its_weight_says(shuffle, packing):
    examples = made_up(8, 12, 6, 4)
    source = BatchSource(
        examples,
        max_seq_length=16,
        step_size=4,
        shuffle=shuffle,
        packing=packing,
        file_weights=[2, 0.5, 1, 0],
        pad_id=ENDOFTEXT,
    )
    seen = epochs(source, 4)
    for epoch in seen:
        counts = Counter(epoch)
        assert all(counts[row] == 2 for row in range(8))
        assert all(counts[row] == 1 for row in range(20, 26))
        assert not any(row >= 26 for row in counts)
        if not packing:
            assert sum(counts[row] for row in range(8, 20)) == 6
    for both in () if packing else (seen[:2], seen[2:]):  # one half of a file, then the other
        counts = Counter(row for epoch in both for row in epoch)
        assert all(counts[row] == 1 for row in range(8, 20))
    if shuffle:
        assert seen[0] != seen[1]
        assert [row < 8 for row in seen[0]] != sorted((row < 8 for row in seen[0]), reverse=True)
    assert sum(share for _, share in source.mix) == pytest.approx(1)


def test_shares_of_tokens_and_padding_by_hand():
    examples = made_up(2, 4, length=lambda row: 32 if row < 2 else 64)
    source = BatchSource(examples, max_seq_length=64, step_size=1, file_weights=[3, 0.5])
    assert source.num_rows == 3 * 2 + 2
    assert source.mix == ((6, 192 / 320), (2, 128 / 320))
    assert source.widths == (64,) and source.padding_share == pytest.approx(1 - 320 / (8 * 64))
    assert source.typical_documents == (32,)
    packed = BatchSource(
        examples, max_seq_length=64, step_size=1, file_weights=[3, 0.5], packing=True
    )
    assert packed.num_rows == 3 + 2 and packed.padding_share == 0
    plain = BatchSource(examples, max_seq_length=64, step_size=1, packing=True)
    assert plain.mix == () and plain.num_rows == 5


def test_a_run_goes_on_where_it_was_and_not_with_other_weights():
    examples = made_up(8, 12)
    settings = {"max_seq_length": 16, "step_size": 3, "seed": 5}
    source = BatchSource(examples, file_weights=[2, 0.5], **settings)
    batches = [next(source).row_ids for _ in range(11)]
    other = BatchSource(examples, file_weights=[2, 0.5], **settings)
    for _ in range(4):
        next(other)
    resumed = BatchSource(examples, file_weights=[2, 0.5], **settings)
    resumed.restore(other.state())
    assert [next(resumed).row_ids for _ in range(7)] == batches[4:]
    for weights in (None, [1, 1], [0.5, 2]):
        changed = BatchSource(examples, file_weights=weights, **settings)
        with pytest.raises(UserError, match=r"file_weights was \[2.0, 0.5\]"):
            changed.restore(other.state())
        with pytest.raises(UserError, match="file_weights was"):
            resumed.restore(changed.state())


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_does_not_go_on_with_other_borders_between_its_files(packing):
    """The rows are the same ones in the same order, but belong to other files."""
    settings = {"max_seq_length": 16, "step_size": 3, "packing": packing, "file_weights": [2, 0.5]}
    source = BatchSource(made_up(8, 12), **settings)
    next(source)
    state = source.state()
    moved = BatchSource(made_up(9, 11), **settings)
    with pytest.raises(UserError, match=r"rows_of_files was \[8, 12\], is \[9, 11\]"):
        moved.restore(state)
    del state["rows_of_files"]
    source.restore(state)  # of a version that did not write them
    plain = settings | {"file_weights": None}
    BatchSource(made_up(9, 11), **plain).restore(BatchSource(made_up(8, 12), **plain).state())


def test_states_of_versions_without_weights_are_read():
    source = BatchSource(made_up(8, 12), max_seq_length=16, step_size=3)
    next(source)
    state = source.state()
    assert state.pop("file_weights") is None
    source.restore(state)


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, -1], [0, 0], [1, float("nan")]])
def test_weights_are_checked(weights):
    with pytest.raises(UserError, match="weights"):
        BatchSource(made_up(8, 12), max_seq_length=16, step_size=3, file_weights=weights)


def test_a_small_weight_still_gives_a_row_and_an_empty_file_none():
    order = RowOrder([5, 0, 7], [0.01, 3, 1], 0)
    assert order.taken == (1, 0, 7)
    seen = {order.row(epoch, place) for epoch in range(5) for place in range(8)}
    assert seen == set(range(12))
