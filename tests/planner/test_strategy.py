from dataclasses import asdict

import pytest

from slidedp_jax.planner.strategy import Strategy

BASE = {"layers_per_chunk": 1, "rows_per_microbatch": 1, "num_microbatches": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_per_chunk": 0}, "layers_per_chunk is 0; it must be a whole number, at least 1"),
        ({"resident_chunks": 1.5}, "resident_chunks is 1.5; .*whole number, at least 0"),
        ({"kept_chunks": -1}, "kept_chunks is -1; .*at least 0"),
        ({"block_size": "64"}, "block_size is '64'"),
        ({"weight_route": "relay"}, "'relay'; allowed: replicate, shard_all_gather"),
        ({"update_policy": "lazy"}, "'lazy'; allowed: eager, deferred"),
        ({"compute_dtype": "float16"}, "allowed: bfloat16, float32"),
    ],
)
def test_wrong_values_say_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        Strategy(**(BASE | change))


def test_bytes_follow_the_compute_dtype():
    half, full = Strategy(**BASE), Strategy(**BASE, compute_dtype="float32")
    assert (half.compute_bytes, half.upload_bytes, half.gradient_bytes) == (2, 2, 2)
    assert (full.compute_bytes, full.upload_bytes, full.gradient_bytes) == (4, 4, 4)


def test_a_device_holds_what_is_prefetched_and_two_chunks_more():
    assert [Strategy(**BASE, prefetch_depth=depth).weight_slots for depth in (1, 2)] == [3, 4]
    with pytest.raises(TypeError, match="weight_slots"):
        Strategy(**BASE, weight_slots=3)


def test_what_an_earlier_version_recorded_is_read():
    whole = Strategy(**BASE, prefetch_depth=2, kept_chunks=3)
    assert Strategy.recorded(asdict(whole)) == whole
    assert Strategy.recorded(asdict(whole) | {"weight_slots": 16}) == whole
    assert Strategy.recorded(BASE) == Strategy(**BASE)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (BASE | {"waves": 2}, r"\['waves'\], which this version lacks"),
        ({"layers_per_chunk": 1}, "not whole.*rows_per_microbatch"),
        (BASE | {"prefetch_depth": 0}, "prefetch_depth is 0"),
    ],
)
def test_a_record_that_is_no_strategy_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        Strategy.recorded(record)
