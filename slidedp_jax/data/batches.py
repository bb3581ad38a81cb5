"""The rows of each training step, in a seeded order that can be resumed at once.

An epoch is one permutation of the rows that depends on (seed, epoch) only, made by grain and read
by random access. A step takes the next `rows_per_step` rows; what is left at an epoch's end makes
one smaller step, so each row is used exactly once per epoch whatever the batch size, and steps per
epoch are `ceil(rows / rows_per_step)`. The number of devices plays no part. After the last row
another epoch begins: `max_steps` beyond the data repeats epochs, each in its own order. Files may
have weights (`row_order.py`); each is then packed by itself.

The position is (epoch, row within the epoch), so restoring costs the same at any step, and a run
may continue with another batch size.

Shapes: packed rows all have the width `max_seq_length`, rounded up to `pad_to_multiple_of`. Padded
rows get the smallest of at most eight widths that holds the longest row of the step (see
`row_widths`), since each new width is compiled anew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from slidedp_jax.data.examples import IGNORED, Examples
from slidedp_jax.data.packing import RowPlan, joined, one_per_row, pack
from slidedp_jax.data.report import DataReport
from slidedp_jax.data.row_order import RowOrder, checked_weights
from slidedp_jax.errors import UserError
from slidedp_jax.wording import counted

_MAX_WIDTHS = 8
_STATE_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Rows of one optimizer step: a product of three settings.

    Attributes:
      per_device: rows that a device computes at once (micro batch).
      accumulation: micro batches per step.
      num_devices: devices.
    """

    per_device: int
    accumulation: int = 1
    num_devices: int = 1

    def __post_init__(self) -> None:
        for name in ("per_device", "accumulation", "num_devices"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def rows(self) -> int:
        """Rows per step."""
        return self.per_device * self.accumulation * self.num_devices

    def __str__(self) -> str:
        return (
            f"{self.rows} = micro batch {self.per_device} x accumulation {self.accumulation} x "
            f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """Rows of one step.

    Attributes:
      arrays: int32 [R, T] each: `input_ids`; `labels` (aligned with the inputs, -100 where nothing
        is supervised; not shifted); `positions`, from 0 in each document, 0 in padding; of packed
        rows also `segment_ids`, 0 for padding and 1, 2, ... for a row's documents. Padding is on
        the right, so that causal attention alone keeps a single document apart from it.
      row_ids: numbers of the input rows in it, batch row by batch row.
      num_tokens: tokens that are not padding.
      num_supervised_tokens: labels that are not -100.
      epoch: epoch of its rows, from 0.
    """

    arrays: dict[str, np.ndarray]
    row_ids: list[int]
    num_tokens: int
    num_supervised_tokens: int
    epoch: int


@final
class BatchSource:
    """Endless iterator over steps.

    Attributes:
      examples: what the rows are made of.
      num_rows: rows of an epoch (packed rows count once).
      rows_per_step: rows of a step.
      steps_per_epoch: steps of a whole epoch, the smaller last one included.
      widths: the widths that batches can have.
      documents_per_row: most documents of a row.
      density: tokens over the area of all rows at full width.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        max_seq_length: int,
        step_size: StepSize | int,
        seed: int = 42,
        packing: bool = False,
        most_documents_per_row: int | None = None,
        shuffle: bool = True,
        file_weights: Sequence[float] | None = None,
        pad_id: int = 0,
        pad_to_multiple_of: int = 8,
    ):
        """Plan the rows.

        Args:
          examples: what `load_examples` gave, none longer than `max_seq_length`.
          max_seq_length: most tokens of a row.
          step_size: rows per step.
          seed: of the order, 0 to 2**32 - 1.
          packing: several documents per row, kept apart by segment ids.
          most_documents_per_row: of packed rows; None: as many as fit.
          shuffle: False keeps the order of the examples (for evaluation).
          file_weights: passes over each file in an epoch; None: one over all.
          pad_id: fills `input_ids`; never supervised.
          pad_to_multiple_of: widths are multiples of it.

        Raises:
          UserError: an example is too long, or a setting is out of its range.
        """
        if not 0 <= seed < 2**32:
            raise UserError(f"the seed of the data order is {seed}; it must be 0 to 2**32 - 1")
        if pad_to_multiple_of < 1:
            raise UserError(f"pad_to_multiple_of is {pad_to_multiple_of}; it must be at least 1")
        if most_documents_per_row is not None and most_documents_per_row < 1:
            raise UserError(
                f"most_documents_per_row is {most_documents_per_row}; it must be at least 1"
            )
        longest = int(examples.lengths.max(initial=0))
        if not 0 < longest <= max_seq_length:
            raise UserError(
                f"the longest example has {longest:,} tokens, rows take 1 to {max_seq_length:,}; "
                "prepare the examples with the same max_seq_length"
            )
        self.examples = examples
        self._weights = checked_weights(file_weights, len(examples.file_rows))
        plans = [
            pack(lengths, max_seq_length, most_documents=most_documents_per_row)
            if packing
            else one_per_row(len(lengths))
            for lengths in self._lengths_of_files()
        ]
        self._plan = joined(plans)
        self._rows_of_files = [len(plan) for plan in plans]
        self._packing = packing
        self._seed = seed
        self._shuffle = shuffle
        self._pad_id = pad_id
        self._position = (0, 0)
        self._previous = (0, 0)
        self._ahead: tuple[tuple[int, int, int], StepBatch] | None = None
        self._order = RowOrder(self._rows_of_files, self._weights, seed if shuffle else None)
        self._shares = self._epoch_shares(plans)
        self.num_rows = self._order.num_rows
        if self.num_rows == 0:
            raise UserError("no file with a weight above 0 has a row; give others")
        self.documents_per_row = int(np.diff(self._plan.offsets).max())
        self.resize(step_size)
        widths = row_widths(max_seq_length, pad_to_multiple_of)
        self.widths = widths[-1:] if packing else widths
        self.density = self._mean_tokens() / widths[-1]

    def resize(self, step_size: StepSize | int) -> None:
        """Take steps of another size from here on."""
        self._step_size = (
            StepSize(per_device=step_size) if isinstance(step_size, int) else step_size
        )
        self.rows_per_step = self._step_size.rows
        self.steps_per_epoch = math.ceil(self.num_rows / self.rows_per_step)

    def _lengths_of_files(self) -> list[np.ndarray]:
        """Tokens per example, file by file if those have weights."""
        lengths = self.examples.lengths
        if self._weights is None:
            return [lengths]
        ends = np.cumsum(self.examples.file_rows)
        borders = np.searchsorted(self.examples.row_ids, ends[:-1], side="left")
        return np.split(lengths, borders)

    def _epoch_shares(self, plans: Sequence[RowPlan]) -> np.ndarray | None:
        """How often each row is taken in an epoch, float64 [rows]; None: all alike."""
        if self._order.taken is None:
            return None
        often = [
            taken / max(1, len(plan)) for taken, plan in zip(self._order.taken, plans, strict=True)
        ]
        return np.repeat(often, [len(plan) for plan in plans])

    def _mean_tokens(self) -> float:
        """Tokens of a row on average over an epoch."""
        return float(np.average(self._row_lengths(), weights=self._shares))

    @functools.cached_property
    def mix(self) -> tuple[tuple[int, float], ...]:
        """Rows that an epoch has of each file, and these files' shares of its tokens.

        Empty without weights.
        """
        if self._order.taken is None or self._shares is None:
            return ()
        tokens = self._row_lengths() * self._shares
        total, found, first = tokens.sum(), [], 0
        for taken, rows in zip(self._order.taken, self._rows_of_files, strict=True):
            found.append((taken, float(tokens[first : first + rows].sum() / total)))
            first += rows
        return tuple(found)

    @functools.cached_property
    def padding_share(self) -> float:
        """Share of the places of an epoch's rows that padding takes, on average over orders."""
        widths = sum(width * share for width, share in self.width_shares().items())
        return 1 - self._mean_tokens() / widths

    def require_whole_step(self, report: DataReport | None = None) -> None:
        """Refuse data that does not fill one optimizer step; training calls this, evaluation not.

        Args:
          report: what became of the files' rows; the message then says which were dropped.

        Raises:
          UserError: fewer rows than a step takes.
        """
        if self.num_rows >= self.rows_per_step:
            return
        packed = f" (packed from {counted(len(self.examples), 'example')})" if self._packing else ""
        dropped = ""
        if report is not None and report.dropped:
            dropped = (
                f" Of {counted(report.rows_in, 'row')} in the files were dropped: {report.drops}."
            )
        raise UserError(
            f"the training data has {counted(self.num_rows, 'row')}{packed}, fewer than one "
            f"optimizer step takes: {self._step_size}; lower the micro batch, the accumulation or "
            f"the number of devices, or give more rows.{dropped}"
        )

    def num_steps(self, num_epochs: float) -> int:
        """Steps of so many epochs from the start; a part of an epoch is rounded up to a step."""
        return self._steps(0, 0, num_epochs)

    def steps_until(self, num_epochs: float) -> int:
        """Steps from the present position until so many epochs are over; 0 if they are."""
        return self._steps(*self._position, num_epochs)

    def _steps(self, epoch: int, row: int, num_epochs: float) -> int:
        whole, part = divmod(num_epochs, 1)
        last, end = int(whole), math.ceil(round(part * self.num_rows, 6))
        if epoch > last or (epoch == last and row >= end):
            return 0
        if epoch == last:
            return math.ceil((end - row) / self.rows_per_step)
        rest = math.ceil((self.num_rows - row) / self.rows_per_step)
        between = (last - epoch - 1) * self.steps_per_epoch
        return rest + between + math.ceil(end / self.rows_per_step)

    def epochs_after(self, num_steps: int = 0) -> float:
        """Passes over the data that are done once so many more steps have been taken."""
        epoch, row = self._position
        rest = math.ceil((self.num_rows - row) / self.rows_per_step)
        if num_steps < rest:
            return epoch + (row + num_steps * self.rows_per_step) / self.num_rows
        whole, steps = divmod(num_steps - rest, self.steps_per_epoch)
        return epoch + 1 + whole + steps * self.rows_per_step / self.num_rows

    def has_passed(self, num_epochs: float) -> bool:
        """Whether the last step ended one of the parts of the data that are so many epochs long."""
        epoch, row = self._position
        if (epoch, row) == (0, 0):
            return False
        positions = (epoch, row), self._previous
        done, was = (whole + part / self.num_rows for whole, part in positions)
        return math.floor(done / num_epochs + 1e-9) > math.floor(was / num_epochs + 1e-9)

    def width_shares(self) -> dict[int, float]:
        """Width -> share of an epoch's steps whose rows have it.

        Of rows in random order: a step is as wide as its longest row needs, and each of its rows is
        any of them. Packed rows have one width.
        """
        if len(self.widths) == 1:
            return {self.widths[0]: 1.0}
        lengths, weights = self._row_lengths(), self._shares
        up_to = np.array([np.average(lengths <= w, weights=weights) for w in self.widths])
        below = up_to ** min(self.rows_per_step, self.num_rows)
        shares = np.diff(below, prepend=0.0)
        return {w: float(s) for w, s in zip(self.widths, shares, strict=True) if s > 0}

    @functools.cached_property
    def typical_documents(self) -> tuple[int, ...]:
        """Tokens of each document of the row whose attention is nearest to the mean of all rows.

        Attention's work grows with the sum of the squares.
        """
        lengths = np.asarray(self.examples.lengths, np.int64)[self._plan.members]
        work = np.add.reduceat(lengths**2, self._plan.offsets[:-1])
        mean = np.average(work, weights=self._shares)
        row = int(np.abs(work - mean).argmin())
        own = lengths[self._plan.offsets[row] : self._plan.offsets[row + 1]]
        return tuple(own.tolist())

    def _row_lengths(self) -> np.ndarray:
        """Tokens of each row, without padding."""
        lengths = np.asarray(self.examples.lengths, np.int64)
        return np.add.reduceat(lengths[self._plan.members], self._plan.offsets[:-1])

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """The next step's rows; never ends."""
        epoch, start = self._position
        stop = min(start + self.rows_per_step, self.num_rows)
        place, batch = self._ahead or ((-1, -1, -1), None)
        if batch is None or place != (epoch, start, stop):
            batch = self.batch(epoch, start, stop)
        self._ahead = None
        self._previous = (epoch, start)
        self._position = (epoch + 1, 0) if stop == self.num_rows else (epoch, stop)
        return batch

    def make_ahead(self) -> None:
        """Put the next step's rows together while there is time; the position stays as it is."""
        epoch, start = self._position
        stop = min(start + self.rows_per_step, self.num_rows)
        self._ahead = (epoch, start, stop), self.batch(epoch, start, stop)

    def one_epoch(self, epoch: int = 0) -> Iterator[StepBatch]:
        """All steps of an epoch, apart from the iterator's own position (for evaluation)."""
        for start in range(0, self.num_rows, self.rows_per_step):
            yield self.batch(epoch, start, min(start + self.rows_per_step, self.num_rows))

    def batch(self, epoch: int, start: int, stop: int) -> StepBatch:
        """Rows `start` to `stop` of an epoch's order."""
        members = [self._plan.row(self._order.row(epoch, i)) for i in range(start, stop)]
        return self._assemble(members, epoch)

    def _assemble(self, rows: list[np.ndarray], epoch: int) -> StepBatch:
        lengths = [int(self.examples.lengths[members].sum()) for members in rows]
        width = next(w for w in self.widths if w >= max(lengths))
        shape = (len(rows), width)
        input_ids = np.full(shape, self._pad_id, np.int32)
        labels = np.full(shape, IGNORED, np.int32)
        positions = np.zeros(shape, np.int32)
        segment_ids = np.zeros(shape, np.int32)
        for r, members in enumerate(rows):
            begin = 0
            for segment, index in enumerate(members, start=1):
                end = begin + int(self.examples.lengths[index])
                input_ids[r, begin:end] = self.examples.input_ids(index)
                labels[r, begin:end] = self.examples.labels(index)
                positions[r, begin:end] = np.arange(end - begin)
                segment_ids[r, begin:end] = segment
                begin = end
        arrays = {"input_ids": input_ids, "labels": labels, "positions": positions}
        return StepBatch(
            arrays=arrays | ({"segment_ids": segment_ids} if self._packing else {}),
            row_ids=[int(i) for i in self.examples.row_ids[np.concatenate(rows)]],
            num_tokens=sum(lengths),
            num_supervised_tokens=int(np.count_nonzero(labels != IGNORED)),
            epoch=epoch,
        )

    def state(self) -> dict[str, Any]:
        """Position, that of the step before, and what they refer to; small, JSON-able."""
        epoch, next_row = self._position
        position = {"epoch": epoch, "next_row": next_row, "previous": list(self._previous)}
        return position | self._identity()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a stored position, in constant time.

        The rows per step may differ from those of the stored run: the epoch's remaining rows are
        then taken in steps of the new size.

        Raises:
          UserError: the state was made from other data or another order.
        """
        if other := self.differences(state):
            raise UserError(
                "the stored data position belongs to other data or another order: "
                f"{'; '.join(other)}. Resume with the same files, tokenizer, template, "
                "max_seq_length, packing, weights and seed, or start a new run"
            )
        epoch, next_row = state.get("epoch"), state.get("next_row")
        if not (
            isinstance(epoch, int)
            and isinstance(next_row, int)
            and epoch >= 0
            and 0 <= next_row < self.num_rows
        ):
            raise UserError(
                f"the stored data position is epoch {epoch}, row {next_row} of {self.num_rows}; "
                "the stored state is damaged"
            )
        self._position = (epoch, next_row)
        # Versions that did not write it are taken to have had steps of the present size.
        self._previous = _position_of(state.get("previous")) or (
            (epoch, max(0, next_row - self.rows_per_step))
            if next_row
            else (epoch - 1, (self.steps_per_epoch - 1) * self.rows_per_step)
        )

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """In what a stored state is of other data or another order, in words; [] if in nothing."""
        # Versions that did not write the borders between weighted files cannot say that they moved.
        mine = {
            key: value
            for key, value in self._identity().items()
            if key != "rows_of_files" or key in state
        }
        other = [
            f"{key} was {state.get(key)!r}, is {value!r}"
            for key, value in mine.items()
            if key != "data" and state.get(key) != value
        ]
        if state.get("data") != mine["data"]:
            other.append("token ids, labels or boundaries of the rows differ")
        return other

    def _identity(self) -> dict[str, Any]:
        return {
            "format": _STATE_FORMAT,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "packing": self._packing,
            "num_rows": self.num_rows,
            # Null in the states of versions that had none.
            "file_weights": None if self._weights is None else list(self._weights),
            # Examples, as weights decide which of them an epoch takes; null without weights.
            "rows_of_files": None
            if self._weights is None
            else [len(lengths) for lengths in self._lengths_of_files()],
            "data": self.examples.fingerprint,
        }


def _position_of(stored: Any) -> tuple[int, int] | None:
    """A stored (epoch, row); None where there is none."""
    match stored:
        case [int(epoch), int(row)]:
            return epoch, row
    return None


def row_widths(max_seq_length: int, pad_to_multiple_of: int = 8) -> tuple[int, ...]:
    """Widths that padded rows can have, ascending; the last holds any row.

    Multiples of an eighth of `max_seq_length`, the eighth rounded up to a multiple of 64 and of
    `pad_to_multiple_of`: at most eight widths. Rows are at most an eighth wider than the longest
    needs, or 64 tokens.
    """
    unit = math.lcm(64, pad_to_multiple_of)
    full = _round_up(max_seq_length, pad_to_multiple_of)
    quantum = _round_up(math.ceil(max_seq_length / _MAX_WIDTHS), unit)
    return (*range(quantum, full, quantum), full)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
