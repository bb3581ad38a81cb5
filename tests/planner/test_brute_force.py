"""No strategy of a grid much larger than the search's is over 3 % faster than the chosen one."""

import itertools
from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import LOSS_CHUNKS_TOKENS
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.host_boundaries import with_host_boundaries
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.strategy import GRADIENT_ROUTES, WEIGHT_ROUTES, Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

WORST = 0.97


def job(model, layers, hardware, num_devices, rows, seq_length, device_gib, host_gib, policy):
    config = replace(named_config(model), num_hidden_layers=layers, layer_windows=())
    return (
        Workload.from_config(config),
        BatchShape(num_rows=rows, seq_length=seq_length),
        replace(
            named_hardware(hardware, num_devices=num_devices), host_memory_bytes=host_gib * GIB
        ),
        device_gib * GIB,
        policy,
    )


JOBS = {
    "tight": job("qwen3-0.6b", 6, "h200", 1, 4, 2048, 5, 40, "deferred"),
    "roomy": job("qwen3-0.6b", 6, "h200", 1, 6, 4096, 40, 40, "deferred"),
    "small steps": job("qwen3-1.7b", 5, "h200", 1, 1, 2048, 16, 60, "deferred"),
    "two GPUs": job("qwen3-0.6b", 6, "rtx4090", 2, 8, 2048, 7, 60, "deferred"),
    "two GPUs, eager": job("qwen3-0.6b", 6, "h200", 2, 4, 1024, 9, 60, "eager"),
    "small host": job("qwen3-1.7b", 6, "h200", 1, 8, 1024, 24, 16, "deferred"),
    "long rows": job("qwen3-0.6b", 6, "h200", 1, 2, 65536, 14, 60, "deferred"),
    "boundaries": job("qwen3-4b", 6, "rtx4090", 1, 32, 4096, 20, 80, "deferred"),
    "eight GPUs": job("qwen3-8b", 4, "h100", 8, 16, 4096, 24, 200, "deferred"),
    "slow host": job("qwen3-4b", 6, "rtx4090", 4, 16, 1024, 16, 90, "deferred"),
}
QUICK = ("tight",)


def numbers(most):
    """All of few, some of many."""
    return sorted({*range(min(most, 8) + 1), most // 2, most})


def grid(workload, batch, hardware, chosen):
    """Every combination; results are kept of as many chunks as fit."""
    per_device = -(-batch.num_rows // hardware.num_devices)
    layers = len(workload.layers)
    some = hardware.num_devices > 1
    for size, rows, weights, gradients, depth, loss in itertools.product(
        range(1, layers + 1),
        range(1, per_device + 1),
        WEIGHT_ROUTES[: 1 + some],
        GRADIENT_ROUTES[: 1 + some],
        (1, 2, 3),
        LOSS_CHUNKS_TOKENS[::2],
    ):
        if per_device % rows and rows & (rows - 1):
            continue
        base = Strategy(
            layers_per_chunk=size,
            rows_per_microbatch=rows,
            num_microbatches=-(-per_device // rows),
            weight_route=weights,
            gradient_route=gradients,
            prefetch_depth=depth,
            loss_chunk_tokens=min(loss, rows * batch.seq_length),
            update_policy=chosen.update_policy,
            num_host_devices=chosen.num_host_devices,
            block_size=chosen.block_size,
        )
        chunks = -(-layers // size)
        for resident in numbers(chunks + 2) if gradients == "reduce_scatter" else [0]:
            for boundaries in {0, chunks // 2, chunks}:
                option = replace(base, resident_chunks=resident)
                yield with_host_boundaries(workload, batch, option, boundaries), chunks


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in JOBS],
)
def test_nothing_is_much_faster_than_what_is_chosen(name):
    workload, batch, hardware, device_bytes, policy = JOBS[name]
    found = plan(workload, batch, hardware, device_budget_bytes=device_bytes, update_policy=policy)
    job, step_s = found.job, found.chosen.time.step_s
    seen = 0
    for leanest, chunks in grid(workload, batch, hardware, found.strategy):
        if not job.fits(leanest):
            continue
        seen += 1
        kept = 0
        while kept < chunks and job.fits(replace(leanest, kept_chunks=kept + 1)):
            kept += 1
        option = replace(leanest, kept_chunks=kept)
        if job.lower_bound_s(option) < WORST * step_s:
            assert job.timed(option).step_s >= WORST * step_s, option
    assert seen > 20
