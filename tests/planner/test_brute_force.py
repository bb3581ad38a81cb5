"""No strategy of a grid much larger than the search's is over 3 % faster than the chosen one."""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import LOSS_CHUNKS_TOKENS
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.host_boundaries import with_host_boundaries
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.spare_memory import keeping_most
from slidedp_jax.planner.strategy import GRADIENT_ROUTES, WEIGHT_ROUTES, Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

WORST = 0.97


def job(
    *shape: Any, device_gib: float, host_gib: float, policy="deferred", packed=1, state_bytes=8.0
):
    """Model, layers, card, number of cards, rows and their length; documents of a packed row."""
    model, layers, hardware, num_devices, rows, seq_length = shape
    config = replace(named_config(model), num_hidden_layers=layers, layer_windows=())
    return {
        "workload": Workload.from_config(config),
        "batch": BatchShape(
            num_rows=rows,
            seq_length=seq_length,
            documents_per_row=packed if packed > 1 else None,
            document_lengths=(seq_length // packed,) * packed if packed > 1 else None,
        ),
        "hardware": replace(
            named_hardware(hardware, num_devices=num_devices), host_memory_bytes=host_gib * GIB
        ),
        "device_budget_bytes": device_gib * GIB,
        "update_policy": policy,
        "optimizer_state_bytes": state_bytes,
    }


JOBS = {
    "tight": job("qwen3-0.6b", 6, "h200", 1, 4, 2048, device_gib=5, host_gib=40),
    "roomy": job("qwen3-0.6b", 6, "h200", 1, 6, 4096, device_gib=40, host_gib=40),
    "small steps": job("qwen3-1.7b", 5, "h200", 1, 1, 2048, device_gib=16, host_gib=60),
    "two GPUs": job("qwen3-0.6b", 6, "rtx4090", 2, 8, 2048, device_gib=7, host_gib=60),
    "two GPUs, eager": job(
        "qwen3-0.6b", 6, "h200", 2, 4, 1024, device_gib=9, host_gib=60, policy="eager"
    ),
    "small host": job("qwen3-1.7b", 6, "h200", 1, 8, 1024, device_gib=24, host_gib=16),
    "long rows": job("qwen3-0.6b", 6, "h200", 1, 2, 65536, device_gib=14, host_gib=60),
    "boundaries": job("qwen3-4b", 6, "rtx4090", 1, 32, 4096, device_gib=20, host_gib=80),
    "eight GPUs": job("qwen3-8b", 4, "h100", 8, 16, 4096, device_gib=24, host_gib=200),
    "slow host": job("qwen3-4b", 6, "rtx4090", 4, 16, 1024, device_gib=16, host_gib=90),
    "all state just fits": job(
        *("qwen3-14b", 7, "h100", 4, 12, 512), device_gib=22.2, host_gib=84.2, policy="eager"
    ),
    "sums on the host": job(
        *("llama-3.1-8b", 3, "rtx4090", 2, 32, 2048),
        device_gib=13.6,
        host_gib=103,
        packed=4,
        state_bytes=4.0,
    ),
    "one row leaves room for state": job(
        *("llama-3.1-8b", 2, "a100-40g", 2, 12, 4096),
        device_gib=17.42,
        host_gib=85.7,
        state_bytes=12.0,
    ),
    "slices or small loss chunks": job(
        *("qwen3-0.6b", 2, "l40s", 8, 8, 512),
        device_gib=2.7711,
        host_gib=93,
        packed=4,
        state_bytes=12.0,
    ),
}
QUICK = ("tight", "all state just fits", "slices or small loss chunks")
MODELS = ("smollm2-135m", "qwen3-0.6b", "qwen3-4b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-14b")
MACHINES = ("h200", "h100", "a100-80g", "a100-40g", "l40s", "rtx4090", "rtx5090", "b200")
NUM_RANDOM = 40


def random_job(seed):
    """Shapes at random, and budgets that are a part of what a plan without any takes."""
    random = Random(seed)
    num_devices, seq_length = (
        random.choice((1, 1, 2, 4, 8)),
        random.choice((512, 1024, 4096, 32768)),
    )
    rows = num_devices * random.randint(1, max(1, min(16, 131072 // seq_length)))
    found = job(
        *(random.choice(MODELS), random.randint(2, 7), random.choice(MACHINES), num_devices),
        *(rows, seq_length),
        device_gib=0,
        host_gib=4000,
        policy=random.choice(("deferred", "eager")),
        packed=random.choice((1, 1, 4)),
        state_bytes=random.choice((4.0, 8.0, 12.0)),
    )
    wide = plan(**found | {"device_budget_bytes": None}).chosen.memory
    host = wide.host_bytes * random.uniform(0.7, 3)
    return found | {
        "device_budget_bytes": wide.device_bytes * random.uniform(0.2, 1),
        "hardware": replace(found["hardware"], host_memory_bytes=host),
    }


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


def assert_nothing_is_much_faster(its):
    """Returns how many of the grid fit."""
    found = plan(**its)
    job, step_s = found.job, found.chosen.time.step_s
    seen = 0
    for leanest, _ in grid(its["workload"], its["batch"], its["hardware"], found.strategy):
        if not job.fits(leanest):
            continue
        seen += 1
        option = keeping_most(job, leanest)
        if job.lower_bound_s(option) < WORST * step_s:
            assert job.timed(option).step_s >= WORST * step_s, option
    return seen


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in JOBS],
)
def test_nothing_is_much_faster_than_what_is_chosen(name):
    assert assert_nothing_is_much_faster(JOBS[name]) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_nor_in_a_job_at_random(seed):
    try:
        its = random_job(seed)
        plan(**its)
    except PlanError:
        pytest.skip("nothing fits")
    assert_nothing_is_much_faster(its)
