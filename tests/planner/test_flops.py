"""Counts checked by hand."""

import pytest

from slidedp_jax.planner.flops import (
    attention_forward_flops,
    attention_pairs,
    matmul_forward_flops,
    row_pairs,
    utilization,
)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_pairs_equal_a_mask_counted_cell_by_cell(length, window):
    mask = [(q, k) for q in range(length) for k in range(q + 1) if window is None or q - k < window]
    assert attention_pairs(length, window) == len(mask)


def test_packed_documents_do_not_see_each_other():
    assert row_pairs(1024) == 1024 * 1025 // 2
    assert row_pairs(1024, [256] * 4) == 4 * 256 * 257 // 2
    assert row_pairs(1024, [256] * 3) == 3 * 256 * 257 // 2  # the rest is padding
    with pytest.raises(ValueError, match="do not fit a row of 8"):
        row_pairs(8, [5, 4])


def test_operations_of_one_layer_by_hand():
    # 3 tokens through a 2x5 matrix: 3*2*5 multiply-adds.
    assert matmul_forward_flops(3, 10) == 2 * 3 * 2 * 5
    # 3 causal tokens: 6 pairs; 2 heads of 4: a dot product of 4 and 4 weighted values per pair.
    assert attention_forward_flops(attention_pairs(3), 2, 4) == 6 * 2 * (2 * 4 + 2 * 4)


def test_utilization_is_constant_at_equal_work_per_device():
    one = utilization(8e12, 1.0, 1, 100e12)
    assert one == pytest.approx(0.08)
    for devices in (2, 4, 8):
        assert utilization(8e12 * devices, 1.0, devices, 100e12) == pytest.approx(one)
