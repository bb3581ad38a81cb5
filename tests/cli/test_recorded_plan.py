"""What decides the last bits of a run is what its folder says, not a search made again."""

import json
import re

import pytest
from runs import differing, losses, state

import slidedp_jax.planner.candidates
import slidedp_jax.this_machine
from slidedp_jax.planner.host_memory import HostMemory, MemoryBound
from slidedp_jax.train import main

FREE = {"layers_per_chunk": "null", "rows_per_microbatch": "null", "max_steps": 4}


def chosen(out):
    return json.loads((out / "run.json").read_text())["plan"]["chosen"]["strategy"]


@pytest.fixture
def another_search(monkeypatch):
    """Whatever is searched from now on ends with two layers per chunk."""
    monkeypatch.setattr("slidedp_jax.planner.candidates._chunk_sizes", lambda *_: [2])


def test_a_resumed_run_takes_its_own_plan(inputs, tmp_path, capsys, another_search, monkeypatch):
    out = tmp_path / "run"
    inputs.train(out, **FREE | {"max_steps": 2})
    assert chosen(out)["layers_per_chunk"] == 2
    monkeypatch.undo()
    straight = tmp_path / "straight"
    capsys.readouterr()
    inputs.train(tmp_path / "fresh", dry_run=True, verbose=True, **FREE)
    found = re.search(r"layers_per_chunk +(\d+)", capsys.readouterr().out)
    assert int(found[1]) != 2  # the search finds something else by itself
    inputs.train(out, **FREE)
    assert chosen(out)["layers_per_chunk"] == 2
    assert "planned anew" not in capsys.readouterr().out
    inputs.train(straight, plan_from=out / "run.json", **FREE)
    assert losses(out) == losses(straight)
    assert differing(state(out, 4), state(straight, 4)) == []


@pytest.mark.thorough
def test_the_checkpoints_own_plan_counts_not_that_of_a_start_that_came_to_nothing(
    inputs, tmp_path, another_search, monkeypatch
):
    out = tmp_path / "run"
    inputs.train(out, **FREE | {"max_steps": 2})
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr("slidedp_jax.trainer.Trainer.step", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(inputs.command(out, **FREE | {"layers_per_chunk": 1}))
    assert chosen(out)["layers_per_chunk"] == 1
    inputs.train(out, **FREE)
    assert chosen(out)["layers_per_chunk"] == 2


def test_a_run_without_a_checkpoint_starts_again_by_its_plan(
    inputs, tmp_path, another_search, monkeypatch
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("slidedp_jax.trainer.Trainer.step", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(inputs.command(out, **FREE))
    monkeypatch.undo()
    inputs.train(out, **FREE)
    assert chosen(out)["layers_per_chunk"] == 2


@pytest.mark.thorough
def test_what_decides_plans_may_be_changed_and_that_is_said(
    inputs, tmp_path, capsys, another_search, monkeypatch
):
    out = tmp_path / "run"
    inputs.train(out, **FREE | {"max_steps": 2})
    monkeypatch.undo()
    inputs.train(out, host_memory_budget=3, **FREE)
    said = capsys.readouterr().out
    assert "planned anew" in said and "host_memory_budget was None, now 3.0" in said
    assert chosen(out)["layers_per_chunk"] != 2


def memory(gib):
    bound = MemoryBound(name="a test", limit_bytes=int(gib * 2**30), used_bytes=0)
    return lambda **_: HostMemory(bounds=(bound,))


@pytest.mark.thorough
def test_a_plan_that_no_longer_fits_is_not_taken_in_silence(inputs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    inputs.train(out, **FREE | {"max_steps": 2})
    need = json.loads((out / "run.json").read_text())["plan"]["chosen"]["memory"]["host_bytes"]
    with monkeypatch.context() as patch:
        patch.setattr(slidedp_jax.this_machine, "available_host_memory", memory(need / 2**30 / 2))
        capsys.readouterr()
        assert main(inputs.command(out, **FREE)) == 1
        error = capsys.readouterr().err
        assert "does not fit" in error and "host memory: needs" in error and "budget" in error
        patch.setattr(
            slidedp_jax.this_machine, "available_host_memory", memory(need / 2**30 / 1.02)
        )
        inputs.train(out, **FREE)
        assert "can be had now: it must not become less" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_kernel_form_that_is_recorded_is_kept(inputs, tmp_path, monkeypatch):
    out, straight = tmp_path / "run", tmp_path / "straight"
    with monkeypatch.context() as patch:
        patch.setattr("slidedp_jax.update.part_updates.kernel_form", lambda *_: "blocked")
        inputs.train(out, max_steps=2)
        inputs.train(straight, max_steps=4)
    inputs.train(out, max_steps=4)
    assert json.loads((out / "run.json").read_text())["kernel_form"] == "blocked"
    assert differing(state(out, 4), state(straight, 4)) == []


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"plan": {"chosen": {"strategy": {}}}}'])
def test_a_file_without_a_plan_is_refused(inputs, tmp_path, capsys, content):
    (tmp_path / "other.json").write_text(content)
    words = inputs.command(tmp_path / "run", plan_from=tmp_path / "other.json")
    assert main(words) == 1
    assert "other.json holds no plan" in capsys.readouterr().err
    assert main(inputs.command(tmp_path / "run", plan_from="nowhere.json")) == 1


def test_a_plan_for_other_devices_is_refused(inputs, tmp_path, capsys):
    out = tmp_path / "run"
    inputs.train(out, max_steps=1)
    record = json.loads((out / "run.json").read_text())
    record["planned_for"]["device_kind"] = "NVIDIA H200"
    (tmp_path / "other.json").write_text(json.dumps(record))
    assert main(inputs.command(tmp_path / "new", plan_from=tmp_path / "other.json")) == 1
    assert "device_kind was 'NVIDIA H200', now 'cpu'" in capsys.readouterr().err


def test_a_plan_of_an_earlier_version_is_taken(inputs, tmp_path, capsys):
    out, again = tmp_path / "run", tmp_path / "again"
    inputs.train(out, max_steps=1)
    record = json.loads((out / "run.json").read_text())
    strategy = record["plan"]["chosen"]["strategy"]
    strategy["weight_slots"] = 16  # a field once
    (tmp_path / "older.json").write_text(json.dumps(record))
    inputs.train(again, max_steps=1, plan_from=tmp_path / "older.json")
    assert chosen(again) == chosen(out)
    strategy["waves"] = 2
    (tmp_path / "newer.json").write_text(json.dumps(record))
    assert main(inputs.command(tmp_path / "new", plan_from=tmp_path / "newer.json")) == 1
    refused = "newer.json holds no plan (the recorded strategy has ['waves'], which"
    assert refused in capsys.readouterr().err
