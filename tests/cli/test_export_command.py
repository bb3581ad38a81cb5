"""`slidedp export` from checkpoints, and the console script's other names."""

import json

import numpy as np
import pytest
from runs import state
from safetensors.numpy import load_file

from slidedp_jax import cli, export


@pytest.fixture(autouse=True)
def configured(monkeypatch):
    """The command configures its own process; this one is configured already."""
    monkeypatch.setattr(export, "configure", lambda **_: None)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("within", ["", "checkpoints"])
def test_a_run_gives_the_bytes_of_its_own_export(within, straight, tmp_path):
    assert cli.main(["export", str(straight / within), str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == files(straight / "export")


def test_an_older_checkpoint_in_float32_is_exact(straight, tmp_path):
    folder = straight / "checkpoints" / "step_00000004"
    assert export.main([str(folder), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = state(straight, 4)
    assert {f"{name}/master" for name in tensors} == {k for k in expected if k.endswith("master")}
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, expected[f"{name}/master"])


@pytest.mark.parity
def test_transformers_takes_the_export(straight):
    transformers = pytest.importorskip("transformers")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        straight / "export", output_loading_info=True
    )
    assert not any(info.values())


def test_refusals(straight, tmp_path, capsys):
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "no complete checkpoint" in capsys.readouterr().err
    assert export.main([str(tmp_path / "nothere"), str(tmp_path / "out")]) == 1
    assert f"error: {tmp_path / 'nothere'} does not exist; give the" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export.main([str(straight), str(tmp_path / "out"), "--export_dtype", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_of_the_console_script(capsys):
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2 and cli.main(["tune"]) == 2
    assert cli.main(["train", "--nonsense", "1"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_the_plan_is_that_of_the_run(straight):
    plan = json.loads((straight / "run.json").read_text())["plan"]
    assert "strategy" in json.dumps(plan)
