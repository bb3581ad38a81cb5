"""The search is exact, monotone in its budgets, and says why nothing fits."""

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import (
    LOSS_CHUNKS_TOKENS,
    PREFETCH_DEPTHS,
    Choices,
    default_block_size,
    default_num_host_devices,
)
from slidedp_jax.planner.chunking import chunk_stages
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.step_time import step_time
from slidedp_jax.planner.strategy import GRADIENT_ROUTES, WEIGHT_ROUTES, Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

QWEN3_06B = Workload.from_config(named_config("qwen3-0.6b"))
EIGHT_LAYERS = Workload.from_config(
    replace(named_config("qwen3-0.6b"), num_hidden_layers=8, layer_windows=())
)
QWEN3_4B = Workload.from_config(named_config("qwen3-4b"))
BATCH = BatchShape(num_rows=16, seq_length=4096)


def test_equals_a_search_through_everything():
    config = replace(named_config("qwen3-0.6b"), num_hidden_layers=4, layer_windows=())
    workload = Workload.from_config(config)
    hardware = named_hardware("rtx4090", num_devices=2)
    batch = BatchShape(num_rows=12, seq_length=2048)
    budget = 7 * GIB
    found = plan(
        workload,
        batch,
        hardware,
        device_budget_bytes=budget,
        update_policy="eager",
        keep_activations=False,
        resident_state=False,
    )
    pieces = default_num_host_devices(hardware.num_host_cores, hardware.num_devices)
    best_s = float("inf")
    for layers, rows, weights, gradients, depth, loss_chunk in itertools.product(
        range(1, 5),
        range(1, 7),
        WEIGHT_ROUTES,
        GRADIENT_ROUTES,
        PREFETCH_DEPTHS,
        LOSS_CHUNKS_TOKENS,
    ):
        strategy = Strategy(
            layers_per_chunk=layers,
            rows_per_microbatch=rows,
            num_microbatches=-(-6 // rows),
            weight_route=weights,
            gradient_route=gradients,
            prefetch_depth=depth,
            loss_chunk_tokens=loss_chunk,
            update_policy="eager",
            num_host_devices=pieces,
            block_size=default_block_size(workload, pieces),
        )
        memory = memory_use(workload, batch, strategy, hardware)
        if memory.device_bytes <= budget and memory.host_bytes <= hardware.host_memory_bytes:
            best_s = min(best_s, step_time(workload, batch, strategy, hardware).step_s)
    assert found.chosen.time.step_s == pytest.approx(best_s)
    assert found.chosen.memory.device_bytes <= budget


@pytest.mark.parametrize("uses_spare_memory", [False, True])
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 24),
    budgets_gib=st.tuples(st.floats(2, 20), st.floats(0, 30)),
    update_policy=st.sampled_from(["eager", "deferred"]),
)
def test_more_device_memory_never_gives_a_slower_plan(
    uses_spare_memory, rows, budgets_gib, update_policy
):
    """Spare memory is used almost as well as it can be: a few hundredths of a step may be lost."""
    hardware = named_hardware("h200")
    batch = BatchShape(num_rows=rows, seq_length=2048)

    def step_s(gib):
        try:
            found = plan(
                EIGHT_LAYERS,
                batch,
                hardware,
                update_policy=update_policy,
                device_budget_bytes=gib * GIB,
                keep_activations=uses_spare_memory,
                resident_state=uses_spare_memory,
            )
        except PlanError:
            return float("inf")
        return found.chosen.time.step_s

    small, extra = budgets_gib
    rounding = 1 + 1e-12  # of sums over a step in another order
    assert step_s(small + extra) <= (1.05 if uses_spare_memory else rounding) * step_s(small)


def test_a_tight_device_changes_the_strategy_and_lists_what_was_given_up():
    hardware = named_hardware("h200")
    roomy = plan(QWEN3_4B, BATCH, hardware)
    assert roomy.rejected == ()
    tight = plan(QWEN3_4B, BATCH, hardware, device_budget_bytes=8 * GIB)
    assert tight.chosen.memory.device_bytes <= 8 * GIB
    assert tight.chosen.time.step_s > roomy.chosen.time.step_s
    assert tight.rejected
    for rejected in tight.rejected:
        assert rejected.lower_bound_s < tight.chosen.time.step_s
        assert rejected.limits[0].name == "device memory"
        assert rejected.limits[0].need_bytes > 8 * GIB
    times = [other.time.step_s for other in tight.runners_up]
    assert times == sorted(times)
    assert tight.chosen.time.step_s <= 1.01 * times[0]


def test_nothing_fits_lists_every_limit_with_need_have_and_what_to_change():
    tight = partial(
        plan, QWEN3_4B, BATCH, named_hardware("h200"), choices=Choices(layers_per_chunk=2)
    )
    with pytest.raises(PlanError) as caught:
        tight(device_budget_bytes=2 * GIB, host_budget_bytes=16 * GIB)
    message = str(caught.value)
    assert "device memory: needs" in message
    assert "has 2.00 GiB" in message
    assert "host memory: needs" in message
    assert "has 16.00 GiB; largest part optimizer_state 29.98 GiB" in message
    assert "use an optimizer with less state" in message
    assert "layers_per_chunk=2" in message
    # What is asked for is enough: both needs are of one strategy. Neither alone will do.
    device, host = (limit.need_bytes for limit in caught.value.limits)
    assert tight(device_budget_bytes=device, host_budget_bytes=host)
    for budgets in ((device, 16 * GIB), (2 * GIB, host)):
        with pytest.raises(PlanError):
            tight(device_budget_bytes=budgets[0], host_budget_bytes=budgets[1])


def test_host_need_follows_the_optimizer():
    tight = partial(
        plan,
        QWEN3_4B,
        BATCH,
        named_hardware("h200"),
        host_budget_bytes=40 * GIB,
        resident_state=False,
    )
    with pytest.raises(PlanError, match="optimizer_state"):
        tight()
    found = tight(optimizer_state_bytes=2)
    assert found.chosen.memory.host_bytes <= 40 * GIB


def test_contradictions_are_reported_together():
    with pytest.raises(PlanError) as caught:
        plan(
            QWEN3_4B,
            BatchShape(num_rows=4, seq_length=128),
            named_hardware("h200", num_devices=2),
            choices=Choices(
                rows_per_microbatch=3, num_host_devices=5, prefetch_depth=0, layers_per_chunk=37
            ),
            device_budget_bytes=200 * GIB,
        )
    message = str(caught.value)
    for part in (
        "rows_per_microbatch is 3",
        "num_host_devices is 5",
        "prefetch_depth is 0",
        "layers_per_chunk is 37; the model has 36 layers",
        "the device memory budget is 200.00 GiB; a run on h200 has 129.38 GiB",
    ):
        assert part in message


def test_choices_are_kept():
    choices = Choices(
        layers_per_chunk=3,
        rows_per_microbatch=2,
        weight_route="shard_all_gather",
        gradient_route="host_sum",
        prefetch_depth=2,
        loss_chunk_tokens=700,
        num_host_devices=8,
        block_size=128,
    )
    found = plan(QWEN3_06B, BATCH, named_hardware("h200", num_devices=2), choices=choices).strategy
    for name in Choices.__dataclass_fields__:
        assert getattr(found, name) == getattr(choices, name)
    assert found.num_microbatches == 4


def test_a_decided_strategy_must_have_room_for_the_rows():
    hardware = named_hardware("h200", num_devices=2)
    decided = plan(QWEN3_06B, BATCH, hardware).strategy
    more = replace(BATCH, num_rows=2 * BATCH.num_rows)
    with pytest.raises(PlanError, match=r"takes \d+ rows per step.*on 2 devices.*planned anew"):
        plan(QWEN3_06B, more, hardware, strategy=decided)


@pytest.mark.parametrize("name", ["tiny", "tiny-tied", "smollm2-135m", "qwen3-0.6b", "qwen3-4b"])
def test_default_blocks_pad_little(name):
    workload = Workload.from_config(named_config(name))
    block_size = default_block_size(workload, 8)
    padded = chunk_stages(workload, 1, block_size, 8).padded_parameters
    assert padded <= 1.02 * workload.num_parameters


def test_default_host_devices_leave_cores_free_and_divide():
    for num_devices in (1, 2, 3, 8):
        hardware = named_hardware("h200", num_devices=num_devices)
        pieces = default_num_host_devices(hardware.num_host_cores, hardware.num_devices)
        assert pieces % num_devices == 0
        assert num_devices <= pieces < hardware.num_host_cores
    assert default_num_host_devices(16, 1) == 15
    assert default_num_host_devices(128, 8) == 120
    assert default_num_host_devices(2, 4) == 4


def test_a_profile_without_clipping_is_faster_where_the_update_is_slow():
    hardware = replace(named_hardware("h200"), host_update_params_per_s=2e9)
    plan_of = partial(plan, QWEN3_4B, BATCH, hardware, resident_state=False)
    eager = plan_of(update_policy="eager").chosen.time
    deferred = plan_of(update_policy="deferred").chosen.time
    assert eager.step_s < deferred.step_s
    assert deferred.exposed_s["host_update"] > eager.exposed_s["host_update"]


def test_state_on_the_devices_ends_the_wait_for_the_host_update():
    hardware, batch = named_hardware("h200"), BatchShape(num_rows=8, seq_length=4096)
    on_host = plan(QWEN3_4B, batch, hardware, resident_state=False)
    assert on_host.strategy.resident_chunks == 0
    resident = plan(QWEN3_4B, batch, hardware)
    assert 0 < resident.strategy.resident_chunks < len(QWEN3_4B.layers)
    assert resident.chosen.time.step_s < 0.8 * on_host.chosen.time.step_s
    assert resident.chosen.time.exposed_s["host_update"] < 0.05
    assert resident.chosen.memory.device_bytes <= resident.job.device_budget_bytes
    assert on_host.strategy in [other.strategy for other in resident.runners_up] or all(
        other.time.step_s <= on_host.chosen.time.step_s for other in resident.runners_up
    )
    # No room.
    tight = plan(QWEN3_4B, batch, hardware, resident_state=True, device_budget_bytes=9 * GIB)
    assert tight.strategy.resident_chunks == 0
    two = plan(QWEN3_4B, batch, hardware.with_devices(2), resident_state=True)
    assert two.strategy.gradient_route == "reduce_scatter" and two.strategy.resident_chunks > 0
    by_host = Choices(gradient_route="host_sum")
    with pytest.raises(PlanError, match="reduce_scatter"):
        plan(QWEN3_4B, batch, hardware, resident_state=True, choices=by_host)
    unasked = plan(QWEN3_4B, batch, hardware.with_devices(2), choices=by_host)
    assert unasked.strategy.resident_chunks == 0


def test_what_the_host_has_no_room_for_stays_on_the_devices():
    hardware, batch = named_hardware("h200"), BatchShape(num_rows=8, seq_length=4096)
    small = 24 * GIB
    with pytest.raises(PlanError, match="host memory: needs"):
        plan(QWEN3_4B, batch, hardware, host_budget_bytes=small, resident_state=False)
    found = plan(QWEN3_4B, batch, hardware, host_budget_bytes=small)
    assert found.strategy.resident_chunks > 0
    assert found.chosen.memory.host_bytes <= small
    # Where neither has room for it, both are named as they are without.
    with pytest.raises(PlanError, match="host memory: needs"):
        plan(QWEN3_4B, batch, hardware, host_budget_bytes=small, device_budget_bytes=24 * GIB)
    for host_gib in (24, 32, 40, 48, 56, 64):
        tight = plan(
            QWEN3_4B,
            batch,
            hardware,
            host_budget_bytes=host_gib * GIB,
            device_budget_bytes=60 * GIB,
        )
        assert tight.chosen.memory.host_bytes <= host_gib * GIB
        assert tight.chosen.memory.device_bytes <= 60 * GIB


def test_logits_make_room_for_state():
    """Large loss chunks win nothing where state on the devices wins much."""
    batch, hardware = BatchShape(num_rows=6, seq_length=2048), named_hardware("h200")
    tight = partial(plan, QWEN3_06B, batch, hardware, device_budget_bytes=8 * GIB)
    large = tight(choices=Choices(loss_chunk_tokens=4096))
    assert tight().strategy.loss_chunk_tokens < 4096
    assert tight().chosen.time.step_s < 0.9 * large.chosen.time.step_s


def test_no_more_layers_per_program_than_pay():
    """They take long to compile; where speed is the same, fewer are taken."""
    hardware = named_hardware("h200", num_devices=4)
    workload = Workload.from_config(named_config("qwen3-8b"))
    found = plan(workload, BatchShape(num_rows=8, seq_length=4096), hardware)
    layers = found.strategy.layers_per_chunk
    assert layers < 6
    for fewer in range(1, layers):
        choices = Choices(layers_per_chunk=fewer)
        other = plan(workload, found.job.batch, hardware, choices=choices)
        assert other.chosen.time.step_s > found.chosen.time.step_s


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_more_host_memory_never_gives_a_much_slower_plan(num_devices):
    """Which chunk size is best depends on how much state stays on the devices."""
    hardware = named_hardware("h200", num_devices=num_devices)
    workload = Workload.from_config(named_config("qwen3-8b"))
    batch = BatchShape(num_rows=8, seq_length=4096)
    times = [
        plan(workload, batch, hardware, host_budget_bytes=gib * GIB).chosen.time.step_s
        for gib in (35, 85, 106, 120)
    ]
    for less, more in itertools.pairwise(times):
        assert more <= 1.05 * less


def test_a_host_that_is_too_small_is_told_what_it_needs_beside_the_devices():
    """Not what it would need if no state stayed there."""
    hardware = named_hardware("rtx4090", num_devices=4)
    workload = Workload.from_config(named_config("qwen3-8b"))
    batch = BatchShape(num_rows=8, seq_length=2048)
    with pytest.raises(PlanError, match="host memory: needs") as caught:
        plan(workload, batch, hardware, host_budget_bytes=60 * GIB)
    need = float(re.search(r"host memory: needs ([\d.]+) GiB", str(caught.value))[1])
    assert 60 < need < 100
    assert plan(workload, batch, hardware, host_budget_bytes=(need + 0.1) * GIB)


def test_the_cpu_backend_keeps_activations_only_when_asked():
    batch, hardware = BatchShape(num_rows=8, seq_length=64), named_hardware("cpu")
    model = Workload.from_config(named_config("tiny"))
    assert plan(model, batch, hardware).strategy.kept_chunks == 0
    assert plan(model, batch, hardware, keep_activations=True).strategy.kept_chunks > 0


def test_keeping_activations_fills_the_budget_and_saves_the_recomputation():
    hardware = named_hardware("h200")
    batch = BatchShape(num_rows=8, seq_length=4096)
    plan_of = partial(plan, QWEN3_4B, batch, hardware, resident_state=False)
    recomputing = plan_of(keep_activations=False).chosen
    assert recomputing.strategy.kept_chunks == 0
    last = 0
    for gib in (24, 48, 96, 141):
        budget = min(gib * GIB, hardware.device_memory_bytes)
        chosen = plan_of(device_budget_bytes=budget).chosen
        kept = chosen.strategy.kept_chunks * chosen.strategy.layers_per_chunk
        assert kept >= last
        assert chosen.memory.device_bytes <= budget
        if kept:
            assert chosen.time.busy_s["compute"] < recomputing.time.busy_s["compute"]
            assert chosen.time.busy_s["h2d"] < recomputing.time.busy_s["h2d"]
            assert chosen.time.step_s <= recomputing.time.step_s
        last = kept
    assert last == len(QWEN3_4B.layers)
    # Forward's products are a quarter of the products with recomputation.
    saved = 1 - chosen.time.executed_flops / recomputing.time.executed_flops
    assert 0.18 < saved < 0.25
