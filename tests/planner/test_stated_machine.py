"""Presets with what is known better."""

from dataclasses import replace

import pytest

from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.presets import PRESETS, named_hardware
from slidedp_jax.planner.process_limits import usable_device_bytes
from slidedp_jax.planner.stated_machine import Stated, host_line, machine, with_stated

NOTHING = Stated()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_devices", [1, 4])
def test_with_nothing_stated_it_is_the_preset(name, num_devices):
    assert machine(name, num_devices, NOTHING) == named_hardware(name, num_devices=num_devices)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H200", "h200"),
        ("L40S", "l40s"),
    ],
)
def test_spellings(spelling, name):
    assert machine(spelling, 1, NOTHING) == PRESETS[name]


@pytest.mark.parametrize(("name", "near"), [("rtx4080", "rtx4090"), ("a100", "a100-80g")])
def test_an_unknown_one_is_refused_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=rf"named '{name}'; known: .*nearest by name: .*{near}"):
        machine(name, 1, NOTHING)
    with pytest.raises(ValueError, match=r"rtx5090\.$"):  # none is near
        machine("tpu v5e-256 pod", 1, NOTHING)


def test_memory_of_host_and_devices():
    found = machine("rtx4090", 2, Stated(host_memory_gib=64, device_memory_gib=48))
    reserve = PRESETS["rtx4090"].device_reserve_bytes
    assert found.host_memory_bytes == 64 * GIB
    assert found.device_memory_bytes == usable_device_bytes(48 * GIB, reserve)
    assert found.pinned_pool_limit_bytes == 38 * GIB


def test_each_way_of_a_link_gets_the_rate_that_is_stated():
    preset = PRESETS["gh200"]
    assert "369 GB/s to each GPU and 293 GB/s back" in host_line(preset)
    found = machine("gh200", 1, Stated(link_gb_per_s=100))
    assert found.h2d.points[-1][1] == found.d2h.points[-1][1] == pytest.approx(100e9)
    up, down = preset.h2d.points[-1][1], preset.d2h.points[-1][1]
    assert found.duplex_bytes_per_s / 200e9 == pytest.approx(
        preset.duplex_bytes_per_s / (up + down)
    )
    assert "100 GB/s to each GPU and back" in host_line(found)


def test_a_limit_of_the_pool_goes_with_the_memory_it_was_of():
    limited = replace(PRESETS["h200"], stated_pinned_limit_bytes=9 * GIB)
    assert limited.with_devices(1) == limited
    assert limited.with_devices(2).stated_pinned_limit_bytes is None
    assert with_stated(limited, Stated(host_cores=4)).pinned_pool_limit_bytes == 9 * GIB
    found = with_stated(limited, Stated(host_memory_gib=64))
    assert found.pinned_pool_limit_bytes == 38 * GIB


def test_cores_and_the_update():
    preset = PRESETS["rtx4090"]
    rates = [
        machine("rtx4090", 1, Stated(host_cores=cores)).host_update_params_per_s
        for cores in (4, 8, 16, 64)
    ]
    own = preset.host_update_params_per_s
    assert rates == pytest.approx([own / 4, own / 2, own, own * 2])  # 64: as measured, the root
    assert machine("rtx4090", 1, Stated(host_cores=4)).num_host_cores == 4


def test_a_link_changes_what_goes_over_it():
    preset = PRESETS["rtx4090"]
    half = machine("rtx4090", 2, Stated(link_gb_per_s=12.5))
    last, rate = half.h2d.points[-1]
    assert rate == pytest.approx(12.5e9) and last == preset.h2d.points[-1][0]
    one = half.h2d.seconds(4 * GIB)
    assert one == pytest.approx(preset.h2d.seconds(4 * GIB) * preset.h2d.points[-1][1] / 12.5e9)
    assert half.duplex_bytes_per_s / preset.duplex_bytes_per_s == pytest.approx(
        half.gather_bytes_per_s / preset.gather_bytes_per_s  # through the host
    )
    nvlink = machine("h100", 2, Stated(link_gb_per_s=25))
    assert nvlink.gather_bytes_per_s == PRESETS["h100"].gather_bytes_per_s
    other = replace(nvlink, h2d=PRESETS["h100"].h2d, d2h=PRESETS["h100"].d2h)
    assert replace(other, duplex_bytes_per_s=PRESETS["h100"].duplex_bytes_per_s) == named_hardware(
        "h100", num_devices=2
    )


@pytest.mark.parametrize("name", Stated.__dataclass_fields__)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_is_no_size_is_refused(name, value):
    with pytest.raises(ValueError, match=f"--{name} is .*above 0"):
        Stated(**{name: value})


def test_the_host_is_told_with_what_is_assumed():
    line = "host: 16 cores, 120.00 GiB, 25 GB/s to each GPU and back"
    profile = PRESETS["rtx4090"]
    assert host_line(profile) == line
    flags = "--host_cores, --host_memory_gib, --link_gb_per_s"
    assert host_line(profile, Stated.__dataclass_fields__) == f"{line} (assumed; {flags})"
    assert host_line(profile, ["host_cores"]) == f"{line} (assumed; --host_cores)"
    assert "GB/s" not in host_line(PRESETS["cpu"])
