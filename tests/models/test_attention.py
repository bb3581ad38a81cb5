import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slidedp_jax.models.attention import (
    ComputeTarget,
    cudnn_documents,
    device_target,
    resolve_attention,
    row_layout,
)

HOPPER = ComputeTarget(platform="cuda", compute_capability=9.0)
AMPERE = ComputeTarget(platform="cuda", compute_capability=8.0)
CPU = ComputeTarget(platform="cpu")


def resolve(requested="auto", **changes):
    options = {"target": HOPPER, "dtype": jnp.bfloat16, "head_dim": 128, "rows": "whole"}
    return resolve_attention(requested, **(options | changes))


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "cudnn", "bfloat16 on cuda, head_dim 128, whole rows"),
        ({"rows": "documents"}, "cudnn", "documents rows"),
        ({"head_dim": 256}, "cudnn", "head_dim 256"),
        ({"target": AMPERE}, "cudnn", "on cuda"),
        ({"target": CPU}, "chunked", "the platform is cpu"),
        ({"dtype": jnp.float32}, "chunked", "the dtype is float32"),
        ({"head_dim": 100}, "chunked", "head_dim is 100"),
        ({"head_dim": 256, "target": AMPERE}, "chunked", "multiples of 8 up to 128"),
        ({"rows": "segments"}, "chunked", "without document_starts"),
        ({"rows": "documents", "target": AMPERE}, "chunked", "compute capability 9.0"),
    ],
)
def test_auto_takes_cudnn_wherever_it_can_run(changes, name, reason):
    choice = resolve(**changes)
    assert choice.name == name
    assert reason in choice.reason


def test_an_impossible_wish_is_an_error_with_every_obstacle():
    with pytest.raises(ValueError, match=r"platform is cpu.*dtype is float32.*head_dim is 100"):
        resolve("cudnn", target=CPU, dtype=jnp.float32, head_dim=100)
    with pytest.raises(ValueError, match="'flash'; supported: 'auto', 'chunked', 'cudnn'"):
        resolve("flash")
    assert resolve("chunked").name == "chunked"


def test_row_layout_is_read_off_the_batch():
    assert row_layout({"input_ids": 0}) == "whole"
    assert row_layout({"segment_ids": 0}) == "segments"
    assert row_layout({"segment_ids": 0, "document_starts": 0, "document_lengths": 0}) == (
        "documents"
    )


def test_this_device_is_described():
    device = jax.devices("cpu")[0]
    assert device_target(device) == ComputeTarget(platform="cpu", device_kind=device.device_kind)


def test_offsets_are_given_only_where_a_document_is():
    starts = jnp.asarray([[0, 3, 8, 8], [2, 10, 10, 10], [0, 0, 0, 0]], jnp.int32)
    lengths = jnp.asarray([[3, 5, 0], [8, 0, 0], [0, 0, 0]], jnp.int32)
    got_starts, got_lengths = cudnn_documents(starts, lengths)
    np.testing.assert_array_equal(got_starts, [[0, 3, -1, -1], [2, -1, -1, -1], [-1] * 4])
    np.testing.assert_array_equal(got_lengths, [[3, 5, -1], [8, -1, -1], [-1] * 3])
    # What matters to cuDNN: joined over the rows, offsets and lengths pair up one to one.
    assert (got_starts >= 0).sum() == (got_lengths >= 0).sum() == 3


def test_a_single_document_column_becomes_two():
    starts, lengths = cudnn_documents(
        jnp.asarray([[4, 9]], jnp.int32), jnp.asarray([[5]], jnp.int32)
    )
    np.testing.assert_array_equal(starts, [[4, -1, -1]])
    np.testing.assert_array_equal(lengths, [[5, -1]])
