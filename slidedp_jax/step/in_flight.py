"""What one step holds on the devices between its programs, and what it leaves there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What a step leaves on the devices.

    Attributes:
      losses: per microbatch, each device's sum of token losses, float32 [G].
      squares: per trained chunk in forward order, sums of squares of the gradient shards, float32
        [G].
    """

    losses: list[jax.Array]
    squares: list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class ForBackward:
    """What forward leaves on the devices; backward takes it away, chunk by chunk from the top.

    Attributes:
      inputs: per chunk whose inputs are kept, in forward order, x per microbatch.
      trees: weights of layer chunks that stay: the last one's and those of kept chunks.
      residuals: of kept chunks, per microbatch what backward need not recompute.
    """

    inputs: list[list[jax.Array]]
    trees: dict[int, Any]
    residuals: dict[int, list[Any]]


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """The chunk whose backward was issued last, while the devices may still be at work on it.

    Attributes:
      chunk: its weights are to be released when it is done.
      done: arrays that are there when it is; none where that is known already.
      unsent: its accumulated gradients, where the next chunk's program is to pack them.
    """

    chunk: int
    done: list[jax.Array]
    unsent: Any | None = None
