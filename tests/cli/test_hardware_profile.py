"""A run that plans with a measured profile: what it says, what it records, and its resumption."""

import json
from dataclasses import asdict, replace
from functools import partial

import pytest
from runs import differing, losses, state

from slidedp_jax import UserError, plan_for
from slidedp_jax.machine_here import machine_here
from slidedp_jax.models.config import named_config
from slidedp_jax.planner.machine_profile import FORMAT, hardware_record
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.report import notes
from slidedp_jax.process import current_setup
from slidedp_jax.this_machine import profile_path
from slidedp_jax.train import main

FREE = {"layers_per_chunk": "null", "rows_per_microbatch": "null"}


def write(path, *, driver=None, processor=None, **rates) -> str:
    """A profile of this machine with other rates."""
    machine = machine_here(current_setup().devices()[0])
    machine = replace(machine, driver=driver, processor=processor or machine.processor)
    hardware = replace(PRESETS["cpu"].with_devices(machine.num_devices), **rates)
    record = {
        "format": FORMAT,
        "date": "2026-12-01T10:00:00+00:00",
        "machine": asdict(machine),
        "hardware": hardware_record(replace(hardware, provenance="measured")),
        "assumed": {"peak_flops_per_s": "preset"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return str(path)


def test_the_forecast_follows_the_profile_and_the_run_records_it(inputs, tmp_path, capsys):
    slow = write(tmp_path / "slow.json", host_update_params_per_s=1e3)
    out = tmp_path / "run"
    inputs.train(out, hardware_profile=slow, max_steps=22, **FREE)
    said = capsys.readouterr().out
    assert "planned with rates measured on 2026-12-01" in said
    assert "not measured, but assumed: peak_flops_per_s" in said
    assert "is of another machine" not in said
    # A thousand parameters per second: the update is far faster, and that is the lane to name.
    assert said.count("forecast: 2") == 2  # after twenty steps, and of all at the end
    assert "; the optimizer on the CPU: " in said
    record = json.loads((out / "run.json").read_text())
    assert record["hardware_profile"]["file"] == slow
    assert record["hardware_profile"]["differences"] == []
    assert record["hardware_profile"]["hardware"]["host_update_params_per_s"] == 1e3
    assert record["plan"]["hardware"]["host_update_params_per_s"] == 1e3
    assert record["plan"]["chosen"]["time"]["busy_s"]["host_update"] > 10
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (forecast,) = (line for line in lines if "forecast" in line)
    assert forecast["step"] == 21
    assert forecast["forecast"]["steps"] == 20
    assert forecast["forecast"]["off_lane"] == "host_update"


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_plan_whatever_is_measured_by_then(inputs, tmp_path, capsys):
    out, straight = tmp_path / "run", tmp_path / "straight"
    first = write(tmp_path / "first.json")
    inputs.train(out, hardware_profile=first, max_steps=2, **FREE)
    before = json.loads((out / "run.json").read_text())["plan"]["chosen"]["strategy"]
    inputs.train(straight, plan_from=out / "run.json", max_steps=4, **FREE)
    capsys.readouterr()
    other = write(tmp_path / "other.json", fp32_matmul_flops_per_s=1.0, step_end_s=9.0)
    inputs.train(out, hardware_profile=other, max_steps=4, **FREE)
    assert "planned anew" not in capsys.readouterr().out
    record = json.loads((out / "run.json").read_text())
    assert record["plan"]["chosen"]["strategy"] == before
    assert record["hardware_profile"]["file"] == other
    assert losses(out) == losses(straight)
    assert differing(state(out, 4), state(straight, 4)) == []


def test_what_differs_is_said_and_that_a_profile_exists(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = write(tmp_path / "other.json", driver="580.1")
    inputs.train(tmp_path / "a", dry_run=True, hardware_profile=other)
    said = capsys.readouterr().out
    assert "is of another machine or set-up: driver: measured with 580.1, here None" in said
    write(profile_path())
    inputs.train(tmp_path / "b", dry_run=True)
    assert "--hardware_profile auto plans with it" in capsys.readouterr().out
    inputs.train(tmp_path / "c", dry_run=True, hardware_profile="auto")
    said = capsys.readouterr().out
    assert f"({profile_path()})" in said and "is of another machine" not in said


def test_a_plan_by_another_machines_rates_says_so(tmp_path):
    planned = partial(plan_for, named_config("tiny"), rows_per_step=8, tokens_per_row=16)
    own = planned(hardware_profile=write(tmp_path / "own.json"))
    assert own.job.hardware.provenance.startswith("measured; memory as found")
    assert not any("not measured" in note for note in notes(own))
    other = planned(hardware_profile=write(tmp_path / "other.json", processor="A toaster"))
    provenance = other.job.hardware.provenance
    assert provenance.startswith("rates of another machine, measured; processor: measured with A t")
    assert any("are not measured" in note for note in notes(other))


def test_a_profile_of_gpus_is_not_for_the_cpu(tmp_path):
    path = write(tmp_path / "gpu.json", unified_memory=False)
    with pytest.raises(UserError, match=r"gpu\.json is of GPUs .* cpu is a CPU device"):
        plan_for(named_config("tiny"), rows_per_step=8, tokens_per_row=16, hardware_profile=path)


def test_a_missing_profile_and_one_beside_another_machine_are_refused(inputs, tmp_path, capsys):
    assert main(inputs.command(tmp_path / "a", hardware_profile="nowhere.json")) == 1
    assert "nowhere.json cannot be read" in capsys.readouterr().err
    words = {"hardware_profile": "auto", "hardware": "h200", "dry_run": True}
    assert main(inputs.command(tmp_path / "b", **words)) == 2
    assert "give one of them" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
