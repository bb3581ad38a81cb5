"""`--freeze`: frozen weights come out of checkpoint and export as they went in."""

import json

import numpy as np
import pytest
from runs import losses
from safetensors.numpy import load_file

from slidedp_jax import export
from slidedp_jax.train import main

FROZEN = ["model.embed_tokens.*", "model.layers.[01].*"]
SETTINGS = {"max_steps": 4, "save_steps": 2, "freeze": FROZEN}


def is_frozen(name):
    return name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))


@pytest.mark.thorough
@pytest.mark.parametrize("resident_state", [False, True])
def test_frozen_weights_are_saved_resumed_and_exported(resident_state, inputs, tmp_path, capsys):
    straight, out = tmp_path / "straight", tmp_path / "run"
    settings = SETTINGS | {"resident_state": resident_state}
    inputs.train(straight, **settings, export=True, export_dtype="float32")
    assert "parameter arrays are frozen" in capsys.readouterr().out
    before = load_file(inputs.model / "model.safetensors")
    after = load_file(straight / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        same = np.array_equal(np.asarray(values, np.float32), after[name])
        assert same == is_frozen(name), name
    record = json.loads((straight / "checkpoints/step_00000004/trainer.json").read_text())
    kinds = record["optimizer_state"]
    assert all((kinds[name] == []) == is_frozen(name) for name in before)
    chosen = json.loads((straight / "run.json").read_text())["plan"]["chosen"]
    trained = sum(values.size for name, values in before.items() if not is_frozen(name))
    if resident_state:
        assert chosen["strategy"]["resident_chunks"] > 0
    else:
        assert 1 <= chosen["memory"]["host"]["optimizer_state"] / (8 * trained) < 1.1
    inputs.train(out, **settings | {"max_steps": 2})
    (out / "run.json").write_text((straight / "run.json").read_text())
    inputs.train(out, **settings, export=True, export_dtype="float32")
    assert losses(out) == losses(straight)
    again = load_file(out / "export" / "model.safetensors")
    assert all(again[name].tobytes() == values.tobytes() for name, values in after.items())


def test_a_checkpoint_is_not_resumed_with_other_frozen_parameters(inputs, tmp_path, capsys):
    inputs.train(tmp_path / "run", **SETTINGS | {"max_steps": 2})
    words = inputs.command(tmp_path / "run", **SETTINGS | {"freeze": FROZEN[:1]})
    assert main(words) == 1
    assert "freeze was" in capsys.readouterr().err


def test_a_pattern_that_fits_nothing_is_refused_before_anything_else(inputs, tmp_path, capsys):
    assert main(inputs.command(tmp_path / "run", freeze=["layers.0"])) == 1
    error = capsys.readouterr().err
    assert "'layers.0'" in error and "model.layers.0" in error


def test_the_moving_average_is_planned_saved_and_exported(inputs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    settings = {"max_steps": 3, "export": True, "export_dtype": "float32"}
    inputs.train(out, **settings, ema_decay=0.5, freeze=FROZEN, weight_decay=0.5)
    assert "export_ema" in capsys.readouterr().out
    weights, averages = (
        load_file(out / name / "model.safetensors") for name in ("export", "export_ema")
    )
    before = load_file(inputs.model / "model.safetensors")
    for name, values in averages.items():
        assert np.array_equal(values, weights[name]) == is_frozen(name), name
        if is_frozen(name):
            assert values.tobytes() == np.asarray(before[name], np.float32).tobytes(), name
    plan = json.loads((out / "run.json").read_text())["plan"]["chosen"]
    host = plan["memory"]["host"]
    trained = sum(values.size for name, values in weights.items() if not is_frozen(name))
    assert 1 <= host["optimizer_state"] / (12 * trained) < 1.1
    again = tmp_path / "again"
    monkeypatch.setattr(export, "configure", lambda **_: None)  # this process is configured already
    assert export.main([str(out), str(again), "--ema", "--dtype", "float32"]) == 0
    exported = load_file(again / "model.safetensors")
    assert all(exported[name].tobytes() == averages[name].tobytes() for name in averages)
