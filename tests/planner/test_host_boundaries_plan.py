"""Boundary activations in host memory, as the planner counts and chooses them."""

from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, LinkRate
from slidedp_jax.planner.host_boundaries import with_host_boundaries
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.step_time import step_time
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

WORKLOAD = Workload.from_config(named_config("qwen3-4b"))
LAYERS = len(WORKLOAD.layers)
BATCH = BatchShape(num_rows=16, seq_length=4096)
HARDWARE = replace(named_hardware("h200", num_devices=2), host_memory_bytes=500 * GIB)
STRATEGY = Strategy(
    layers_per_chunk=1, rows_per_microbatch=2, num_microbatches=4, num_host_devices=30
)
BOUNDARY = 2 * 4096 * 2560 * 2


def on_host(count):
    return with_host_boundaries(WORKLOAD, BATCH, STRATEGY, count)


def test_bytes_by_hand():
    none, some = (memory_use(WORKLOAD, BATCH, on_host(count), HARDWARE) for count in (0, 10))
    assert on_host(10).host_boundary_bytes == BOUNDARY
    assert some.host["host_boundaries"] == 10 * 4 * 2 * BOUNDARY  # microbatches, devices
    assert some.pinned_pool_bytes >= none.pinned_pool_bytes + 10 * 8 * BOUNDARY - GIB
    # Ten leave, and have left when those above them have run; of all, two are on their way.
    assert none.device_phase == some.device_phase
    part = "boundary_activations"
    assert none.device[part] - some.device[part] == 10 * 4 * BOUNDARY
    everything = memory_use(WORKLOAD, BATCH, on_host(LAYERS), HARDWARE)
    assert none.device[part] - everything.device[part] == (LAYERS - 2) * 4 * BOUNDARY


def test_copies_take_the_link_in_either_direction_and_hide_behind_compute():
    layers = chunk_durations(WORKLOAD, BATCH, on_host(10), HARDWARE)[1:-1]
    assert [chunk.boundary_bytes for chunk in layers] == [4.0 * BOUNDARY] * 10 + [0.0] * (
        LAYERS - 10
    )
    none, all_of_them = (step_time(WORKLOAD, BATCH, on_host(n), HARDWARE) for n in (0, LAYERS))
    seconds = sum(chunk.boundary_s for chunk in layers) * LAYERS / 10
    for lane in ("h2d", "d2h"):
        more = all_of_them.busy_s[lane] - none.busy_s[lane]
        assert more == pytest.approx(seconds, rel=1e-6)
    assert all_of_them.step_s < 1.02 * none.step_s


def test_a_slow_link_shows():
    """Where a boundary takes longer than a layer, the step takes longer by most of the copies."""
    rate = LinkRate(points=((1e6, 2e9),))
    slow = replace(HARDWARE, h2d=rate, d2h=rate)
    found = step_time(WORKLOAD, BATCH, on_host(LAYERS), slow)
    copies_s = LAYERS * 4 * BOUNDARY / 2e9
    assert found.step_s > 0.9 * copies_s + step_time(WORKLOAD, BATCH, on_host(0), slow).step_s
    assert found.step_s >= found.lower_bound_s >= copies_s


def planned(model, batch, hardware, **options):
    return plan(Workload.from_config(named_config(model)), batch, hardware, **options)


def test_they_go_to_the_host_where_the_devices_lack_the_room_and_no_more_than_that_needs():
    hardware = replace(named_hardware("rtx4090"), host_memory_bytes=250 * GIB)
    batch = BatchShape(num_rows=8, seq_length=4096)
    found = planned("qwen3-14b", batch, hardware)
    assert 0 < found.strategy.host_boundaries <= 40
    fewer = with_host_boundaries(
        found.job.workload, batch, found.strategy, found.strategy.host_boundaries - 1
    )
    assert found.job.memory(found.strategy).device_bytes <= found.job.device_budget_bytes
    roomy = planned("qwen3-4b", batch, named_hardware("h200"))
    assert roomy.strategy.host_boundaries == 0
    assert found.job.time(fewer).step_s == pytest.approx(found.chosen.time.step_s, rel=0.02)


def test_the_hosts_memory_bounds_them():
    batch = BatchShape(num_rows=8, seq_length=4096)
    hardware = named_hardware("rtx4090")
    least = planned("qwen3-14b", batch, replace(hardware, host_memory_bytes=400 * GIB))
    need = least.job.memory(with_host_boundaries(least.job.workload, batch, least.strategy, 0))
    with pytest.raises(PlanError):
        planned("qwen3-14b", batch, replace(hardware, host_memory_bytes=need.host_bytes - 10 * GIB))


def test_72b_on_four_24_gib_cards_at_32k_tokens_per_gpu():
    hardware = replace(named_hardware("rtx4090", num_devices=4), host_memory_bytes=1200 * GIB)
    found = planned("qwen2.5-72b", BatchShape(num_rows=32, seq_length=4096), hardware)
    assert found.strategy.host_boundaries > 70
    assert found.strategy.vocab_slices > 1
    assert found.chosen.time.exposed_s["h2d"] < 0.05 * found.chosen.time.step_s


def test_a_decided_strategy_gets_the_places_that_longer_rows_need():
    workload = Workload.from_config(named_config("qwen3-4b"))
    hardware = replace(named_hardware("rtx4090"), host_memory_bytes=200 * GIB)
    first = plan(workload, BatchShape(num_rows=1, seq_length=65_536), hardware)
    assert first.strategy.host_boundaries
    longer = BatchShape(num_rows=1, seq_length=66_560)
    again = plan(workload, longer, hardware, strategy=first.strategy)
    assert again.strategy.host_boundary_bytes == 66_560 * 2560 * 2
    assert again.strategy == replace(
        first.strategy, host_boundary_bytes=again.strategy.host_boundary_bytes
    )
