"""Bisection from a guess finds what a walk finds, and a good guess saves questions."""

from hypothesis import given
from hypothesis import strategies as st

from slidedp_jax.planner.bisection import smallest


@given(
    most=st.integers(0, 200),
    share=st.floats(0, 1),
    guess=st.none() | st.integers(-5, 300),
)
def test_the_smallest_is_found_whatever_the_guess(most, share, guess):
    answer, asked = round(share * most), []

    def holds(number):
        assert 0 <= number < most
        asked.append(number)
        return number >= answer

    assert smallest(holds, most, guess) == answer
    assert len(asked) == len(set(asked))
    if guess == answer < most:
        assert len(asked) <= 2
