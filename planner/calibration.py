"""From a measured layer to the rate of its products: `durations` solved for one rate.

A layer's forward and backward with recomputation takes, with P weights in products of which the
last has P', A operations of attention and E elements of element-wise traffic,

    (8 T P - 2 T P') / products + (2 + 2.5) A / attention + (2 + 2) E bytes / memory

for T tokens; what is measured of a whole layer thus sets the rate of products within layers.
"""

from __future__ import annotations

from slidedp_jax.planner.durations import ATTENTION_BACKWARD, ELEMENTWISE_BACKWARD
from slidedp_jax.planner.flops import matmul_forward_flops
from slidedp_jax.planner.stage_work import BatchShape, StageWork


def layer_matmul_rate(
    stage: StageWork,
    batch: BatchShape,
    seconds: float,
    *,
    attention_flops_per_s: float,
    memory_bytes_per_s: float,
    element_bytes: int,
) -> float:
    """Operations per second of the products of a layer on one device.

    Args:
      stage: the layer; not one with experts.
      batch: the rows that it was given.
      seconds: measured, forward and backward with recomputation.
      attention_flops_per_s: measured of attention alone, forward and backward.
      memory_bytes_per_s: measured of element-wise programs.
      element_bytes: of the compute dtype.

    Raises:
      ValueError: attention and element-wise programs alone would take longer.
    """
    forward = matmul_forward_flops(batch.num_tokens, stage.matmul_parameters)
    spared = matmul_forward_flops(batch.num_tokens, stage.last_matmul_parameters)
    attention_s = stage.attention_s(batch, attention_flops_per_s)
    attention_s *= (2 + ATTENTION_BACKWARD) * batch.num_rows
    moved = (2 + ELEMENTWISE_BACKWARD) * stage.elementwise_elements * batch.num_tokens
    others_s = attention_s + element_bytes * moved / memory_bytes_per_s
    left_s = seconds - others_s
    if left_s <= 0:
        raise ValueError(
            f"a layer took {seconds:.4g} s, its attention and element-wise programs alone "
            f"{others_s:.4g} s: these measurements do not fit each other"
        )
    return (4 * forward - spared) / left_s
