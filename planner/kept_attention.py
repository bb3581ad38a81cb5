"""Whether attention's results are kept before whole layers (`Strategy.attention_chunks`).

Where rows are long, attention takes most of a layer's time, and its output and statistics are an
eighth of the layer's results.
"""

from __future__ import annotations

from slidedp_jax.planner.flops import matmul_forward_flops
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.strategy import Strategy

CLEARLY = 2.0
"""How many times more seconds a byte of them must spare: a chunk that is kept whole also spares an
upload."""


def attention_pays_first(job: Job, strategy: Strategy) -> bool:
    """Whether the next byte spares more time with attention's results than with the others."""
    stage = max(job.workload.layers, key=lambda stage: stage.attention_elements)
    others = (stage.kept_elements or stage.residual_elements) - stage.attention_elements
    if not stage.attention_elements or others <= 0:
        return False
    hardware = job.hardware
    slower = hardware.matmul_flops_per_s(strategy.compute_dtype) / hardware.bf16_matmul_flops_per_s
    rate = hardware.attention_flops_per_s * min(1.0, slower)
    attention_s = stage.attention_s(job.batch, rate) / job.batch.seq_length
    others_s = matmul_forward_flops(1, stage.matmul_parameters)
    others_s /= hardware.matmul_flops_per_s(strategy.compute_dtype)
    return attention_s / stage.attention_elements > CLEARLY * others_s / others
