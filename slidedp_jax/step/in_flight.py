"""What one step holds on the devices between its programs, and what it leaves there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from slidedp_jax.step.layer_functions import ChunkKind


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What a step leaves on the devices.

    Attributes:
      losses: what adds up to the loss times the supervised tokens: per microbatch, each device's
        sum of token losses, then `aux`; float32 [G].
      aux: per microbatch, each device's sum of auxiliary losses, float32 [G]; empty if no layer has
        one.
      squares: per trained chunk in forward order, sums of squares of the gradient shards, float32
        [G].
    """

    losses: list[jax.Array]
    aux: list[jax.Array]
    squares: list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class LeftByForward:
    """What forward leaves on the devices; backward takes it, chunk by chunk from the top.

    Attributes:
      kinds: of the layer chunks that run backward.
      trees: weights of layer chunks that stay: the last one's and those of kept chunks.
      residuals: of chunks that keep results, per microbatch what backward need not recompute.
      aux: per chunk of which a layer has an auxiliary loss, per microbatch their sums [G].
    """

    kinds: dict[int, ChunkKind]
    trees: dict[int, Any]
    residuals: dict[int, list[Any]]
    aux: list[list[jax.Array]]


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
