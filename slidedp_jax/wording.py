"""Words for people: numbers in sentences, lines that fit the terminal, errors of commands."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

_MOST_INDENT = 0.55
"""Share of a terminal that the columns of a table may take before its text is broken under them."""


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


def columns_of(stream: TextIO) -> int | None:
    """Width of the terminal that is written to; None: it is none, and nothing is to be broken."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def wrapped(text: str, columns: int | None, indent: int | None = None) -> str:
    """Lines broken between words to fit; flags, paths and words are left whole.

    Args:
      text: one or more lines.
      columns: to fit in; None breaks nothing.
      indent: of what goes on in the next line; None: under the last column of a table's line, else
        two more than the line's own.
    """
    if columns is None:
        return text
    return "\n".join(_wrapped_line(line, columns, indent) for line in text.split("\n"))


def _wrapped_line(line: str, columns: int, indent: int | None) -> str:
    if len(line) <= columns:
        return line
    if indent is None:
        own = len(line) - len(line.lstrip(" "))
        begins = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line)]
        begins = [begin for begin in begins if begin <= _MOST_INDENT * columns]
        indent = begins[-1] if begins else own + 2
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say_error(error: object) -> None:
    """Print what is wrong with a command to stderr, broken to fit a terminal."""
    print(wrapped(f"error: {error}", columns_of(sys.stderr)), file=sys.stderr)
