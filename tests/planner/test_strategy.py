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
        ({"prefetch_depth": 2}, "weight_slots is 3 with prefetch_depth 2.*need 4"),
    ],
)
def test_wrong_values_say_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        Strategy(**(BASE | change))


def test_bytes_follow_the_compute_dtype():
    half, full = Strategy(**BASE), Strategy(**BASE, compute_dtype="float32")
    assert (half.compute_bytes, half.upload_bytes, half.gradient_bytes) == (2, 2, 2)
    assert (full.compute_bytes, full.upload_bytes, full.gradient_bytes) == (4, 4, 4)
