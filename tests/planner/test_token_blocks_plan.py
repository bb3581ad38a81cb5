"""Layers in blocks of tokens, as the planner counts them."""

from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import LAYER_BLOCK_TOKENS
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

WORKLOAD = Workload.from_config(named_config("qwen3-4b"))
TOKENS, BLOCK = 131_072, 8192
ROW = BatchShape(num_rows=1, seq_length=TOKENS)
STRATEGY = Strategy(
    layers_per_chunk=1,
    rows_per_microbatch=1,
    num_microbatches=1,
    num_host_devices=15,
    layer_block_tokens=BLOCK,
)


def test_memory_and_time_by_hand():
    hardware, stage = named_hardware("h200"), WORKLOAD.layers[0]
    blocked = memory_use(WORKLOAD, ROW, STRATEGY, hardware).device
    queries, keys, hidden = 32 * 128, 8 * 128, 2560
    rows = 6 * queries + 4 * keys + hidden
    assert blocked["recompute_residuals"] == 2 * (TOKENS * rows + BLOCK * stage.residual_elements)
    assert blocked["layer_workspace"] == 2 * BLOCK * stage.backward_workspace_elements
    whole = replace(STRATEGY, layer_block_tokens=0)
    more, less = (
        chunk_durations(WORKLOAD, ROW, one, hardware)[1].executed_flops for one in (STRATEGY, whole)
    )
    assert more - less == pytest.approx(2 * TOKENS * hidden * (queries + 2 * keys))


def test_the_planner_takes_blocks_where_rows_are_long():
    row = BatchShape(num_rows=1, seq_length=2 * TOKENS)
    long = plan(WORKLOAD, row, named_hardware("h200"))
    assert long.strategy.layer_block_tokens == LAYER_BLOCK_TOKENS
    short = plan(WORKLOAD, BatchShape(num_rows=32, seq_length=4096), named_hardware("h200"))
    assert short.strategy.layer_block_tokens == 0
    own = replace(
        WORKLOAD, layers=tuple(replace(stage, row_elements=0) for stage in WORKLOAD.layers)
    )
    assert plan(own, row, named_hardware("h200")).strategy.layer_block_tokens == 0


def test_a_row_of_128k_on_a_24_gib_card():
    hardware = replace(named_hardware("rtx4090"), host_memory_bytes=122 * GIB)
    assert plan(WORKLOAD, ROW, hardware).strategy.layer_block_tokens == LAYER_BLOCK_TOKENS
