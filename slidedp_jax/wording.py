"""Numbers in sentences for people."""

from __future__ import annotations


def counted(number: int, one: str, several: str | None = None) -> str:
    """A number of things: `1 row`, `1,200 rows`.

    Args:
      number: how many.
      one: of them.
      several: of them; None adds an s.
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def short_count(number: float) -> str:
    """A large number to three digits: `960`, `208k`, `135M`, `8.19B`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            digits = 2 if number < 9.995 * size else 1 if number < 99.95 * size else 0
            return f"{number / size:.{digits}f}{letter}"
    return f"{number:.0f}"
