"""Sums of what layers take per token, so that strategies are costed without a walk over layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slidedp_jax.planner.stage_work import StageWork


@dataclass(frozen=True, kw_only=True)
class LayerSums:
    """Sums over layers; elements are per token, as in `StageWork`.

    Attributes:
      padded_parameters: elements of the flat arrays of their chunks.
      residual_elements: what backward keeps of the recomputed forward pass.
      kept_elements: what stays of layers that are not recomputed.
      attention_elements: attention's output and statistics.
      attention_heads: query heads.
      heads_of_results: query heads of the layers whose attention's results can be kept apart.
      decided_elements: what stays in any case.
    """

    padded_parameters: int = 0
    residual_elements: int = 0
    kept_elements: int = 0
    attention_elements: int = 0
    attention_heads: int = 0
    heads_of_results: int = 0
    decided_elements: int = 0

    def __add__(self, other: LayerSums) -> LayerSums:
        return LayerSums(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

    def __sub__(self, other: LayerSums) -> LayerSums:
        return LayerSums(
            **{name: value - getattr(other, name) for name, value in vars(self).items()}
        )


def sums_of(stages: Sequence[StageWork], padded_parameters: int) -> LayerSums:
    """Of the layers of one chunk."""
    return LayerSums(
        padded_parameters=padded_parameters,
        residual_elements=sum(stage.residual_elements for stage in stages),
        kept_elements=sum(stage.kept_elements or stage.residual_elements for stage in stages),
        attention_elements=sum(stage.attention_elements for stage in stages),
        attention_heads=sum(stage.attention_heads for stage in stages),
        heads_of_results=sum(stage.attention_heads for stage in stages if stage.attention_elements),
        decided_elements=sum(stage.decided_elements for stage in stages),
    )
