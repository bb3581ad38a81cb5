"""Bisection that begins at a guess."""

from __future__ import annotations

from collections.abc import Callable


def smallest(holds: Callable[[int], bool], most: int, guess: int | None = None) -> int:
    """The smallest number for which it holds; from there on it does, at the latest at `most`.

    A good guess takes two questions where bisection alone takes log2 of `most`.

    Args:
      holds: asked of numbers from 0 to `most` - 1.
      most: where it holds; not asked.
      guess: where the answer is expected; None: in the middle.
    """
    least, reach = 0, 1
    ask = most // 2 if guess is None else guess
    while least < most:
        ask = ask if least <= ask < most else (least + most) // 2
        if holds(ask):
            most, ask = ask, ask - reach
        else:
            least, ask = ask + 1, ask + reach
        reach *= 2
    return most
