"""Attention's results before whole layers, where rows are long."""

from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.durations import ATTENTION_BACKWARD, chunk_durations
from slidedp_jax.planner.flops import attention_forward_flops, row_pairs
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

CONFIG = named_config("qwen3-4b")
WORKLOAD = Workload.from_config(CONFIG)
HARDWARE = named_hardware("h200")
TOKENS = 131_072
ROW = BatchShape(num_rows=1, seq_length=TOKENS)
STRATEGY = Strategy(
    layers_per_chunk=1,
    rows_per_microbatch=1,
    num_microbatches=1,
    num_host_devices=15,
    kept_chunks=2,
    attention_chunks=3,
)


def test_memory_and_time_by_hand():
    without = replace(STRATEGY, attention_chunks=0)
    with_it, less = (memory_use(WORKLOAD, ROW, one, HARDWARE) for one in (STRATEGY, without))
    # The output of 32 heads of 128 in bf16, one float32 per head.
    assert with_it.device["kept_attention"] == 3 * TOKENS * (32 * 128 * 2 + 32 * 4)
    assert "kept_attention" not in less.device
    chunks, plain = (chunk_durations(WORKLOAD, ROW, one, HARDWARE) for one in (STRATEGY, without))
    pairs = row_pairs(TOKENS, None, None)
    attention = attention_forward_flops(pairs, 32, 128)
    first = 1 + 36 - 2 - 3
    spared = [p.executed_flops - c.executed_flops for c, p in zip(chunks, plain, strict=True)]
    assert spared == pytest.approx([0] * first + [attention] * 3 + [0] * 3, rel=1e-9)
    assert ATTENTION_BACKWARD * attention < chunks[first].executed_flops < plain[1].executed_flops


def test_the_planner_keeps_attention_first_where_rows_are_long():
    long = plan(WORKLOAD, ROW, HARDWARE, resident_state=False)
    assert long.strategy.attention_chunks > 0
    short = plan(WORKLOAD, BatchShape(num_rows=32, seq_length=4096), HARDWARE)
    assert short.strategy.attention_chunks == 0 and short.strategy.kept_chunks > 0
    # Whole layers alone, in the same memory, spare less.
    room = long.chosen.memory.device_bytes
    options = [replace(long.strategy, attention_chunks=0, kept_chunks=n) for n in range(36)]
    whole = [one for one in options if long.job.memory(one).device_bytes <= room][-1]
    assert long.chosen.time.step_s < long.job.time(whole).step_s
