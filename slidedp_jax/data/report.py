"""What became of the rows: counts that are printed before training."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slidedp_jax.data.remarks import Remarks
from slidedp_jax.wording import counted

DROP_REASONS = {
    "bad": "malformed",
    "empty": "without tokens",
    "over_long": "longer than max_seq_length",
    "no_assistant_message": "conversations without an assistant message",
    "no_supervised_tokens": "nothing to learn in them",
    "supervised_tokens_cut_off": "truncation left nothing to learn",
}
BAD_ROWS_SHOWN = 5
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Counts of one preparation. `rows_in == rows_kept + rows_dropped`.

    Attributes:
      files: the files read.
      max_seq_length: limit on the tokens of an example.
      rows_in: rows found, malformed ones included.
      rows_kept: rows from which at least one example came.
      dropped: reason (a key of `DROP_REASONS`) -> number of rows.
      truncated: rows cut to `max_seq_length` and kept.
      split: documents cut into several examples.
      num_examples: examples kept.
      num_tokens: their tokens.
      num_supervised_tokens: those of them that the loss counts (an example's first token, which
        nothing precedes, is never one).
      tokens_lost: tokens of dropped rows and those cut off.
      longest_row: tokens of the longest row before any cut.
      longest_source: its place.
      length_quantiles: quantile -> tokens per row before any cut.
      bad_rows: messages of the first malformed rows.
      notes: remarks on rows that were used all the same, one for each file and kind.
    """

    files: tuple[str, ...]
    max_seq_length: int
    rows_in: int
    rows_kept: int
    dropped: dict[str, int]
    truncated: int
    split: int
    num_examples: int
    num_tokens: int
    num_supervised_tokens: int
    tokens_lost: int
    longest_row: int
    longest_source: str
    length_quantiles: dict[float, int]
    bad_rows: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows_dropped(self) -> int:
        """Rows of which nothing was kept."""
        return sum(self.dropped.values())

    @property
    def drops(self) -> str:
        """How many rows were dropped for which reason, in one line; empty where none was."""
        return ", ".join(f"{n:,} {DROP_REASONS[r]}" for r, n in sorted(self.dropped.items()))

    def __str__(self) -> str:
        files = ", ".join(self.files[:3]) + (" ..." if len(self.files) > 3 else "")
        share = 100 * self.num_supervised_tokens / max(1, self.num_tokens)
        kept = f"{counted(self.rows_in, 'row')} in, {self.rows_kept:,} kept"
        if self.num_examples != self.rows_kept:
            kept += f" as {counted(self.num_examples, 'example')}"
        lines = [
            f"data     {files}",
            f"rows     {kept}, {self.rows_dropped:,} dropped, {self.truncated:,} truncated",
        ]
        for reason, count in sorted(self.dropped.items()):
            lines.append(f"         {count:,} dropped: {DROP_REASONS[reason]}")
        if self.split:
            lines.append(f"         {counted(self.split, 'document')} cut into windows")
        lines.append(
            f"tokens   {self.num_tokens:,}, {self.num_supervised_tokens:,} supervised "
            f"({share:.1f} %), {self.tokens_lost:,} lost to drops and cuts"
        )
        names = {0.0: "shortest", 1.0: "longest"}
        lengths = ", ".join(
            f"{names.get(q, f'p{100 * q:.0f}')} {tokens:,}"
            for q, tokens in self.length_quantiles.items()
        )
        lines.append(f"lengths  {lengths} tokens (max_seq_length {self.max_seq_length:,})")
        lines.append(f"         longest: {self.longest_row:,} tokens, {self.longest_source}")
        lines += [f"skipped  {message}" for message in self.bad_rows]
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


def report_as_json(report: DataReport) -> dict[str, Any]:
    """The same in JSON's types, for `report_of_json`."""
    quantiles = [[q, tokens] for q, tokens in report.length_quantiles.items()]
    return {**asdict(report), "length_quantiles": quantiles}


def report_of_json(saved: Mapping[str, Any], files: Sequence[str]) -> DataReport:
    """A report that was kept, with the names that its files have now.

    Args:
      saved: what `report_as_json` gave.
      files: names of the same files, in the same order.

    Raises:
      TypeError, KeyError, ValueError: it is none.
    """
    named: dict[str, str] = dict(zip(saved["files"], files, strict=True))

    def renamed(text: str) -> str:
        """A sentence that begins with a file's name."""
        begins = [name for name in named if text == name or text.startswith(f"{name}:")]
        name = max(begins, key=len, default="")
        return named.get(name, "") + text[len(name) :]

    return DataReport(
        **{
            **saved,
            "files": tuple(files),
            "length_quantiles": {float(q): int(n) for q, n in saved["length_quantiles"]},
            "longest_source": renamed(saved["longest_source"]),
            "bad_rows": tuple(map(renamed, saved["bad_rows"])),
            "notes": tuple(map(renamed, saved["notes"])),
        }
    )


@dataclass(kw_only=True)
class Tally:
    """The counts while they grow; `report` freezes them."""

    rows_in: int = 0
    rows_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    split: int = 0
    tokens_lost: int = 0
    longest: tuple[int, str] = (0, "")
    lengths: array[int] = field(default_factory=lambda: array("q"))
    bad_rows: list[str] = field(default_factory=list)
    remarks: Remarks = field(default_factory=Remarks)

    def saw_length(self, length: int, source: str) -> None:
        """Note a row's length before any cut."""
        self.lengths.append(length)
        if length > self.longest[0]:
            self.longest = (length, source)

    def drop(self, reason: str, tokens: int = 0) -> None:
        """Count a row that is not kept."""
        assert reason in DROP_REASONS
        self.dropped[reason] += 1
        self.tokens_lost += tokens

    def add(self, other: Tally) -> None:
        """Count further rows, which come after these."""
        self.rows_in += other.rows_in
        self.rows_kept += other.rows_kept
        self.dropped.update(other.dropped)
        self.truncated += other.truncated
        self.split += other.split
        self.tokens_lost += other.tokens_lost
        if other.longest[0] > self.longest[0]:
            self.longest = other.longest
        self.lengths.extend(other.lengths)
        self.bad_rows += other.bad_rows[: BAD_ROWS_SHOWN - len(self.bad_rows)]
        self.remarks.add_all(other.remarks)

    def report(
        self,
        *,
        files: Sequence[str],
        max_seq_length: int,
        num_examples: int,
        num_tokens: int,
        num_supervised_tokens: int,
    ) -> DataReport:
        """The finished report."""
        quantiles = {}
        if self.lengths:
            values = np.quantile(
                np.frombuffer(self.lengths, np.int64), _QUANTILES, method="nearest"
            )
            quantiles = {q: int(v) for q, v in zip(_QUANTILES, values, strict=True)}
        return DataReport(
            files=tuple(files),
            max_seq_length=max_seq_length,
            rows_in=self.rows_in,
            rows_kept=self.rows_kept,
            dropped=dict(self.dropped),
            truncated=self.truncated,
            split=self.split,
            num_examples=num_examples,
            num_tokens=num_tokens,
            num_supervised_tokens=num_supervised_tokens,
            tokens_lost=self.tokens_lost,
            longest_row=self.longest[0],
            longest_source=self.longest[1],
            length_quantiles=quantiles,
            bad_rows=tuple(self.bad_rows),
            notes=self.remarks.lines(),
        )
