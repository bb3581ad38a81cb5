"""Counts of a workload against the configuration's own shapes and by hand."""

import math
from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload, parameter_groups


@pytest.mark.parametrize("name", ["tiny", "tiny-tied", "qwen3-4b", "qwen2.5-7b", "llama-3.2-1b"])
def test_parameters_are_the_sum_over_shapes(name):
    config = named_config(name)
    workload = Workload.from_config(config)
    shapes = config.parameter_shapes()
    assert workload.num_parameters == sum(math.prod(shape) for shape in shapes.values())
    assert workload.num_parameters == config.num_parameters


@pytest.mark.parametrize("tied", [True, False])
def test_model_flops_by_hand(tied):
    config = named_config("tiny-tied" if tied else "tiny")
    batch = BatchShape(num_rows=3, seq_length=16)
    # D 64, F 160, N 4, K 2, H 32, L 4, V 271; the output projection counts whether tied or not.
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 160
    matmul = 2 * 48 * (4 * layer + 271 * 64)
    attention = 4 * 3 * (16 * 17 // 2) * 4 * 4 * 32
    workload = Workload.from_config(config)
    assert workload.model_flops_per_step(batch) == 3 * (matmul + attention)
    packed = replace(batch, document_lengths=(4, 4, 4, 4))
    attention = 4 * 3 * 4 * (4 * 5 // 2) * 4 * 4 * 32
    assert workload.model_flops_per_step(packed) == 3 * (matmul + attention)


def test_flops_of_a_mixture_are_those_of_the_visited_experts():
    config = replace(named_config("tiny-moe"), sparse_layers=(True, False) * 2)
    workload = Workload.from_config(config)
    # D 64, F 160, N 4, K 2, H 32; of 6 experts of width 44 a token visits 2.
    attention = 64 * 128 + 2 * 64 * 64 + 128 * 64
    sparse, dense = workload.layers[:2]
    assert sparse.matmul_parameters == attention + 6 * 64 + 2 * 3 * 44 * 64
    assert sparse.grouped_parameters == 2 * 3 * 44 * 64
    assert sparse.unvisited_parameters == 4 * 3 * 44 * 64
    assert dense.matmul_parameters == attention + 3 * 64 * 160
    assert dense == Workload.from_config(named_config("tiny")).layers[0]
    assert workload.num_active_parameters == config.num_active_parameters
    assert workload.num_parameters == config.num_parameters


def test_windows_count_per_layer():
    config = replace(named_config("tiny"), layer_windows=(None, 4, None, 4))
    batch = BatchShape(num_rows=1, seq_length=16)
    full, windowed = 16 * 17 // 2, 4 * 5 // 2 + 12 * 4
    flops = [stage.attention_flops(batch) for stage in Workload.from_config(config).layers]
    assert flops == [4 * pairs * 4 * 32 for pairs in (full, windowed, full, windowed)]


def test_a_foreign_model_needs_no_config():
    groups = parameter_groups({"w": (3, 5), "experts": (2, 3, 4), "scale": (7,), "shift": ()})
    assert groups == (15 + 24, 7 + 1)
    workload = Workload(
        name="foreign",
        embed=StageWork(name="embed", group_parameters=(10,)),
        layers=(StageWork(name="block", group_parameters=groups, matmul_parameters=15 + 12),),
        head=StageWork(name="head", group_parameters=(10,), matmul_parameters=10),
        tied=False,
        hidden_size=3,
        vocab_size=5,
    )
    assert workload.num_parameters == 10 + 47 + 10
    assert workload.model_flops_per_step(BatchShape(num_rows=1, seq_length=2)) == 3 * 2 * 2 * 37


def test_empty_requests_are_refused():
    with pytest.raises(ValueError, match="is empty"):
        BatchShape(num_rows=0, seq_length=4)
    with pytest.raises(ValueError, match="do not fit a row of 4"):
        BatchShape(num_rows=1, seq_length=4, document_lengths=(3, 2))
    tiny = Workload.from_config(named_config("tiny"))
    with pytest.raises(ValueError, match="no layers"):
        replace(tiny, layers=())
