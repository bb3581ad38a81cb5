"""How weights are rounded to bf16: asked for, recorded, taken again, and said of an export."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from runs import differing, losses
from safetensors.numpy import load_file

from slidedp_jax import export
from slidedp_jax.checkpoint.record import read_record
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import read_arrays
from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.state.split_float import rounded
from slidedp_jax.state.weight_rounding import WeightRounding

BF16 = {"dtype": "bfloat16", "max_steps": 3, "learning_rate": 1e-3, "ema_decay": 0.5}
DITHER = {"rounding": "dither", "seed": 42}
NEAREST = {"rounding": "nearest", "seed": None}


@pytest.fixture(autouse=True)
def configured(monkeypatch):
    """The export command configures its own process; this one is configured already."""
    monkeypatch.setattr(export, "configure", lambda **_: None)


@pytest.fixture(scope="module")
def dithered(inputs, tmp_path_factory):
    """Three steps, checkpoints of the first and last, and the exports."""
    out = tmp_path_factory.mktemp("dithered") / "run"
    inputs.train(out, save_steps=1, save_total_limit=3, export=True, **BF16)
    return out


def recorded(out, step=None):
    """What `run.json`, or a checkpoint, says."""
    if step is None:
        return json.loads((out / "run.json").read_text())["weight_rounding"]
    return read_record(out / "checkpoints" / f"step_{step:08d}")["weight_rounding"]


def cut_back(run, out, step):
    """A copy of a run that died after a checkpoint."""
    shutil.copytree(run, out)
    for name in ("export", "export_ema"):
        shutil.rmtree(out / name)
    for path in (out / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return out


def change(path, **entries):
    """Rewrite entries of a JSON file; None takes one away."""
    record = json.loads(path.read_text())
    record.pop("digest", None)
    for name, value in entries.items():
        record[name] = value
        if value is None:
            del record[name]
    path.write_text(json.dumps(record))


def test_a_run_dithers_records_it_and_goes_on_with_it(inputs, dithered, tmp_path):
    assert recorded(dithered) == recorded(dithered, 1) == DITHER
    out = cut_back(dithered, tmp_path / "run", 1)
    inputs.train(out, save_steps=1, save_total_limit=3, **BF16)
    assert recorded(out) == recorded(out, 3) == DITHER
    assert losses(out) == losses(dithered)
    found, expected = (with_average(run) for run in (out, dithered))
    assert differing(found, expected) == []


def with_average(out, step=3):
    folder = out / "checkpoints" / f"step_{step:08d}"
    return {
        f"{name}/{kind}": np.asarray(value)
        for item in folder.iterdir()
        if item.is_dir()
        for name, values in read_arrays(item.absolute()).items()
        for kind, value in values.items()
    }


def test_another_one_asked_for_is_taken_and_said(inputs, dithered, tmp_path, caplog):
    out = cut_back(dithered, tmp_path / "run", 1)
    inputs.train(out, weight_rounding="nearest", save_steps=1, save_total_limit=3, **BF16)
    assert "weight_rounding='dither'" in caplog.text and "'nearest'" in caplog.text
    assert recorded(out) == recorded(out, 3) == NEAREST
    assert losses(out)[0] == losses(dithered)[0] and losses(out)[2] != losses(dithered)[2]


def test_a_run_of_before_there_was_a_choice_goes_on_to_nearest(inputs, dithered, tmp_path):
    out = cut_back(dithered, tmp_path / "run", 1)
    change(out / "run.json", weight_rounding=None)
    change(out / "checkpoints" / "step_00000001" / "trainer.json", weight_rounding=None)
    inputs.train(out, **BF16)
    assert recorded(out) == recorded(out, 3) == NEAREST


@pytest.mark.thorough
def test_a_run_without_a_checkpoint_starts_again_as_it_began(inputs, tmp_path):
    out, fresh, settings = tmp_path / "run", tmp_path / "fresh", BF16 | {"max_steps": 1}
    inputs.train(out, weight_rounding="nearest", save_steps="null", save_at_end=False, **settings)
    inputs.train(out, **settings)
    assert recorded(out) == recorded(out, 1) == NEAREST
    inputs.train(fresh, plan_from=out / "run.json", **settings)
    assert recorded(fresh) == NEAREST
    assert losses(fresh) == losses(out)
    change(out / "run.json", weight_rounding=None)
    inputs.train(tmp_path / "older", plan_from=out / "run.json", **settings)
    assert recorded(tmp_path / "older") == NEAREST
    inputs.train(
        tmp_path / "stated", plan_from=out / "run.json", weight_rounding="dither", **settings
    )
    assert recorded(tmp_path / "stated") == DITHER


def masters(out):
    return {
        name.removesuffix("/master"): values
        for name, values in with_average(out).items()
        if name.endswith("/master")
    }


@pytest.mark.parametrize("rounding", [None, "dither", "nearest"])
def test_an_export_holds_the_weights_that_computed_unless_told_otherwise(
    rounding, dithered, tmp_path, capsys
):
    words = [] if rounding is None else ["--rounding", rounding]
    assert export.main([str(dithered), str(tmp_path / "out"), *words]) == 0
    how = WeightRounding.of(rounding or "dither", 42)
    assert f"bfloat16, rounded {how.text}" in capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, master in masters(dithered).items():
        assert tensors[name].dtype == ml_dtypes.bfloat16
        assert tensors[name].tobytes() == rounded(master, how, name).tobytes(), name


def test_a_run_exports_what_its_checkpoint_gives_with_averages(dithered, tmp_path):
    for name, words in (("export", []), ("export_ema", ["--ema"])):
        assert export.main([str(dithered), str(tmp_path / name), *words]) == 0
        expected = load_file(dithered / name / "model.safetensors")
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)


@pytest.mark.thorough
def test_a_run_may_export_otherwise_than_it_computed(inputs, dithered, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(dithered, out)
    inputs.train(out, export=True, export_rounding="nearest", **BF16)
    assert "bfloat16, rounded to nearest" in capsys.readouterr().out
    tensors = load_file(out / "export" / "model.safetensors")
    for name, master in masters(out).items():
        expected = rounded(master, WeightRounding.of("nearest", 0), name)
        assert tensors[name].tobytes() == expected.tobytes()


def test_roundings_that_mean_nothing_are_refused(inputs, dithered, tmp_path, capsys):
    with pytest.raises(UserError, match="export_rounding dither is for exports in bfloat16"):
        parse_arguments(inputs.command(tmp_path, export_rounding="dither", export_dtype="float16"))
    with pytest.raises(UserError, match="weight_rounding"):
        parse_arguments(inputs.command(tmp_path, weight_rounding="up"))
    words = [str(dithered), str(tmp_path / "out"), "--rounding", "dither", "--dtype", "float32"]
    assert export.main(words) == 1
    assert "--rounding dither is for bfloat16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
