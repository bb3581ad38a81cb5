"""Link times and presets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidedp_jax.planner.hardware import (
    GIB,
    MIB,
    PRESETS,
    LinkRate,
    named_hardware,
    preset_of_kind,
)

H200 = PRESETS["h200"]


def test_measured_sizes_are_reproduced():
    # 15 GiB/s at 4 MiB, 41 at 64 MiB.
    assert H200.h2d.seconds(4 * MIB) == pytest.approx(4 / 1024 / 15)
    assert H200.h2d.seconds(64 * MIB) == pytest.approx(64 / 1024 / 41)
    assert H200.h2d.seconds(48.5 * GIB) == pytest.approx(1.0)
    assert H200.h2d.seconds(0) == 0.0


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.sampled_from(sorted(PRESETS)))
def test_more_bytes_never_take_less_time(a, b, name):
    link = PRESETS[name].h2d
    small, large = sorted((a, b))
    assert 0 <= link.seconds(small) <= link.seconds(large)


def test_one_measured_size_is_a_constant_rate():
    assert LinkRate(points=((100.0, 10.0),)).seconds(5) == pytest.approx(0.5)


@pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((2.0, 1.0), (1.0, 1.0)), ((1, 1), (2, 9))])
def test_impossible_links_are_refused(points):
    with pytest.raises(ValueError, match="link rate"):
        LinkRate(points=points)


def test_host_share_grows_with_the_devices():
    four = named_hardware("h200", num_devices=4)
    assert four.num_host_cores == 64
    assert four.host_memory_bytes == 4 * H200.host_memory_bytes
    assert four.device_memory_bytes == H200.device_memory_bytes
    assert four.with_devices(1) == H200


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"'h300'.*h200.*a100-80g"):
        named_hardware("h300")
    with pytest.raises(ValueError, match="at least one"):
        named_hardware("h200", num_devices=0)


def test_devices_as_jax_names_them():
    assert preset_of_kind("NVIDIA H200") == ("h200", True)
    assert preset_of_kind("cpu") == ("cpu", True)
    # Another device, whose figures nobody has measured.
    assert preset_of_kind("NVIDIA GH200 480GB") == ("h200", False)
    assert preset_of_kind("NVIDIA A100-PCIE-40GB") == ("a100-80g", False)
    assert preset_of_kind("NVIDIA L4") == ("h100", False)
