"""Rows of a step, and sizes and work of one stage of a model, per token.

Letters: D hidden, N query heads, H head dim, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slidedp_jax.planner.flops import attention_forward_flops, faster_attention, row_pairs

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Rows of one step, all devices and microbatches together.

    Attributes:
      num_rows: rows of the step.
      seq_length: tokens of a row, T, padding included.
      document_lengths: lengths of the documents packed into a typical row; None for one document
        that fills the row.
      documents_per_row: most documents of a packed row; None where rows are not packed.
    """

    num_rows: int
    seq_length: int
    document_lengths: tuple[int, ...] | None = None
    documents_per_row: int | None = None

    def __post_init__(self) -> None:
        """Rejects an empty batch and documents that do not fit."""
        if self.num_rows < 1 or self.seq_length < 1:
            raise ValueError(
                f"a batch of {self.num_rows} rows of {self.seq_length} tokens is empty; both must "
                "be at least 1."
            )
        row_pairs(self.seq_length, self.document_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.num_rows * self.seq_length


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Sizes and work of one stage.

    Elements are per token and in the compute dtype.

    Attributes:
      name: for reports; layers of equal work share one.
      group_parameters: trained parameters per optimizer treatment group (decayed, not decayed,
        ...).
      frozen_parameters: those that stay as they are: no gradient, no state, no update.
      matmul_parameters: weights of the matrix products that a token passes (of the experts it
        visits, for a mixture).
      unvisited_parameters: parameters of experts that a token does not visit; the devices read them
        nevertheless, since other tokens visit them.
      frozen_matmul_parameters: of `matmul_parameters`, those whose gradient is not computed.
      grouped_parameters: of `matmul_parameters`, those of products whose rows are grouped by
        expert, which are slower than others.
      frozen_grouped_parameters: of those, the ones whose gradient is not computed.
      attention_heads: query heads N; 0 for a stage without attention.
      attention_head_dim: H.
      window: sliding window in tokens, None for full attention.
      residual_elements: what the backward pass keeps of the recomputed forward pass.
      kept_elements: what a chunk that is not recomputed keeps from forward to backward; 0: as much
        as `residual_elements`.
      attention_elements: attention's output and statistics, what a chunk keeps that recomputes
        everything else; 0: nothing can be kept apart.
      row_elements: what of whole rows is live at once in backward where the rest is computed in
        blocks of tokens: inputs and results of attention and their gradients; 0: it cannot be.
      before_attention_parameters: weights of the products before attention, which blocks compute
        once more.
      decided_elements: what stays from forward to backward in any case, beside the above, because
        it must not be computed again (the choices of a router); an int32 is two bf16 elements.
      forward_workspace_elements: most that is live at once inside the forward pass.
      backward_workspace_elements: most that is live at once inside the backward pass, beside the
        residuals.
      elementwise_elements: elements that the forward pass's element-wise programs read and write.
      last_matmul_parameters: weights of the last product, whose result no gradient needs: when the
        stage is the last of a chunk, its recomputation is skipped.
    """

    name: str
    group_parameters: tuple[int, ...]
    frozen_parameters: int = 0
    matmul_parameters: int = 0
    unvisited_parameters: int = 0
    frozen_matmul_parameters: int = 0
    grouped_parameters: int = 0
    frozen_grouped_parameters: int = 0
    attention_heads: int = 0
    attention_head_dim: int = 0
    window: int | None = None
    residual_elements: int = 0
    kept_elements: int = 0
    attention_elements: int = 0
    row_elements: int = 0
    before_attention_parameters: int = 0
    decided_elements: int = 0
    forward_workspace_elements: int = 0
    backward_workspace_elements: int = 0
    elementwise_elements: int = 0
    last_matmul_parameters: int = 0

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return self.trained_parameters + self.frozen_parameters

    @property
    def trained_parameters(self) -> int:
        """Parameters of all groups."""
        return sum(self.group_parameters)

    @property
    def is_trained(self) -> bool:
        """Whether not all of it is frozen."""
        return self.trained_parameters > 0 or not self.frozen_parameters

    def attention_flops(self, batch: BatchShape) -> float:
        """Forward attention operations of one row."""
        if self.attention_heads == 0:
            return 0.0
        pairs = row_pairs(batch.seq_length, batch.document_lengths, self.window)
        return attention_forward_flops(pairs, self.attention_heads, self.attention_head_dim)

    def attention_s(self, batch: BatchShape, flops_per_s: float) -> float:
        """Seconds of forward attention of one row.

        Args:
          batch: shape of the rows.
          flops_per_s: of the fused kernel at `flops.ATTENTION_RATES_AT` tokens.
        """
        if self.attention_heads == 0:
            return 0.0
        pairs = row_pairs(batch.seq_length, batch.document_lengths, self.window)
        faster = faster_attention(2 * pairs / batch.seq_length)
        return self.attention_flops(batch) / (flops_per_s * faster)


def parameter_groups(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Parameters in matrices (weight decay) and in vectors (none), the usual two groups."""
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) >= 2)
    vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) < 2)
    return tuple(size for size in (matrices, vectors) if size)
