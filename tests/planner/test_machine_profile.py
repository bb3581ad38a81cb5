"""Files of measured profiles: written and read, compared with a machine, and planned with."""

import json
from dataclasses import asdict, replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.command import main
from slidedp_jax.planner.comparison import main as compare
from slidedp_jax.planner.hardware import GIB, HardwareProfile, LinkRate
from slidedp_jax.planner.machine_facts import machine_facts
from slidedp_jax.planner.machine_profile import (
    AUTO,
    FORMAT,
    Machine,
    differences,
    hardware_record,
    named_profile,
    profiles_folder,
    read_profile,
)
from slidedp_jax.planner.presets import PRESETS, named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.step_time import step_time
from slidedp_jax.planner.workload import BatchShape, Workload

MACHINE = Machine(
    device_kind="NVIDIA H200",
    num_devices=2,
    driver="580.1",
    versions={"jax": "0.11.2"},
    processor="Xeon",
    num_cores=32,
    memory_limits={"physical memory": 256 * GIB, "control group /a": 200 * GIB},
    numa_nodes={"node0": "0-31"},
)


def write(path, measured: HardwareProfile, **changes) -> str:
    """As `slidedp measure` writes it, without what plans do not read."""
    record = {
        "format": FORMAT,
        "date": "2026-12-01T10:00:00+00:00",
        "machine": asdict(MACHINE),
        "hardware": hardware_record(measured),
        "assumed": {"peak_flops_per_s": "preset"},
    }
    path.write_text(json.dumps(record | changes))
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_again(tmp_path, name):
    found = read_profile(write(tmp_path / "p.json", PRESETS[name]))
    assert found.hardware == PRESETS[name]
    assert found.machine == MACHINE
    assert found.assumed == {"peak_flops_per_s": "preset"}
    assert json.loads(json.dumps(found.identity()))["hardware"]["name"] == name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": FORMAT + 1}, "is of form"),
        ({"hardware": {}}, "it lacks 'h2d'"),
        ({"machine": {"cores": 3}}, "num_cores|cores"),
        ({"hardware": hardware_record(PRESETS["h200"]) | {"warp_speed": 9}}, "warp_speed"),
        ({"hardware": hardware_record(PRESETS["h200"]) | {"copy_gap_s": float("nan")}}, "nan"),
        *(
            ({"hardware": hardware_record(PRESETS["h200"]) | {name: value}}, f"{name} is {value!r}")
            for name, value in (
                ("num_devices", 0),
                ("num_devices", 1.5),
                ("num_host_cores", True),
                ("peer_access", 1),
                ("step_end_s", -1),
                ("host_reserve_bytes", -1.0),
                ("duplex_bytes_per_s", "fast"),
                ("gather_bytes_per_s", None),
                ("host_memory_bytes", 0),
                ("stated_pinned_limit_bytes", 0),
            )
        ),
    ],
)
def test_what_is_no_profile_is_refused_by_name(tmp_path, changes, why):
    path = write(tmp_path / "p.json", PRESETS["h200"], **changes)
    with pytest.raises(ValueError, match=rf"p\.json is no profile.*({why})"):
        read_profile(path)


def test_a_missing_file_and_one_that_is_cut(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read .*slidedp measure --out"):
        read_profile(tmp_path / "none.json")
    path = tmp_path / "p.json"
    whole = (tmp_path / write(path, PRESETS["h200"])).read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"is no profile"):
        read_profile(path)


def test_the_same_machine_does_not_differ_and_each_change_is_said():
    assert differences(MACHINE, MACHINE) == []
    for change, said in (
        ({"device_kind": "NVIDIA H100 PCIe"}, "device: measured with NVIDIA H200"),
        ({"driver": "590"}, "driver: measured with 580.1, here 590"),
        ({"versions": {"jax": "0.12.0"}}, "jax: measured with 0.11.2, here 0.12.0"),
        ({"versions": {}}, "jax: measured with 0.11.2, here none"),
        ({"num_cores": 8}, "cores: measured with 32, here 8"),
        ({"memory_limits": {"control group /a": 64 * GIB}}, "200.0 GiB, here 64.0 GiB"),
    ):
        (line,) = differences(MACHINE, replace(MACHINE, **change))
        assert said in line
    # Another group's name with the same limit is no difference.
    assert differences(MACHINE, replace(MACHINE, memory_limits={"b": 200 * GIB})) == []


def test_auto_is_the_one_that_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="no machine has been measured here"):
        named_profile(AUTO, MACHINE)
    profiles_folder().mkdir(parents=True)
    write(profiles_folder() / MACHINE.file_name, PRESETS["h200"])
    own = "nvidia-h200-x2-32-cores.json"
    assert named_profile(AUTO, MACHINE).source.endswith(own)
    other = replace(MACHINE, num_cores=16)
    assert named_profile(AUTO, other).source.endswith(own)  # the only one: `plan` says which
    write(profiles_folder() / "other.json", PRESETS["h100"], machine=asdict(other))
    assert named_profile(AUTO, MACHINE).source.endswith(own)
    assert named_profile(AUTO, other).source.endswith("other.json")
    with pytest.raises(ValueError, match=r"several.*x2-32-cores\.json.*other\.json"):
        named_profile(AUTO, replace(MACHINE, num_cores=8))
    one = replace(MACHINE, num_devices=1)
    write(profiles_folder() / one.file_name, PRESETS["h200"], machine=asdict(one))
    (profiles_folder() / "earlier.json").write_text('{"format": 0}')
    assert named_profile(AUTO, MACHINE).source.endswith(own)
    assert named_profile(AUTO, one).source.endswith(one.file_name)


def test_whether_the_automatic_one_is_of_this_machine_is_always_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profiles_folder().mkdir(parents=True)
    path = profiles_folder() / "p.json"
    job = ["--preset", "qwen3-0.6b", "--tokens_per_step", "8192", "--hardware_profile"]
    here = replace(machine_facts(), num_devices=7)
    for machine, said in (
        (here, "measured on this machine"),
        (MACHINE, "processor: measured with"),
    ):
        write(path, PRESETS["h200"], machine=asdict(machine))
        for command in (main, compare):
            assert command([*job, AUTO]) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert said in text and ("was not measured on this machine" in text) == (
                machine is MACHINE
            )
            assert command([*job, str(path)]) == 0  # named on purpose
            assert "this machine" not in capsys.readouterr().out


def slow_link(hardware: HardwareProfile) -> HardwareProfile:
    def half(link: LinkRate) -> LinkRate:
        return LinkRate(points=tuple((size, rate / 2) for size, rate in link.points))

    return replace(
        hardware,
        h2d=half(hardware.h2d),
        d2h=half(hardware.d2h),
        duplex_bytes_per_s=hardware.duplex_bytes_per_s / 2,
    )


def slow_update(hardware: HardwareProfile) -> HardwareProfile:
    return replace(hardware, host_update_params_per_s=hardware.host_update_params_per_s / 3)


@pytest.mark.parametrize("change", [slow_link, slow_update])
def test_other_rates_change_the_strategy_as_the_simulation_says(tmp_path, change):
    """Two GPUs that stream all state: with either change, gathering weights becomes the faster."""
    workload = Workload.from_config(named_config("qwen3-1.7b"))
    batch = BatchShape(num_rows=8, seq_length=4096)
    asked = {"resident_state": False, "keep_activations": False, "update_policy": "eager"}
    usual = named_hardware("h200", num_devices=2)
    before = plan(workload, batch, usual, **asked)
    measured = read_profile(write(tmp_path / "p.json", change(usual))).hardware
    after = plan(workload, batch, measured, **asked)
    assert before.strategy.weight_route == "replicate"
    assert after.strategy.weight_route == "shard_all_gather"
    # On the slower machine the former strategy is the slower one, and on the usual one the new.
    former = step_time(workload, batch, before.strategy, measured).step_s
    assert after.chosen.time.step_s < 0.95 * former
    assert step_time(workload, batch, after.strategy, usual).step_s >= before.chosen.time.step_s
    # The forecast is slower by no more than what got slower.
    slower = after.chosen.time.step_s / before.chosen.time.step_s
    assert 1.02 < slower < (2 if change is slow_link else 3)


def test_the_plan_command_takes_a_profile(tmp_path, capsys):
    job = ["--preset", "qwen3-0.6b", "--tokens_per_step", "8192", "--json"]
    path = write(tmp_path / "p.json", slow_update(named_hardware("h200", num_devices=2)))
    assert main([*job, "--hardware_profile", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["num_devices"] == 2
    assert found["hardware"]["host_update_params_per_s"] == pytest.approx(
        named_hardware("h200", num_devices=2).host_update_params_per_s / 3
    )
    assert found["assumed"] == []
    assert any("assumed: peak_flops_per_s" in note for note in found["notes"])
    said = f"rates as measured on 2026-12-01 with 2 x NVIDIA H200 and 32 cores ({path})"
    assert said in found["notes"]
    assert compare([*job, "--hardware_profile", path]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_devices"] == 2 and said in row["notes"]
    more = ["--num_devices", "1", "4", "--host_memory_gib", "3"]
    assert compare([*job, "--hardware_profile", path, *more]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["num_devices"] for row in rows] == [1, 4]
    for row in rows:
        assert "has 3.00 GiB" in row["reason"]
        assert any("was measured with 2 devices" in note for note in row["notes"])
    assert main([*job, "--hardware_profile", path, "--num_devices", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("was measured with 2 devices" in note for note in found["notes"])
    assert main([*job, "--hardware_profile", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*job, "--hardware_profile", path, "--hardware", "h200"])


def test_what_does_not_fit_a_profile_is_told_what_would(tmp_path, capsys):
    path = write(tmp_path / "p.json", named_hardware("h200", num_devices=2))
    job = ["--preset", "qwen2.5-72b", "--tokens_per_step", "32768", "--hardware_profile", path]
    assert main([*job, "--json"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways_out"]
    assert any(way.endswith("(--num_devices 8)") for way in ways)
