"""What the head in slices of the vocabulary takes and costs (`slidedp_jax/step/sliced_head.py`).

Letters: S slices, T tokens of a device, D hidden, V vocabulary, R = V / S rows of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slidedp_jax.planner.chunking import Chunks, ChunkWork
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT, Strategy
from slidedp_jax.planner.workload import Workload

PRODUCTS = 2
"""Products of tokens, D and V for logits; one more for each gradient, of rows and hidden states."""

MANY_SLICES = 16
"""More save little: the hidden states' gradient is as large as it is, and read for every slice."""

SMALL_LOSS_CHUNK_TOKENS = 1024
"""Smaller ones cost a head in one pass more, in sums of its gradient, than the second pass does."""


def slice_counts(workload: Workload, strategy: Strategy, num_devices: int) -> list[int]:
    """Numbers of slices that a strategy may have, ascending; none if the model cannot be sliced.

    A slice is whole pieces of the state, as many of each device.
    """
    pieces = strategy.num_host_devices
    if not workload.plain_vocabulary:
        return []
    return [
        count
        for count in range(2, pieces + 1)
        if pieces % count == 0 == pieces // count % num_devices
    ]


def with_slices(workload: Workload, strategy: Strategy, num_devices: int) -> Iterator[Strategy]:
    """The same with the head in two passes, from fast to lean: whole weights first, few slices."""
    counts = slice_counts(workload, strategy, num_devices)
    few = [count for count in counts if count <= MANY_SLICES] or counts[:1]
    for count in sorted({*few[:1], *few[-1:]}):
        yield replace(strategy, vocab_slices=count)
    for count in few[-1:]:
        yield replace(strategy, vocab_slices=count, slice_head_weights=True)


def most_resident(workload: Workload, strategy: Strategy, num_chunks: int) -> int:
    """Chunks whose state may stay on the devices: slices of gradients are sent to the host."""
    if strategy.vocab_slices == 1:
        return num_chunks
    return 0 if workload.tied else num_chunks - 1


def projection_chunk(chunks: Chunks, *, tied: bool) -> ChunkWork:
    """The chunk that owns the projection."""
    return chunks.embed if tied else chunks.head


def loss_memory(
    chunks: Chunks,
    workload: Workload,
    strategy: Strategy,
    *,
    microbatch_tokens: int,
    wire: float,
    logits_copies: int,
) -> dict[str, float]:
    """Bytes by category on one device in the second pass, in place of those of one pass.

    Args:
      chunks: of the model.
      workload: the model.
      strategy: with several slices.
      microbatch_tokens: of one device.
      wire: one device's part of the projection's whole gradient on its way to the host.
      logits_copies: fp32 arrays of the logits of a loss chunk that are alive at once.
    """
    count, compute = strategy.vocab_slices, strategy.compute_bytes
    owner = projection_chunk(chunks, tied=workload.tied).padded_parameters
    rows = owner / count
    # Fetched, unpacked, and those of the slice before.
    weights = 3 * compute * rows if strategy.slice_head_weights else compute * (owner + 2 * rows)
    # Two sums in float32, that which waits for the norm's gradient and one packed; rounded ones
    # leave.
    gradient = 4.0 * 4 * rows + GRADIENTS_IN_FLIGHT * wire / count
    if workload.tied:  # all of them wait for the lookup's part
        gradient = 4.0 * (owner + rows)
    if not workload.projection_is_trained:
        gradient = 0.0
    tokens = microbatch_tokens * strategy.num_microbatches
    at_once = min(strategy.loss_chunk_tokens, microbatch_tokens)
    return {
        "head_weights": float(weights),
        "logits": 4.0 * logits_copies * at_once * rows / workload.hidden_size,
        "head_gradient": gradient,
        "hidden_gradient": 4.0 * tokens * (workload.hidden_size + 4),  # and four numbers per token
    }


def head_seconds(
    workload: Workload,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    tokens: int,
    matmul_rate: float,
    passes_over_logits: int,
) -> tuple[float, float]:
    """(seconds, operations) of both passes for one microbatch, but for the norm.

    Args:
      workload: the model.
      strategy: with several slices.
      hardware: rates.
      tokens: of the microbatch.
      matmul_rate: operations per second.
      passes_over_logits: float32 arrays [tokens, V] that one pass reads or writes.
    """
    stage, count = workload.head, strategy.vocab_slices
    trained = workload.projection_is_trained
    products = PRODUCTS + workload.head_gradients
    flops = products * 2.0 * tokens * stage.matmul_parameters
    blocks = -(-tokens // min(strategy.loss_chunk_tokens, tokens))
    moved = 4.0 * 1.5 * passes_over_logits * tokens * workload.vocab_size
    if trained:
        moved += 8.0 * blocks * stage.matmul_parameters  # the rows' gradient read and written
    moved += 8.0 * count * tokens * workload.hidden_size  # the hidden states', for every slice
    # The norm is taken anew in every program.
    moved += 2.0 * count * strategy.compute_bytes * stage.elementwise_elements * tokens
    return flops / matmul_rate + moved / hardware.device_memory_bytes_per_s, flops


def uploads_of_projection(workload: Workload, strategy: Strategy) -> int:
    """How often the projection's weights are uploaded for the head, beside the head's own chunk."""
    if strategy.vocab_slices == 1:
        return 0
    passes = 2 if strategy.slice_head_weights else 1
    return passes if workload.tied else passes - 1
