"""Packing: every example once, whole, no row over its length (properties)."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidedp_jax.data import one_per_row, pack
from slidedp_jax.errors import UserError


@st.composite
def lengths_and_room(draw):
    room = draw(st.integers(1, 64))
    return np.array(draw(st.lists(st.integers(1, room), max_size=80)), np.int64), room


@given(lengths_and_room())
def test_every_example_once_and_no_row_over_length(case):
    lengths, room = case
    plan = pack(lengths, room)
    assert sorted(plan.members.tolist()) == list(range(len(lengths)))
    assert plan.offsets[0] == 0 and plan.offsets[-1] == len(lengths)
    sizes = [lengths[plan.row(r)].sum() for r in range(len(plan))]
    assert all(0 < size <= room for size in sizes)
    # Best fit leaves no two rows that would fit into one.
    assert sum(sorted(sizes)[:2]) > room or len(sizes) < 2


@given(lengths_and_room())
def test_rows_and_their_examples_keep_the_order(case):
    lengths, room = case
    plan = pack(lengths, room)
    firsts = [plan.row(r)[0] for r in range(len(plan))]
    assert firsts == sorted(firsts)
    for r in range(len(plan)):
        assert (np.diff(plan.row(r)) > 0).all()


@given(lengths_and_room())
def test_packing_depends_on_the_lengths_alone(case):
    lengths, room = case
    first, again = pack(lengths, room), pack(lengths.copy(), room)
    assert first.members.tolist() == again.members.tolist()
    assert first.offsets.tolist() == again.offsets.tolist()


def test_the_fullest_row_that_fits_is_taken():
    # 7 and 6 open rows with room for 3 and 4; the 3 fits both and fills the first.
    plan = pack(np.array([6, 3, 7]), 10)
    assert [plan.row(r).tolist() for r in range(len(plan))] == [[0], [1, 2]]


@given(lengths_and_room(), st.integers(1, 5))
def test_no_row_has_more_documents_than_allowed(case, most):
    lengths, room = case
    plan = pack(lengths, room, most_documents=most)
    assert sorted(plan.members.tolist()) == list(range(len(lengths)))
    sizes = [lengths[plan.row(r)].sum() for r in range(len(plan))]
    counts = np.diff(plan.offsets)
    assert all(size <= room for size in sizes) and (counts <= most).all()
    # Two rows stay apart only where one is full or together they would be.
    for one, other in combinations(range(len(plan)), 2):
        assert sizes[one] + sizes[other] > room or max(counts[one], counts[other]) == most
    loose = pack(lengths, room, most_documents=max(1, len(lengths)))
    assert loose.members.tolist() == pack(lengths, room).members.tolist()


def test_rows_are_nearly_full_on_a_realistic_spread():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.8, 20_000), 1, 1024).astype(np.int64)
    assert lengths.sum() / (len(pack(lengths, 1024)) * 1024) > 0.99


def test_too_long_an_example_is_an_error():
    with pytest.raises(UserError, match="example 1 has 9 tokens"):
        pack(np.array([3, 9]), 8)


def test_one_per_row():
    plan = one_per_row(3)
    assert [plan.row(r).tolist() for r in range(len(plan))] == [[0], [1], [2]]
    assert len(one_per_row(0)) == len(pack(np.array([], np.int64), 8)) == 0
