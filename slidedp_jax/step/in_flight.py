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
        sum of token losses, float32 [G], then `aux`.
      aux: per microbatch, each device's sum of auxiliary losses, float32 [G], where layers have
        some; then the loss over the whole step, [1], where there is one.
      figures: what that loss reports, float32 scalars by name.
      squares: per trained chunk in forward order, sums of squares of the gradient shards, float32
        [G].
      flags: of several hosts, per device what its host has said of the step, int32 [G, n].
    """

    losses: list[jax.Array]
    aux: list[jax.Array]
    figures: dict[str, jax.Array]
    squares: list[jax.Array]
    flags: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class LeftByForward:
    """What forward leaves on the devices; backward takes it, chunk by chunk from the top.

    Attributes:
      kinds: of the layer chunks that run backward.
      trees: weights of layer chunks that stay: the last one's and those of kept chunks.
      residuals: of chunks that keep results, per microbatch what backward need not recompute.
      aux: per chunk of which a layer has an auxiliary loss, per microbatch their sums [G].
      sums: by chunk, of those that give some, per microbatch what a loss over the whole step is
        made of.
      derivatives: by chunk, of that loss by those sums.
    """

    kinds: dict[int, ChunkKind]
    trees: dict[int, Any]
    residuals: dict[int, list[Any]]
    aux: list[list[jax.Array]]
    sums: dict[int, list[Any]]
    derivatives: dict[int, Any]


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
