"""What one training step of a model costs per token, stage by stage: a model of the model.

A `Workload` mirrors the runtime's view: an embedding stage, layer stages, a head stage. It can be
filled from a `ModelConfig`, or by hand for a foreign model whose shapes (`jax.eval_shape`) and
operation counts are known. Letters: D hidden, F feed-forward, N query heads, K key-value heads,
H head dim, V vocabulary, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slidedp_jax.models.config import ModelConfig
from slidedp_jax.planner.flops import (
    attention_forward_flops,
    matmul_forward_flops,
    model_flops,
    row_pairs,
)
from slidedp_jax.wording import short_count

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
      group_parameters: parameters per optimizer treatment group (decayed, not decayed, ...).
      matmul_parameters: weights of the matrix products that a token passes (of the experts it
        visits, for a mixture).
      attention_heads: query heads N; 0 for a stage without attention.
      attention_head_dim: H.
      window: sliding window in tokens, None for full attention.
      residual_elements: what the backward pass keeps of the recomputed forward pass.
      kept_elements: what a chunk that is not recomputed keeps from forward to backward; 0: as much
        as `residual_elements`.
      attention_elements: attention's output and statistics, what a chunk keeps that recomputes
        everything else; 0: nothing can be kept apart.
      decided_elements: what stays from forward to backward in any case, beside the above, because
        it must not be computed again (the choices of a router); an int32 is two bf16 elements.
      row_elements: what of whole rows is live at once in backward where the rest is computed in
        blocks of tokens: inputs and results of attention and their gradients; 0: it cannot be.
      before_attention_parameters: weights of the products before attention, which blocks compute
        once more.
      forward_workspace_elements: most that is live at once inside the forward pass.
      backward_workspace_elements: most that is live at once inside the backward pass, beside the
        residuals.
      elementwise_elements: elements that the forward pass's element-wise programs read and write.
      last_matmul_parameters: weights of the last product, whose result no gradient needs: when the
        stage is the last of a chunk, its recomputation is skipped.
    """

    name: str
    group_parameters: tuple[int, ...]
    matmul_parameters: int = 0
    attention_heads: int = 0
    attention_head_dim: int = 0
    window: int | None = None
    residual_elements: int = 0
    kept_elements: int = 0
    attention_elements: int = 0
    decided_elements: int = 0
    row_elements: int = 0
    before_attention_parameters: int = 0
    forward_workspace_elements: int = 0
    backward_workspace_elements: int = 0
    elementwise_elements: int = 0
    last_matmul_parameters: int = 0

    @property
    def num_parameters(self) -> int:
        """Parameters of all groups."""
        return sum(self.group_parameters)

    def attention_flops(self, batch: BatchShape) -> float:
        """Forward attention operations of one row."""
        if self.attention_heads == 0:
            return 0.0
        pairs = row_pairs(batch.seq_length, batch.document_lengths, self.window)
        return attention_forward_flops(pairs, self.attention_heads, self.attention_head_dim)


def parameter_groups(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Parameters in matrices (weight decay) and in vectors (none), the usual two groups."""
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) >= 2)
    vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) < 2)
    return tuple(size for size in (matrices, vectors) if size)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decoder as the planner sees it.

    Attributes:
      name: for reports.
      embed: the token embedding.
      layers: layers, bottom first.
      head: final norm and output projection; tied, only the norm's parameters but the projection's
        matrix products.
      tied: the output projection is the embedding.
      hidden_size: width of what passes between stages, D.
      vocab_size: V.
      own_loss_tokens: tokens whose logits the loss holds at once where that is the model's own
        affair, `math.inf` for all of a microbatch; None: as many as the strategy says.
      plain_vocabulary: the embedding is a lookup and the loss cross-entropy after a projection, so
        that a strategy may take both in slices of the vocabulary.
    """

    name: str
    embed: StageWork
    layers: tuple[StageWork, ...]
    head: StageWork
    tied: bool
    hidden_size: int
    vocab_size: int
    own_loss_tokens: float | None = None
    plain_vocabulary: bool = False

    def __post_init__(self) -> None:
        """Rejects a model without layers."""
        if not self.layers:
            raise ValueError(f"workload {self.name!r} has no layers; a decoder has at least one.")

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied matrix counted once."""
        return sum(stage.num_parameters for stage in self.stages)

    def loss_tokens(self, strategy_says: int, microbatch_tokens: int) -> int:
        """Tokens whose logits exist at once."""
        own = self.own_loss_tokens
        return int(min(strategy_says if own is None else own, microbatch_tokens))

    @property
    def stages(self) -> tuple[StageWork, ...]:
        """All stages in forward order."""
        return (self.embed, *self.layers, self.head)

    def model_flops_per_step(self, batch: BatchShape) -> float:
        """Operations of one step over all devices, without recomputation (the MFU numerator)."""
        forward = matmul_forward_flops(
            batch.num_tokens, sum(stage.matmul_parameters for stage in (*self.layers, self.head))
        )
        attention = sum(stage.attention_flops(batch) for stage in self.layers)
        return model_flops(forward + batch.num_rows * attention)

    @staticmethod
    def from_config(config: ModelConfig, *, name: str | None = None) -> Workload:
        """The workload of a dense decoder of `models`.

        What a layer's backward pass keeps, per token: the two norms' inputs and outputs (4 D),
        q, k, v before and after norm and RoPE, the attention output (N H), gate, up and their
        product (3 F). XLA fuses everything else into its consumers. A chunk that is not recomputed
        keeps the products' results but for the last (q, k, v, the output projection, gate, up),
        the attention output and its fp32 statistics (two elements per head).
        """
        hidden, ffn = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        layer_shapes = config.layer_shapes()
        matmul = sum(math.prod(shape) for shape in layer_shapes.values() if len(shape) == 2)
        before_norm = queries + keys if config.qk_norm else 0
        head_shapes = config.head_shapes()
        layers = tuple(
            StageWork(
                name="model.layers",
                group_parameters=parameter_groups(layer_shapes),
                matmul_parameters=matmul,
                attention_heads=config.num_attention_heads,
                attention_head_dim=config.head_dim,
                window=window,
                residual_elements=4 * hidden + before_norm + 2 * queries + 2 * keys + 3 * ffn,
                kept_elements=2 * queries
                + 2 * keys
                + hidden
                + 2 * ffn
                + 2 * config.num_attention_heads,
                attention_elements=queries + 2 * config.num_attention_heads,
                # q, k, v, the output and their gradients, cuDNN's own of q in fp32, one of x.
                row_elements=6 * queries + 4 * keys + hidden,
                before_attention_parameters=hidden * (queries + 2 * keys),
                forward_workspace_elements=2 * hidden + max(3 * ffn, 2 * queries + 2 * keys),
                backward_workspace_elements=2 * hidden + max(2 * ffn, 2 * queries + 2 * keys),
                elementwise_elements=10 * hidden + 3 * ffn + 2 * before_norm,
                last_matmul_parameters=hidden * ffn,
            )
            for window in config.layer_windows
        )
        return Workload(
            name=name or f"{config.model_type} of {short_count(config.num_parameters)} parameters",
            embed=StageWork(
                name="model.embed_tokens",
                group_parameters=parameter_groups(config.embedding_shapes()),
                elementwise_elements=2 * hidden,
            ),
            layers=layers,
            head=StageWork(
                name="head",
                group_parameters=parameter_groups(head_shapes),
                matmul_parameters=config.vocab_size * hidden,
                elementwise_elements=4 * hidden,
            ),
            tied=config.tie_word_embeddings,
            hidden_size=hidden,
            vocab_size=config.vocab_size,
            plain_vocabulary=True,
        )
