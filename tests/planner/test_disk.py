"""Room for checkpoints and export."""

import pytest

from slidedp_jax.planner.disk import disk_use
from slidedp_jax.planner.hardware import GIB


def test_checkpoints_are_whole_before_one_goes():
    use = disk_use(2**30, 8)
    assert use.total_bytes == (3 * 12 + 2) * GIB
    assert use.describe() == (
        "38.00 GiB: 3 checkpoints of 12.00 GiB (2 kept, one being written) and 2.00 GiB of export"
    )
    one = disk_use(2**30, 4, save_total_limit=1, export_dtype="float32", averaged=True)
    assert one.total_bytes == (2 * 8 + 2 * 4) * GIB


def test_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="save_total_limit is 0"):
        disk_use(1, 8, save_total_limit=0)
