"""What a user should know of rows that are used all the same, counted by file.

A row says how many of its things (messages, calls, the row itself) a remark is true of; a file's
rows together become one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """Something about a row.

    Attributes:
      text: what is printed, `{}` where the number goes, `[row|rows]` where one or several differ.
      count: how many things of the row it is true of; nothing is printed of a file without any.
      of: how many things of the row it could have been true of; None where that says nothing.
    """

    text: str
    count: int = 1
    of: int | None = None


@final
class Remarks:
    """The remarks of all files while they grow."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[int, int | None]] = {}

    def add(self, file: str, remarks: Iterable[Remark]) -> None:
        """Count what is said of one row of a file."""
        for remark in remarks:
            self._count(file, remark.text, remark.count, remark.of)

    def add_all(self, others: Remarks) -> None:
        """Count what is said of further rows."""
        for (file, text), (count, of) in others._sums.items():
            self._count(file, text, count, of)

    def _count(self, file: str, text: str, count: int, of: int | None) -> None:
        so_far, of_so_far = self._sums.get((file, text), (0, None))
        of = of_so_far if of is None else (of_so_far or 0) + of
        self._sums[file, text] = (so_far + count, of)

    def lines(self) -> tuple[str, ...]:
        """One line for each file and remark, in the order in which they came up."""
        return tuple(
            f"{file}: {_sentence(text, count, of)}"
            for (file, text), (count, of) in self._sums.items()
            if count
        )


_ONE_OR_SEVERAL = re.compile(r"\[([^][|{}]*)\|([^][|{}]*)\]")


def _sentence(text: str, count: int, of: int | None) -> str:
    form = 1 if (count if of is None else of) == 1 else 2
    number = f"{count:,}" if of is None else f"{count:,} of {of:,}"
    return _ONE_OR_SEVERAL.sub(lambda found: found[form], text).replace("{}", number, 1)
