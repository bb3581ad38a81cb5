"""Which steps may change the state: a finite gradient norm and, if asked, a limited loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

NonfinitePolicy = Literal["stop", "skip"]

_ROWS_NAMED = 32


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """What is known of a step when its backward pass has been issued.

    Attributes:
      squares: sums of squares [G] of each trained chunk's gradient, chunks in forward order.
      loss: waits for the devices and returns the mean loss of the supervised tokens.
      row_ids: numbers of the input rows, for messages.
      hosts_differ: waits for the devices and says which hosts were given other rows, if any.
    """

    squares: Sequence[Any]
    loss: Callable[[], float]
    row_ids: Sequence[int] = ()
    hosts_differ: Callable[[], str] = str

    def name_rows(self) -> str:
        """A sentence that names the step's rows; empty where they have no numbers."""
        if not len(self.row_ids):
            return ""
        named = ", ".join(str(number) for number in self.row_ids[:_ROWS_NAMED])
        more = len(self.row_ids) - _ROWS_NAMED
        return f" Its rows are {named}{f' and {more} more' if more > 0 else ''}."


class StepGuard:
    """Judges steps before they change the state.

    Args:
      on_nonfinite: what becomes of a bad step: "stop" ends training, "skip" leaves the step out.
      max_loss: steps with a larger loss are bad as well; None for no limit.
      max_consecutive_skips: so many bad steps in a row are skipped; the next one stops training.

    Raises:
      ValueError: a value that is not allowed.
    """

    def __init__(
        self,
        *,
        on_nonfinite: NonfinitePolicy = "stop",
        max_loss: float | None = None,
        max_consecutive_skips: int = 10,
    ):
        if on_nonfinite not in get_args(NonfinitePolicy):
            raise ValueError(f"on_nonfinite={on_nonfinite!r}; allowed: 'stop', 'skip'")
        if max_loss is not None and not max_loss > 0:
            raise ValueError(f"max_loss={max_loss}; a positive number, or None for none")
        if max_consecutive_skips < 1:
            raise ValueError(f"max_consecutive_skips={max_consecutive_skips}; at least 1")
        self.skips = on_nonfinite == "skip"
        self._max_loss = max_loss
        self._max_consecutive_skips = max_consecutive_skips
        self._skipped_in_a_row = 0

    def problem(self, norm: float, loss: Callable[[], float]) -> str | None:
        """What is wrong with a step, None if nothing is."""
        if not np.isfinite(norm):
            return f"the gradient norm is {norm}"
        if self._max_loss is not None and not (value := loss()) <= self._max_loss:
            return f"the loss is {value:.6g}, above max_loss={self._max_loss:g}"
        self._skipped_in_a_row = 0
        return None

    def may_skip(self) -> bool:
        """Whether the bad step at hand is to be skipped; counts it."""
        self._skipped_in_a_row += 1
        return self.skips and self._skipped_in_a_row <= self._max_consecutive_skips

    def advice(self) -> str:
        """What to change, for the message with which training stops."""
        if self.skips:
            return (
                f"The {self._max_consecutive_skips} steps before were skipped as well "
                "(max_consecutive_skips): look at the rows and lower the learning rate"
            )
        return (
            "Look at this step's rows, lower the learning rate, or skip such steps with "
            "on_nonfinite='skip'"
        )
