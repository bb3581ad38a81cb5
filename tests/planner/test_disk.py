"""Room for checkpoints and export."""

import pytest

from slidedp_jax.planner.disk import COPY_BYTES_PER_S, disk_use, stall_s
from slidedp_jax.planner.hardware import GIB


def test_checkpoints_are_whole_before_one_goes():
    use = disk_use(2**30, 8)
    assert use.total_bytes == (3 * 12 + 2) * GIB
    assert use.describe() == (
        "38.00 GiB: 3 checkpoints of 12.00 GiB (2 kept, one being written) and 2.00 GiB of export"
    )
    one = disk_use(2**30, 4, save_total_limit=1, export_dtype="float32", averaged=True)
    assert one.total_bytes == (2 * 8 + 2 * 4) * GIB


def test_a_save_holds_steps_up_for_what_does_not_fit_while_a_step_runs():
    """42 GB through 14 to a disk of 2 GB/s: 1 s of copies and 14 s of writes, 2 within a step."""
    assert COPY_BYTES_PER_S == 14e9
    assert stall_s(42e9, 14e9, 2e9, 2.0) == 13.0
    assert stall_s(42e9, 14e9, 2e9, 30.0) == 0.0
    assert stall_s(42e9, 50e9, 2e9, 0.0) == 3.0
    assert stall_s(42e9, 50e9, 2e9, 5.0) == 0.0


def test_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="save_total_limit is 0"):
        disk_use(1, 8, save_total_limit=0)
