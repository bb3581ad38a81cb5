"""Floating-point operations of a training step, MFU and HFU.

Counts follow the PaLM paper's appendix B (Chowdhery et al. 2022, "Model FLOPs Utilization"), with
attention counted by the pairs that attend instead of all pairs: a matrix product with P parameters
costs 2 P operations per token forward and 4 P backward; scores and weighted values cost
2 x 2 x N x H per (query, key) pair forward and twice that backward. The embedding lookup is no
matrix product and counts nothing; the output projection counts, tied or not. Recomputation is in
HFU only. Element-wise work counts nothing in either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def attention_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of one causal document.

    Args:
      length: tokens of the document.
      window: tokens that a query sees, itself included; None for all before it.
    """
    if length < 0 or (window is not None and window < 1):
        raise ValueError(f"length {length} and window {window}: need length >= 0, window >= 1.")
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def row_pairs(
    seq_length: int, document_lengths: Sequence[int] | None = None, window: int | None = None
) -> int:
    """Pairs of one row: its documents do not see each other.

    Args:
      seq_length: tokens of the row.
      document_lengths: tokens of each document packed into the row, at most `seq_length` together
        (the rest is padding, which attends to nothing); None for one document filling the row.
      window: as in `attention_pairs`.
    """
    if document_lengths is None:
        return attention_pairs(seq_length, window)
    if sum(document_lengths) > seq_length:
        raise ValueError(
            f"documents of {sum(document_lengths)} tokens do not fit a row of {seq_length}."
        )
    return sum(attention_pairs(length, window) for length in document_lengths)


def matmul_forward_flops(num_tokens: float, matmul_parameters: float) -> float:
    """Forward operations of matrix products with `matmul_parameters` weights."""
    return 2.0 * num_tokens * matmul_parameters


def attention_forward_flops(num_pairs: float, num_heads: int, head_dim: int) -> float:
    """Forward operations of scores and weighted values of one layer."""
    return 4.0 * num_pairs * num_heads * head_dim


ATTENTION_RATES_AT = 4096
"""Tokens that attend to each other at which rates of attention are stated."""
_LONGEST_FASTER = 1 << 18
_FASTER_PER_DOUBLING = 1 / 18


def faster_attention(span: float) -> float:
    """How much faster the fused kernel is on long rows than on rows of `ATTENTION_RATES_AT`.

    By an eighteenth of that rate with each doubling: on an H200, forward and backward with 32
    query heads of 128, 450 TFLOP/s at 4,096 tokens, 551 at 65,536 (from a step), 593 at 262,144
    and 590 at 524,288.

    Args:
      span: tokens of a row that attend to each other: twice the mean number of keys of a query.
    """
    longer = min(max(span, ATTENTION_RATES_AT), _LONGEST_FASTER) / ATTENTION_RATES_AT
    return 1 + _FASTER_PER_DOUBLING * math.log2(longer)


def utilization(
    flops_per_step: float, step_s: float, num_devices: int, peak_flops_per_s: float
) -> float:
    """Share of the peak of all devices: MFU from model FLOPs, HFU from executed ones.

    Args:
      flops_per_step: operations of one step over all devices.
      step_s: seconds of one step.
      num_devices: devices that shared the step.
      peak_flops_per_s: peak of one device.
    """
    if step_s <= 0 or num_devices < 1 or peak_flops_per_s <= 0:
        raise ValueError(
            f"step_s {step_s}, num_devices {num_devices} and peak_flops_per_s {peak_flops_per_s} "
            "must be positive."
        )
    return flops_per_step / (step_s * num_devices * peak_flops_per_s)
