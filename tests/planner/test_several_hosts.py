"""Plans for several hosts: memory and bytes by hand, and the network as a bound."""

import dataclasses

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.collectives import network_bytes
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.stated_machine import Stated, host_line, machine
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, Workload

MODEL = Workload.from_config(named_config("qwen3-8b"))
STRATEGY = Strategy(
    layers_per_chunk=1,
    rows_per_microbatch=4,
    num_microbatches=1,
    weight_route="shard_all_gather",
    num_host_devices=8,
)


def hosts(number: int, *, devices: int = 4, gb_per_s: float = 40.0):
    stated = Stated(network_gb_per_s=gb_per_s)
    return machine("h100", devices, stated, num_hosts=number)


def batch(number: int, devices: int = 4) -> BatchShape:
    """As many tokens for every device, however many there are."""
    return BatchShape(num_rows=4 * devices * number, seq_length=4096)


def on(number: int, strategy: Strategy = STRATEGY) -> Strategy:
    return dataclasses.replace(strategy, num_hosts=number)


def test_each_host_holds_its_share_of_the_state_and_of_waiting_gradients():
    one = memory_use(MODEL, batch(1), on(1), hosts(1)).host
    four = memory_use(MODEL, batch(4), on(4), hosts(4)).host
    for name in ("master_weights", "optimizer_state", "waiting_gradients"):
        assert four[name] == pytest.approx(one[name] / 4, rel=1e-3), name


def test_each_host_uploads_updates_and_downloads_its_share():
    one = chunk_durations(MODEL, batch(1), on(1), hosts(1))
    four = chunk_durations(MODEL, batch(4), on(4), hosts(4))
    for alone, together in zip(one, four, strict=True):
        for name in ("upload_bytes", "download_bytes", "update_bytes"):
            expected = getattr(alone, name) / 4
            assert getattr(together, name) == pytest.approx(expected, rel=1e-3), name


def test_a_slow_network_is_waited_for_by_forward_and_backward():
    """Weights are gathered for either, 2 bytes; gradients are summed in backward, 4 of them."""
    fast, slow = (
        chunk_durations(MODEL, batch(2), on(2), hosts(2, gb_per_s=rate)) for rate in (1e6, 1.0)
    )
    size = MODEL.layers[0].num_parameters
    in_s = network_bytes(2 * size, 2) / 1e9
    assert network_bytes(2 * size, 2) == size
    layer = 2
    assert slow[layer].forward_s - fast[layer].forward_s == pytest.approx(in_s, rel=0.01)
    assert slow[layer].backward_s - fast[layer].backward_s == pytest.approx(3 * in_s, rel=0.02)


@pytest.mark.parametrize(
    ("devices", "changes", "layer", "embedding"),
    [
        (4, {}, 2 + 2 + 4, 2 + 4),
        (1, {}, 2 + 2 + 2, 2 + 4),
        (1, {"num_microbatches": 2}, 2 + 2 + 4, 2 + 4),
        (4, {"kept_chunks": 36}, 2 + 4, 2 + 4),
        (1, {"compute_dtype": "float32"}, 4 + 4 + 4, 4 + 4),
    ],
)
def test_bytes_into_each_host_by_hand(devices, changes, layer, embedding):
    """Per parameter, times (H - 1) / H.

    Weights for forward and, unless they stay, for backward; gradients in bf16 where one device per
    host makes them at once, but for an embedding's, which add up in fp32.
    """
    strategy = dataclasses.replace(on(4), **changes)
    found = chunk_durations(MODEL, batch(4, devices), strategy, hosts(4, devices=devices))
    for number, expected in ((0, embedding), (5, layer)):
        stage = MODEL.embed if number == 0 else MODEL.layers[4]
        into = expected * stage.num_parameters * 3 / 4
        assert found[number].network_bytes == pytest.approx(into, rel=1e-3)


def test_within_a_host_nothing_goes_through_the_network():
    assert network_bytes(1e9, 1) == 0
    assert chunk_durations(MODEL, batch(1), on(1), hosts(1, gb_per_s=1e-3)) == chunk_durations(
        MODEL, batch(1), on(1), hosts(1)
    )


def test_more_hosts_take_less_memory_each_and_give_more_tokens_per_second():
    plans = [plan(MODEL, batch(number), hosts(number)) for number in (1, 2, 8, 64)]
    speeds = [own.chosen.time.tokens_per_s for own in plans]
    assert speeds == sorted(speeds)
    for own, number in zip(plans, (1, 2, 8, 64), strict=True):
        assert own.strategy.num_hosts == number
        assert own.chosen.time.mfu < 1
        if number > 1:
            assert own.strategy.weight_route == "shard_all_gather"
            assert own.strategy.gradient_route == "reduce_scatter"
            assert own.strategy.vocab_slices == 1
    assert f"8 hosts of 4 x {plans[2].job.hardware.name}" in repr(plans[2])


def test_a_model_that_one_host_cannot_hold_fits_two():
    job = {"resident_state": False}
    small = dataclasses.replace(hosts(1), host_memory_bytes=100 * 2**30)
    with pytest.raises(PlanError, match="host memory"):
        plan(MODEL, batch(1), small, **job)
    two = dataclasses.replace(small, num_hosts=2)
    assert plan(MODEL, batch(2), two, **job).chosen.memory.host_bytes < 100 * 2**30


@pytest.mark.parametrize(
    "choices", [Choices(weight_route="replicate"), Choices(gradient_route="host_sum")]
)
def test_routes_that_need_all_state_on_a_host_are_refused(choices):
    with pytest.raises(PlanError, match="each of 2 hosts has a share of the state alone"):
        plan(MODEL, batch(2), hosts(2), choices=choices)


def test_a_recorded_strategy_is_for_as_many_hosts():
    with pytest.raises(PlanError, match="is for 2 hosts, and there are 4"):
        plan(MODEL, batch(4), hosts(4), strategy=on(2))


@pytest.mark.parametrize(
    "changes",
    [{"weight_route": "replicate"}, {"gradient_route": "host_sum"}, {"vocab_slices": 2}],
)
def test_strategies_that_hosts_cannot_obey_do_not_exist(changes):
    with pytest.raises(ValueError, match="with num_hosts 2"):
        dataclasses.replace(on(2), **changes)


def test_the_host_line_names_the_network_where_there_is_one():
    assert host_line(hosts(2), ["network_gb_per_s"]).endswith(
        "40 GB/s from the other hosts (assumed; --network_gb_per_s)"
    )
    assert "other hosts" not in host_line(hosts(1))
