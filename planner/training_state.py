"""What the training state takes per parameter, wherever it lies."""

from __future__ import annotations

from slidedp_jax.planner.chunking import Chunks
from slidedp_jax.planner.strategy import Strategy

ADAMW_STATE_BYTES = 8
"""Optimizer state per parameter of AdamW with fp32 moments."""

MASTER_BYTES = 4
"""The fp32 master as two halves of two bytes."""


def resident_parameters(chunks: Chunks, strategy: Strategy) -> int:
    """Parameters, padded, whose state stays on the devices, each with its share."""
    return sum(chunk.padded_parameters for chunk in chunks.all[: strategy.resident_chunks])
