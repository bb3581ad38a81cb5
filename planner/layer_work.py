"""What one layer of a decoder of `models` costs per token: products, activations, traffic.

Letters: D hidden, F feed-forward, N query heads, K key-value heads, H head dim, E experts, k of
them per token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from slidedp_jax.models.config import LayerKind, ModelConfig
from slidedp_jax.planner.stage_work import Shape, StageWork, parameter_groups

ROWS_PER_VISIT = 1.125
"""Rows that experts' groups take up, padding included (`models.expert_groups`)."""


@dataclass(frozen=True, kw_only=True)
class _FeedForward:
    """What a feed-forward block adds to its layer; elements per token.

    Attributes:
      residual: what backward keeps of the recomputed forward pass.
      kept: what a chunk that is not recomputed keeps.
      forward: most that is live at once inside forward.
      backward: most that is live at once inside backward, beside the residuals.
      elementwise: read and written by element-wise programs.
      last_product: weights of the last product.
      grouped: weights of products whose rows are grouped by expert.
      decided: what must not be computed again.
    """

    residual: float
    kept: float
    forward: float
    backward: float
    elementwise: float
    last_product: int
    grouped: int = 0
    decided: int = 0


def layer_work(config: ModelConfig, kind: LayerKind) -> StageWork:
    """The work of a layer.

    What a layer's backward pass keeps, per token: the two norms' inputs and outputs (4 D), q, k, v
    before and after norm and RoPE, the attention output (N H), and what the feed-forward block
    does. XLA fuses everything else into its consumers. A chunk that is not recomputed keeps the
    products' results but for the last (q, k, v, the output projection, the feed-forward block's),
    the attention output and its fp32 statistics (two elements per head).
    """
    layer = config.layer_kinds.index(kind)
    shapes = config.layer_shapes(layer)
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    before_norm = queries + keys if config.qk_norm else 0
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) >= 2)
    ffn = _experts(config) if kind.sparse else _dense(config, config.intermediate_size)
    unvisited = config.num_unvisited_expert_parameters if kind.sparse else 0
    heads = 2 * queries + 2 * keys
    # Norms after attention and feed-forward read the results of both.
    after = 2 * hidden if config.norms_after else 0
    return StageWork(
        name="model.layers",
        group_parameters=parameter_groups(shapes),
        matmul_parameters=matrices - unvisited,
        unvisited_parameters=unvisited,
        grouped_parameters=ffn.grouped,
        attention_heads=config.num_attention_heads,
        attention_head_dim=config.head_dim,
        window=kind.window,
        residual_elements=int(4 * hidden + after + before_norm + heads + ffn.residual),
        kept_elements=int(heads + hidden + after // 2 + ffn.kept + 2 * config.num_attention_heads),
        attention_elements=queries + 2 * config.num_attention_heads,
        decided_elements=ffn.decided,
        # q, k, v, the output and their gradients, cuDNN's own of q in fp32, one of x. What routes
        # tokens is not computed in blocks.
        row_elements=0 if kind.sparse else 6 * queries + 4 * keys + hidden,
        before_attention_parameters=hidden * (queries + 2 * keys),
        forward_workspace_elements=int(2 * hidden + max(ffn.forward, heads)),
        backward_workspace_elements=int(2 * hidden + max(ffn.backward, heads)),
        elementwise_elements=int(10 * hidden + 2 * after + 2 * before_norm + ffn.elementwise),
        last_matmul_parameters=0 if config.norms_after else ffn.last_product,
    )


def with_frozen(
    stage: StageWork,
    shapes: Mapping[str, Shape],
    frozen: Collection[str],
    *,
    visits: float = 1.0,
) -> StageWork:
    """The same stage with some parameters left as they are.

    Args:
      stage: with all of them trained.
      shapes: of its parameters.
      frozen: names of those that are frozen; others than the stage's are ignored.
      visits: share of the experts that a token visits.
    """
    kept = {name: shape for name, shape in shapes.items() if name in frozen}
    if not kept:
        return stage
    experts = sum(math.prod(shape) for shape in kept.values() if len(shape) == 3)
    matrices = sum(math.prod(shape) for shape in kept.values() if len(shape) == 2)
    grouped = round(visits * experts)
    in_products = matrices + grouped if stage.matmul_parameters else 0
    return replace(
        stage,
        group_parameters=parameter_groups(
            {name: shape for name, shape in shapes.items() if name not in frozen}
        ),
        frozen_parameters=sum(map(math.prod, kept.values())),
        frozen_matmul_parameters=min(in_products, stage.matmul_parameters),
        frozen_grouped_parameters=min(grouped, stage.grouped_parameters),
    )


def _dense(config: ModelConfig, width: int) -> _FeedForward:
    """Gate, up and their product."""
    return _FeedForward(
        residual=3 * width,
        kept=2 * width,
        forward=3 * width,
        backward=2 * width,
        elementwise=3 * width,
        last_product=config.hidden_size * width,
    )


def _experts(config: ModelConfig) -> _FeedForward:
    """Of every visit its row, gate, up and their product; of every token logits and shares.

    An int32 or float32 is two elements. The last product's result is a row per visit, of which only
    their sum is kept.
    """
    hidden, width, visits = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
    )
    rows = ROWS_PER_VISIT * visits
    shared = _dense(config, config.shared_expert_intermediate_size)
    logits = 2 * config.num_experts
    inside = rows * (hidden + 3 * width)
    return _FeedForward(
        residual=inside + 2 * logits + shared.residual,
        kept=rows * 2 * width + logits + shared.kept,
        forward=inside + 2 * logits,
        backward=inside + 2 * logits,
        elementwise=rows * (3 * hidden + 3 * width) + 3 * logits + shared.elementwise,
        last_product=visits * hidden * width,
        grouped=3 * visits * hidden * width,
        decided=4 * visits,
    )
