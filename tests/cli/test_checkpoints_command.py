"""`slidedp checkpoints`: what there is, what it holds, whether it is whole, copies."""

import errno
import json
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from runs import checkpoints, state
from safetensors.numpy import load_file

from slidedp_jax.checkpoint.record import read_record
from slidedp_jax.checkpoints import main
from slidedp_jax.cli import main as slidedp
from slidedp_jax.train import main as train


@pytest.fixture
def run(straight, tmp_path):
    """A run of twelve steps, its last two checkpoints kept."""
    out = shutil.copytree(straight, tmp_path / "run")
    for path in (out / "checkpoints").iterdir():
        if path.name < "step_00000010":
            shutil.rmtree(path)
    return out


def test_the_checkpoints_of_a_run_are_listed(run, capsys):
    steps = checkpoints(run)
    assert slidedp(["checkpoints", "list", str(run)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["step", "size", "saved"]
    assert [int(line.split()[0]) for line in lines] == steps
    assert lines[-1].endswith(str(run / "checkpoints" / "step_00000012"))
    assert main(["list", str(run / "checkpoints"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == steps
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in logged if "loss" in record}
    assert [row["loss"] for row in rows] == [losses[step] for step in steps]
    (run / "checkpoints" / "step_00000012" / "trainer.json").write_text("{")
    assert main(["list", str(run)]) == 1
    said = capsys.readouterr()
    assert "damaged" in said.out and "trainer.json is damaged" in said.err


def test_what_a_checkpoint_holds_is_told(run, capsys):
    assert main(["inspect", str(run), "--arrays"]) == 0
    said = capsys.readouterr().out
    assert "step 12" in said and "ScaleByAdamState.mu" in said
    assert "model.layers.1: model.layers.1.mlp.up_proj.weight master: float32 48 x 32" in said
    assert main(["inspect", str(run / "checkpoints" / "step_00000012"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["record"]["step"] == 12
    meanings = {array["array"]: array["meaning"] for array in found["arrays"]}
    assert meanings == {
        "master": "weights",
        "state_0": "ScaleByAdamState.mu",
        "state_1": "ScaleByAdamState.nu",
    }


def test_damage_is_named_with_its_file(run, capsys):
    assert main(["verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out.count("are what was saved") == len(checkpoints(run))
    folder = run / "checkpoints" / "step_00000012"
    files = sorted(folder.rglob("0.0"))
    for path in files[:2]:
        raw = bytearray(path.read_bytes())
        raw[7] ^= 16
        path.write_bytes(raw)
    files[2].write_bytes(files[2].read_bytes()[:-9])
    files[3].unlink()
    assert main(["verify", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.count("is damaged: ") == 4
    assert all(f"error: {path.parent} is damaged" in error for path in files[:4])
    (folder / "head" / "_METADATA").write_text("{}")
    assert main(["verify", str(folder)]) == 1
    assert f"{folder / 'head'} is damaged" in capsys.readouterr().err
    shutil.rmtree(folder / "head")
    assert main(["verify", str(folder)]) == 1
    assert "lm_head.weight is missing, and " in capsys.readouterr().err
    assert main(["verify", str(run / "nothing")]) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_a_copy_is_the_original_byte_for_byte(run, inputs, tmp_path, capsys):
    target = tmp_path / "copy"
    assert main(["copy", str(run), str(target)]) == 0
    assert f"wrote {target}: all of" in capsys.readouterr().out
    source = run / "checkpoints" / "step_00000012"
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()}
    assert read_record(target) == read_record(source)
    for path in source.rglob("*"):
        if path.is_file() and path.name != "trainer.json":
            assert (target / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert main(["copy", str(run), str(target)]) == 1
    assert "exists; give a new name" in capsys.readouterr().err


def test_weights_alone_are_for_exports_and_not_for_going_on(
    run, inputs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("slidedp_jax.export.configure", lambda **_: None)
    source = run / "checkpoints" / "step_00000012"
    masters = {name: value for name, value in state(run, 12).items() if name.endswith("master")}
    target = run / "checkpoints" / "step_00000013"
    assert main(["copy", str(source), str(target), "--weights_only"]) == 0
    found = {}
    for item in target.iterdir():
        if item.is_dir():
            for name, arrays in ocp.PyTreeCheckpointer().restore(item).items():
                assert list(arrays) == ["master"]
                found[name] = np.asarray(arrays["master"])
    assert len(found) == len(masters)
    assert read_record(target)["weights_only"]
    assert main(["verify", str(target)]) == 0
    assert main(["export", str(target), str(tmp_path / "weights"), "--dtype", "float32"]) == 0
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    assert all((exported[name] == found[name]).all() for name in found)
    capsys.readouterr()
    assert train(inputs.command(run, max_steps=14)) == 1
    assert "without the optimizer's state" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_copy_that_does_not_fit_leaves_nothing(run, tmp_path, monkeypatch, capsys, place):
    left, real = [place], os.pwrite

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    (tmp_path / "new").mkdir()
    assert main(["copy", str(run), str(tmp_path / "new" / "copy")]) == 1
    assert "cannot be written: No space left" in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []
