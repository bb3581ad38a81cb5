"""The rate of products within layers, from what a whole layer took."""

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.calibration import layer_matmul_rate
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload


def test_by_hand():
    stage = StageWork(
        name="layer",
        group_parameters=(1000,),
        matmul_parameters=1000,
        last_matmul_parameters=250,
        attention_heads=2,
        attention_head_dim=4,
        elementwise_elements=10,
    )
    # 30 tokens: 8 * 1000 * 30 - 2 * 250 * 30 = 225,000 operations of products; per row 55 pairs of
    # 4 * 2 * 4 operations, 4.5 times for 3 rows: 23,760; elements 4 * 10 * 30 of two bytes: 2,400.
    seconds = 225_000 / 5e5 + 23_760 / 3e4 + 2_400 / 1e4
    rate = layer_matmul_rate(
        stage,
        BatchShape(num_rows=3, seq_length=10),
        seconds,
        attention_flops_per_s=3e4,
        memory_bytes_per_s=1e4,
        element_bytes=2,
    )
    assert rate == pytest.approx(5e5)


def test_a_layer_that_is_faster_than_its_attention_is_refused():
    layer = Workload.from_config(named_config("qwen3-4b")).layers[0]
    with pytest.raises(ValueError, match="do not fit each other"):
        layer_matmul_rate(
            layer,
            BatchShape(num_rows=1, seq_length=4096),
            1e-6,
            attention_flops_per_s=4e14,
            memory_bytes_per_s=4e12,
            element_bytes=2,
        )
