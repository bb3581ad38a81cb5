"""Link times and presets."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.cards import CARDS, HOSTS
from slidedp_jax.planner.hardware import GIB, MIB, LinkRate
from slidedp_jax.planner.presets import (
    _PRESET_OF_KIND,
    PRESETS,
    named_hardware,
    preset_of_kind,
    profile_of_kind,
)
from slidedp_jax.planner.report import notes, plan_as_text
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.workload import BatchShape, Workload

H200 = PRESETS["h200"]
GPUS = [(name, profile) for name, profile in PRESETS.items() if name != "cpu"]


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


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("cpu", "cpu"),
    ],
)
def test_devices_as_jax_names_them(kind, preset):
    profile = profile_of_kind(kind)
    assert profile.name == kind
    assert profile.provenance == f"{PRESETS[preset].provenance} (preset {preset})"
    assert replace(profile, name=preset, provenance=PRESETS[preset].provenance) == PRESETS[preset]
    assert preset_of_kind(kind) is PRESETS[preset]


@pytest.mark.parametrize(
    ("kind", "assumed", "why"),
    [
        ("NVIDIA GH200 144G HBM3e", "gh200", "the nearest there is"),
        ("NVIDIA H200 NVL", "h200", "the nearest there is"),
        ("NVIDIA GB200", "b200", "the nearest there is"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g", "the nearest there is"),
        ("NVIDIA A100 80GB PCIe", "a100-80g", "the nearest there is"),
        ("NVIDIA H100 NVL", "h100-pcie", "the nearest there is"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090", "the nearest there is"),
        # Another chip than the A10, and half of an L40S.
        ("NVIDIA A10G", "h100", "though none is near, so they may be far off"),
        ("NVIDIA L40", "h100", "though none is near, so they may be far off"),
        ("Tesla V100-SXM2-16GB", "h100", "though none is near, so they may be far off"),
    ],
)
def test_of_other_devices_it_is_said_what_was_assumed(kind, assumed, why):
    profile = profile_of_kind(kind)
    assert preset_of_kind(kind) is None
    assert profile.provenance == f"rates of preset {assumed} are assumed, {why}; not measured"
    assert profile.bf16_matmul_flops_per_s == PRESETS[assumed].bf16_matmul_flops_per_s
    found = plan(
        Workload.from_config(named_config("qwen3-0.6b")),
        BatchShape(num_rows=1, seq_length=1024),
        profile,
    )
    assert profile.provenance in plan_as_text(found).splitlines()[1]
    (note,) = (note for note in notes(found) if kind in note)
    assert "are not measured: expect larger errors" in note


def test_every_preset_is_that_of_a_device():
    """None is out of reach of the device that it describes."""
    assert set(_PRESET_OF_KIND.values()) == set(PRESETS)
    assert [name for name, one in PRESETS.items() if one.provenance.startswith("measured")] == [
        "h200"
    ]


def test_derived_rates_follow_the_data_sheet_as_measured_on_h200():
    share = {name: one.bf16_matmul_flops_per_s / one.peak_flops_per_s for name, one in GPUS}
    assert share == pytest.approx({name: 700 / 989 for name, _ in GPUS})
    # An eighth of an H100's peak.
    assert PRESETS["h100"].peak_flops_per_s / PRESETS["l4"].peak_flops_per_s > 8


def test_what_passes_between_gpus_without_peer_access_goes_through_the_host():
    for name, profile in GPUS:
        assert profile.peer_access is not name.startswith("rtx")
        assert (profile.gather_bytes_per_s < profile.h2d.points[-1][1] / 2) is not (
            profile.peer_access
        )
    assert PRESETS["gh200"].h2d.points[-1][1] > 6 * H200.h2d.points[-1][1]


def test_a_host_has_no_more_memory_bandwidth_than_its_sockets():
    # Two sockets of DDR5-4800 have 614 GB/s on paper, where eight shares of one GPU would be 864.
    assert named_hardware("h200", num_devices=4).host_memory_bytes_per_s == 4 * 108e9
    assert named_hardware("h200", num_devices=8).host_memory_bytes_per_s == 490e9


def test_every_figure_of_a_card_and_its_host_has_a_source():
    assert {*CARDS} == {name for name, _ in GPUS} == {*HOSTS, "h200"}
    for one in (*CARDS.values(), *HOSTS.values()):
        assert len(one.source) > 10
