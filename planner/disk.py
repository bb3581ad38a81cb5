"""How much room a run's output folder takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.training_state import MASTER_BYTES

ExportDtype = Literal["bfloat16", "float16", "float32"]
EXPORT_BYTES: dict[ExportDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


DISK_BYTES_PER_S = 1.5e9
"""Assumed of a disk until a run has written a checkpoint: a data centre's NVMe drive."""


COPY_BYTES_PER_S = 1.4e10
"""Assumed of copying state within host memory, beside steps; 13 to 19 GB/s with an H200."""


def stall_s(
    state_bytes: float, buffer_bytes: float, disk_bytes_per_s: float, step_s: float
) -> float:
    """Seconds for which a save beside the steps holds them up, in all.

    No chunk is updated again before it has been copied. Of S bytes of state, a buffer takes B as
    fast as memory is copied, C bytes per second; the rest is copied as the disk takes R per second.
    Updates ask for it within the t seconds of the next step: B / C + (S - B) / R - t.

    Args:
      state_bytes: of weights and optimizer state.
      buffer_bytes: memory for what is copied and not written yet.
      disk_bytes_per_s: what the disk takes.
      step_s: seconds of a step.
    """
    at_once = min(state_bytes, buffer_bytes)
    copied_s = at_once / COPY_BYTES_PER_S + (state_bytes - at_once) / disk_bytes_per_s
    return max(0.0, copied_s - step_s)


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Bytes at the most: a new checkpoint is whole before an old one goes.

    Attributes:
      checkpoint_bytes: one checkpoint: the master weights and the optimizer's state.
      num_checkpoints: those kept, and the one being written.
      export_bytes: the Hugging Face folder, and that of the averaged weights if there is one.
    """

    checkpoint_bytes: float
    num_checkpoints: int
    export_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.num_checkpoints * self.checkpoint_bytes + self.export_bytes

    @property
    def save_s(self) -> float:
        """Seconds of a save where the disk is as fast as assumed and nothing else is slower."""
        return self.checkpoint_bytes / DISK_BYTES_PER_S

    def describe(self) -> str:
        """One line."""
        return (
            f"{size_text(self.total_bytes)}: {self.num_checkpoints} checkpoints of "
            f"{size_text(self.checkpoint_bytes)} ({self.num_checkpoints - 1} kept, one being "
            f"written) and {size_text(self.export_bytes)} of export"
        )


def disk_use(
    num_parameters: int,
    optimizer_state_bytes: float,
    *,
    save_total_limit: int = 2,
    export_dtype: ExportDtype = "bfloat16",
    averaged: bool = False,
) -> DiskUse:
    """Room for a run's checkpoints and its export.

    Args:
      num_parameters: of the model.
      optimizer_state_bytes: optimizer state, a moving average included, per parameter in bytes.
      save_total_limit: checkpoints that are kept.
      export_dtype: of the exported weights.
      averaged: a moving average is exported beside them.

    Raises:
      ValueError: no checkpoint is kept.
    """
    if save_total_limit < 1:
        raise ValueError(f"save_total_limit is {save_total_limit}; it must be at least 1.")
    return DiskUse(
        checkpoint_bytes=(MASTER_BYTES + optimizer_state_bytes) * num_parameters,
        num_checkpoints=save_total_limit + 1,
        export_bytes=(2 if averaged else 1) * EXPORT_BYTES[export_dtype] * num_parameters,
    )
