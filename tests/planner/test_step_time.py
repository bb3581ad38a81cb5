"""Schedules worked out by hand, and bounds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.hardware import HardwareProfile, LinkRate
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.step_time import lower_bound_s, step_time
from slidedp_jax.planner.strategy import GRADIENT_ROUTES, UPDATE_POLICIES, WEIGHT_ROUTES, Strategy
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload

FREE = 1e30


def _hardware(**changes) -> HardwareProfile:
    """Copies of 2 bytes per parameter take 1 s per parameter; the rest is free unless changed."""
    link = LinkRate(points=((1.0, 2.0),))
    base = {
        "device_memory_bytes_per_s": FREE,
        "attention_flops_per_s": FREE,
        "bf16_matmul_flops_per_s": 1.0,
        "h2d": link,
        "d2h": link,
        "duplex_bytes_per_s": FREE,
        "host_memory_bytes_per_s": FREE,
        "host_update_params_per_s": FREE,
        "copy_gap_s": 0.0,
        "visit_dispatch_s": 0.0,
        "upload_call_s": 0.0,
        "upload_call_per_device_s": 0.0,
        "step_end_s": 0.0,
    }
    return replace(named_hardware("h200"), **(base | changes))


FAST = LinkRate(points=((1.0, 1e12),))


def _stage(parameters: int, matmul: int) -> StageWork:
    groups = (parameters,) if parameters else ()
    return StageWork(name="stage", group_parameters=groups, matmul_parameters=matmul)


def _workload(num_layers: int, embed: int, layer: int, flops: int) -> Workload:
    """Untied without a head; a layer's forward takes `flops` seconds at 1 FLOP/s and one token."""
    return Workload(
        name="paper",
        embed=_stage(embed, 0),
        layers=(_stage(layer, flops // 2),) * num_layers,
        head=_stage(0, 0),
        tied=False,
        hidden_size=1,
        vocab_size=0,
    )


BATCH = BatchShape(num_rows=1, seq_length=1)


def _strategy(**changes) -> Strategy:
    base = {
        "layers_per_chunk": 1,
        "rows_per_microbatch": 1,
        "num_microbatches": 1,
        "block_size": 1,
    }
    return Strategy(**(base | changes))


def test_experts_are_all_read_and_multiplied_more_slowly():
    """Two parameters a token, one of them grouped at half the rate: 2 s and 4 s forward."""
    sparse = replace(
        _stage(5, 2), unvisited_parameters=3, grouped_parameters=1, last_matmul_parameters=1
    )
    workload = replace(_workload(1, 5, 5, 4), layers=(sparse,))
    slow = _hardware(grouped_matmul_share=0.5)
    layer = chunk_durations(workload, BATCH, _strategy(), slow)[1]
    assert layer.forward_s == pytest.approx(2 + 4)
    # Recomputed but for the last product, which is grouped, and twice forward.
    assert layer.backward_s == pytest.approx(2 + 2 * 6)
    # Ten bytes of weights at 1 byte/s take longer than that.
    reading = _hardware(grouped_matmul_share=0.5, device_memory_bytes_per_s=1.0)
    assert chunk_durations(workload, BATCH, _strategy(), reading)[1].forward_s >= 10


def test_durations_by_hand():
    # 3 parameters: copies 3 s; forward 4 s; backward 4 + 2 * 4; update 3 parameters at 0.5/s.
    layer = chunk_durations(
        _workload(2, 5, 3, 4), BATCH, _strategy(), _hardware(host_update_params_per_s=0.5)
    )[1]
    assert layer.upload_s == layer.download_s == pytest.approx(3.0)
    assert layer.forward_s == pytest.approx(4.0)
    assert layer.backward_s == pytest.approx(12.0)
    assert layer.executed_flops == 16.0
    assert layer.update_s == pytest.approx(6.0)
    assert layer.update_bytes == 3 * (24 + 2)


def test_resident_chunks_wait_for_no_upload_that_python_would_have_to_issue():
    # Both are bound by Python: 1 s per visit and 2 s per piece of an upload.
    hardware = _hardware(visit_dispatch_s=1.0, upload_call_s=2.0)
    strategy = _strategy(num_host_devices=4, resident_chunks=2)
    embed, lower, upper, last, head = chunk_durations(
        _workload(3, 5, 3, 0), BATCH, strategy, hardware
    )
    assert (embed.forward_s, lower.forward_s, upper.forward_s) == pytest.approx((1, 1, 1 + 4 * 2))
    assert (lower.backward_s, upper.backward_s) == pytest.approx((1, 1 + 4 * 2))
    assert last.backward_s == pytest.approx(1)  # its weights are still there
    assert head.backward_s == pytest.approx(1 + 4 * 2)
    assert (embed.upload_s, lower.upload_s, lower.update_s) == (0, 0, 0)
    everything = chunk_durations(
        _workload(3, 5, 3, 0), BATCH, replace(strategy, resident_chunks=5), hardware
    )
    assert [chunk.backward_s for chunk in everything] == pytest.approx([1] * 5)


@pytest.mark.parametrize("policy", ["eager", "deferred"])
def test_between_two_steps_the_norm_goes_to_the_host_and_back(policy):
    # Without copies and updates a step is its compute and that. Deferred updates, half a second for
    # the embedding and each layer, begin after it, and the first layer waits for two of them.
    strategy, hardware = _strategy(update_policy=policy), _hardware(step_end_s=2.0)
    time = step_time(_workload(2, 0, 0, 4), BATCH, strategy, hardware)
    assert time.step_s == pytest.approx(2 * (4 + 12) + 2)
    assert time.busy_s["compute"] == pytest.approx(2 * (4 + 12) + 2)
    updating = replace(hardware, host_update_params_per_s=2.0, h2d=FAST, d2h=FAST)
    time = step_time(_workload(2, 1, 1, 4), BATCH, strategy, updating)
    exposed = 1.0 if policy == "deferred" else 0.0
    assert time.step_s == pytest.approx(2 * (4 + 12) + 2 + exposed, rel=1e-6)


def test_the_last_product_of_a_chunk_is_not_recomputed():
    workload = _workload(2, 5, 3, 4)
    layers = tuple(replace(layer, last_matmul_parameters=1) for layer in workload.layers)
    workload = replace(workload, layers=layers)
    one = chunk_durations(workload, BATCH, _strategy(), _hardware())
    both = chunk_durations(workload, BATCH, _strategy(layers_per_chunk=2), _hardware())
    assert one[1].backward_s == pytest.approx(12.0 - 2.0)
    assert both[1].backward_s == pytest.approx(24.0 - 2.0)


def test_routes_share_the_copies_and_pay_for_collectives():
    hardware = replace(_hardware(gather_bytes_per_s=3.0), num_devices=3)
    batch = BatchShape(num_rows=3, seq_length=1)
    workload = _workload(2, 0, 3, 0)

    def durations(weight_route, gradient_route):
        strategy = _strategy(
            weight_route=weight_route, gradient_route=gradient_route, num_host_devices=3
        )
        return chunk_durations(workload, batch, strategy, hardware)[1]

    whole = durations("replicate", "host_sum")
    assert (whole.upload_s, whole.download_s) == (pytest.approx(3), pytest.approx(3))
    assert whole.forward_s == pytest.approx(0, abs=1e-9)
    assert whole.update_bytes == 3 * (24 + 3 * 2)
    shared = durations("shard_all_gather", "reduce_scatter")
    assert (shared.upload_s, shared.download_s) == (pytest.approx(1), pytest.approx(1))
    # 6 bytes of weights, two thirds from the others, at 3 bytes/s; as many of bf16 gradients.
    assert shared.forward_s == pytest.approx(4 / 3)
    assert shared.backward_s == pytest.approx(4 / 3 + 4 / 3)
    assert shared.update_bytes == 3 * (24 + 2)


def test_a_visit_takes_no_less_than_its_dispatch():
    """1 s per visit, 2 + 3 * 1 s for each of two pieces of an upload; none where weights stay."""
    hardware = replace(
        _hardware(),
        num_devices=3,
        visit_dispatch_s=1.0,
        upload_call_s=2.0,
        upload_call_per_device_s=1.0,
        bf16_matmul_flops_per_s=FREE,
        gather_bytes_per_s=FREE,
    )
    batch = BatchShape(num_rows=3, seq_length=1)
    strategy = _strategy(num_host_devices=6, weight_route="shard_all_gather")
    embed, first, last, head = chunk_durations(_workload(2, 1, 1, 0), batch, strategy, hardware)
    upload_s = 2 * (2 + 3 * 1)
    assert embed.forward_s == first.forward_s == last.forward_s == pytest.approx(1 + upload_s)
    assert first.backward_s == head.backward_s == pytest.approx(1 + upload_s)
    assert embed.backward_s == last.backward_s == pytest.approx(1)
    assert head.forward_s == 0


def test_one_step_bound_by_the_link_in_forward():
    # Uploads of 3 s back to back beside forwards of 2 s; the last layer stays; backwards of 6 s
    # hide uploads and downloads of 3 s; the last download is exposed.
    time = step_time(_workload(4, 0, 3, 1 * 2), BATCH, _strategy(), _hardware())
    assert time.single_step_s == pytest.approx(4 * 3 + 2 + 4 * 6 + 3)
    assert time.busy_s["h2d"] == pytest.approx(3 * (4 + 3))
    assert time.busy_s["compute"] == pytest.approx(4 * 8)


def test_eager_updates_hide_and_deferred_ones_do_not():
    """Two layers of 1 parameter, 4 s forward, 12 s backward, updates of 5 s, copies of 1 s."""
    hardware = _hardware(host_update_params_per_s=0.2)
    workload = _workload(2, 1, 1, 4)
    eager = step_time(workload, BATCH, _strategy(update_policy="eager"), hardware)
    deferred = step_time(workload, BATCH, _strategy(update_policy="deferred"), hardware)
    compute_s = 2 * 16
    # Eager, from the end of compute: layer 0's gradient arrives after 1 s, the embedding's after 2.
    # Layer 0's update is ready first: until 6, the embedding's until 11, then both uploads.
    assert eager.step_s == pytest.approx(compute_s + 1 + 5 + 5 + 1 + 1)
    # Deferred: the embedding's update until 7, layer 0's until 12, layer 1's until 17, its upload
    # until 18; layer 0's forward of 4 s is hidden beside it.
    assert deferred.step_s == pytest.approx(compute_s + 2 + 5 + 5 + 5 + 1 - 4)
    # Compute waited for the updates but while a copy was the next thing to come.
    assert eager.exposed_s["host_update"] == pytest.approx(10)
    assert deferred.exposed_s["host_update"] == pytest.approx(5 + 4)
    # With the state of embedding and layer 0 on the device the host updates layer 1 at once, beside
    # layer 0's forward of 4 s.
    resident = step_time(
        workload, BATCH, _strategy(update_policy="deferred", resident_chunks=2), hardware
    )
    assert resident.step_s == pytest.approx(compute_s + 5 + 1 - 4)
    assert resident.busy_s["host_update"] == pytest.approx(5)


def test_resident_chunks_are_updated_at_the_devices_memory_rate():
    """26 bytes per parameter, each of two devices half of them; the head's within its one visit."""
    hardware = replace(_hardware(device_memory_bytes_per_s=13.0), num_devices=2)
    workload = _workload(1, 2, 2, 0)
    strategy = _strategy(num_host_devices=2)
    on_host = chunk_durations(workload, BATCH, strategy, hardware)
    on_devices = chunk_durations(workload, BATCH, replace(strategy, resident_chunks=2), hardware)
    for before, after in zip(on_host[:2], on_devices[:2], strict=True):
        assert after.forward_s - before.forward_s == pytest.approx(2 * 26 / 2 / 13)
        assert after.backward_s == before.backward_s
        assert (after.upload_s, after.download_s, after.update_s) == (0, 0, 0)
    assert on_devices[2] == on_host[2]


def test_a_deeper_prefetch_evens_out_unequal_chunks():
    """Layers of 1 and 9 s of upload in turn, 5 s of forward each: depth 1 waits, depth 2 less."""
    small, large = _stage(1, 5 // 2), _stage(9, 5 // 2)
    workload = replace(_workload(2, 0, 1, 4), layers=(small, large) * 4)
    shallow = step_time(workload, BATCH, _strategy(), _hardware())
    deep = step_time(workload, BATCH, _strategy(prefetch_depth=2), _hardware())
    assert deep.step_s < shallow.step_s


def test_slow_downloads_hold_up_the_backward_pass():
    # Downloads of 20 s against backwards of 12 s: at most two on their way.
    slow = _hardware(d2h=LinkRate(points=((1.0, 0.1),)))
    time = step_time(_workload(4, 0, 1, 4), BATCH, _strategy(update_policy="eager"), slow)
    assert time.bottleneck == "d2h"
    assert time.exposed_s["d2h"] > 0
    assert time.step_s >= 4 * 20


def test_mfu_of_an_ideal_machine():
    hardware = _hardware(
        h2d=LinkRate(points=((1.0, FREE),)),
        d2h=LinkRate(points=((1.0, FREE),)),
        peak_flops_per_s=2.0,
    )
    time = step_time(_workload(3, 1, 1, 4), BATCH, _strategy(), hardware)
    # 3 layers, forward 4, backward 8, recompute 4 at 1 of 2 FLOP/s.
    assert time.step_s == pytest.approx(3 * 16)
    assert time.mfu == pytest.approx(3 * 12 / (3 * 16 * 2))
    assert time.hfu == pytest.approx(0.5)
    assert time.tokens_per_s == pytest.approx(1 / 48)


QWEN3 = Workload.from_config(named_config("qwen3-0.6b"))


@given(
    layers=st.sampled_from([1, 2, 5, 14, 28]),
    rows=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    num_devices=st.sampled_from([1, 2, 4]),
    weight_route=st.sampled_from(WEIGHT_ROUTES),
    gradient_route=st.sampled_from(GRADIENT_ROUTES),
    update_policy=st.sampled_from(UPDATE_POLICIES),
    depth=st.integers(1, 3),
    hardware_name=st.sampled_from(["h200", "rtx4090"]),
)
def test_bounds_hold(
    layers,
    rows,
    microbatches,
    num_devices,
    weight_route,
    gradient_route,
    update_policy,
    depth,
    hardware_name,
):
    hardware = named_hardware(hardware_name, num_devices=num_devices)
    strategy = Strategy(
        layers_per_chunk=layers,
        rows_per_microbatch=rows,
        num_microbatches=microbatches,
        weight_route=weight_route,
        gradient_route=gradient_route,
        update_policy=update_policy,
        prefetch_depth=depth,
        num_host_devices=num_devices,
    )
    batch = BatchShape(num_rows=rows * microbatches * num_devices, seq_length=1024)
    time = step_time(QWEN3, batch, strategy, hardware)
    durations = chunk_durations(QWEN3, batch, strategy, hardware)
    assert time.lower_bound_s == lower_bound_s(durations, strategy, hardware)
    assert time.lower_bound_s <= time.step_s
    # Sharing resources can stretch the lanes' sum by what they demand beyond capacity, no more.
    assert time.step_s <= 2.5 * time.upper_bound_s
    assert sum(time.exposed_s.values()) == pytest.approx(
        time.step_s - time.busy_s["compute"], rel=0.02, abs=1e-3
    )
    assert time.mfu <= time.hfu <= 1
