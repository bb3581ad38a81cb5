"""What the training state takes per parameter, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterable

from slidedp_jax.planner.chunking import ChunkWork

ADAMW_STATE_BYTES = 8
"""Optimizer state per parameter of AdamW with fp32 moments."""

MASTER_BYTES = 4
"""The fp32 master as two halves of two bytes."""


def state_bytes(chunks: Iterable[ChunkWork], optimizer_state_bytes: float) -> float:
    """Masters of all parameters, padded, and what the optimizer keeps of those that are trained."""
    return sum(
        MASTER_BYTES * chunk.padded_parameters + optimizer_state_bytes * chunk.trained_padded
        for chunk in chunks
    )
