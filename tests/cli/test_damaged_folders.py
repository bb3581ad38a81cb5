"""Run folders that were cut, damaged or are to be overwritten: nothing is lost, all is named."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from lanes import mostly_thorough
from runs import ROOT, checkpoints, differing, losses, metrics, state, tree_of, wait_for

from slidedp_jax.checkpoint.array_streams import for_each_piece, pieces_of
from slidedp_jax.checkpoint.retention import Retention, list_steps
from slidedp_jax.checkpoint.save_restore import _write_checkpoint
from slidedp_jax.checkpoint.stored_arrays import StoredArray
from slidedp_jax.run.folder import _remove_leftovers, _tidy
from slidedp_jax.run.replaced import ReplacedRun
from slidedp_jax.train import main
from slidedp_jax.trainer import Trainer
from slidedp_jax.whole_files import write_whole

SETTINGS = {"max_steps": 6, "save_steps": 2, "save_total_limit": 9}


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """Six steps, all checkpoints, an export."""
    out = tmp_path_factory.mktemp("finished") / "run"
    inputs.train(out, export=True, **SETTINGS)
    return out


@pytest.fixture
def stopped(finished, tmp_path):
    """The same as it was after step 4."""
    out = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "step_00000006")
    shutil.rmtree(out / "export")
    return out


def assert_same(out, finished):
    assert losses(out) == losses(finished)
    assert differing(state(out, 6), state(finished, 6)) == []


# A cut at any byte.


@pytest.mark.parametrize("share", mostly_thorough([0, 1e-9, 0.3, 0.5, 0.9999], (0.5,)))
def test_a_cut_run_json_does_not_put_checkpoints_out_of_reach(
    inputs, stopped, finished, share, capsys
):
    path = stopped / "run.json"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share) + (0 < share < 1e-3)])
    inputs.train(stopped, **SETTINGS)
    said = capsys.readouterr().out
    assert "run.json is damaged" in said and "settings are taken from" in said
    assert "at step 4" in said
    assert_same(stopped, finished)
    assert json.loads(path.read_text())["arguments"]["max_steps"] == 6


def test_the_settings_are_compared_also_without_run_json(inputs, stopped, capsys):
    (stopped / "run.json").unlink()
    assert main(inputs.command(stopped, learning_rate=0.5, **SETTINGS)) == 1
    assert "learning_rate was 0.01, now 0.5" in capsys.readouterr().err


def without_settings(out):
    """Checkpoints as earlier versions have written them."""
    for path in out.glob("checkpoints/*/trainer.json"):
        record = json.loads(path.read_text())
        del record["extra"]["run"], record["digest"]
        path.write_text(json.dumps(record))


def test_checkpoints_that_hold_no_settings_stay_reachable(inputs, stopped, finished, capsys):
    without_settings(stopped)
    (stopped / "run.json").write_text("{")
    assert main(inputs.command(stopped, **SETTINGS)) == 1
    error = capsys.readouterr().err
    assert "run.json is damaged" in error and "move run.json away" in error
    (stopped / "run.json").unlink()
    inputs.train(stopped, **SETTINGS)
    assert "are not compared" in capsys.readouterr().out
    assert_same(stopped, finished)


def test_a_cut_run_json_without_checkpoints_is_named(inputs, stopped, capsys):
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "run.json").write_text('{"arguments": {')
    assert main(inputs.command(stopped, **SETTINGS)) == 1
    error = capsys.readouterr().err
    assert "run.json is damaged" in error and "--overwrite_output_dir" in error
    inputs.train(stopped, overwrite_output_dir=True, **SETTINGS)
    assert len(losses(stopped)) == 6


@pytest.mark.parametrize("cut", mostly_thorough([1, 100, 700], (100,)))
def test_a_cut_log_keeps_its_whole_lines(inputs, stopped, finished, cut):
    raw = (stopped / "metrics.jsonl").read_bytes()
    lines = raw.splitlines(keepends=True)
    steps = b"".join(lines[:4])
    (stopped / "metrics.jsonl").write_bytes(steps + lines[4][: min(cut, len(lines[4]) - 1)])
    inputs.train(stopped, **SETTINGS)
    assert_same(stopped, finished)
    (stopped / "metrics.jsonl").write_bytes(steps[:-7] + b"\xff\xfe")
    shutil.rmtree(stopped / "checkpoints" / "step_00000006")
    inputs.train(stopped, **SETTINGS)
    assert [m["step"] for m in metrics(stopped)] == [1, 2, 3, 5, 6]


@pytest.mark.parametrize("share", mostly_thorough([0, 0.5, 0.9999], (0.9999,)))
def test_a_cut_checkpoint_is_named_with_what_to_do(inputs, stopped, finished, share, capsys):
    path = stopped / "checkpoints" / "step_00000004" / "trainer.json"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    assert main(inputs.command(stopped, **SETTINGS)) == 1
    error = capsys.readouterr().err
    assert f"{path} is damaged" in error and f"move {path.parent} away" in error
    path.parent.rename(stopped.parent / "away")
    inputs.train(stopped, **SETTINGS)
    assert_same(stopped, finished)


FAILS = {
    "write": lambda *_: 1 / 0,
    "full": lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")),
}


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("how", FAILS)
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, call, how):
    path = tmp_path / "run.json"
    write_whole(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, FAILS[how])
        error = ZeroDivisionError if how == "write" else OSError
        with pytest.raises(error, match=r"division|run\.json cannot be written: No space left"):
            write_whole(path, "new and longer")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new"
    (tmp_path / "another").write_text("by the usual way")
    assert path.stat().st_mode == (tmp_path / "another").stat().st_mode


KILLED = """
import os, signal, sys
from slidedp_jax import whole_files
real = os.replace
def killed(*names):
    if str(names[1]).endswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*names)
os.replace = killed
from slidedp_jax.train import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_kill_while_a_file_is_written_loses_nothing(inputs, stopped, finished, name):
    before = tree_of(stopped)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, name, *inputs.command(stopped, **SETTINGS)],
        cwd=ROOT,
        env=inputs.environment(),
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL
    after = tree_of(stopped)
    left = {path for path in after if path not in before}
    assert len(left) == 1 and ".partial" in left.pop()
    assert after["metrics.jsonl"] == before["metrics.jsonl"]
    inputs.train(stopped, **SETTINGS)
    assert_same(stopped, finished)
    assert not [path for path in tree_of(stopped) if ".partial" in path]


def test_half_removed_checkpoints_do_not_count(tmp_path, monkeypatch):
    """Removing begins with the name: what a kill leaves is no checkpoint, and goes next time."""
    for step in (2, 4, 6):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / "trainer.json").touch()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: path.exists() and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Retention(last=1).apply(tmp_path)
    assert [path.name for path in list_steps(tmp_path)] == ["step_00000004", "step_00000006"]
    Retention(last=1).apply(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000006"]


# Another model configuration.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 12345.0}, ["rope_theta was", "now 12345.0"]),
        pytest.param({"rms_norm_eps": 1e-4}, ["rms_norm_eps was"], marks=pytest.mark.thorough),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            ["layer_windows was [None, None, None], now [None, 8, 8]"],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_another_model_configuration_is_refused_by_field(inputs, tmp_path, capsys, changes, named):
    model = shutil.copytree(inputs.model, tmp_path / "model")
    out = tmp_path / "run"
    settings = {"model_name_or_path": model, "max_steps": 2}
    inputs.train(out, **settings)
    before = tree_of(out)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(changed(config, changes)))
    capsys.readouterr()
    assert main(inputs.command(out, **settings | {"max_steps": 4})) == 1
    error = capsys.readouterr().err
    for text in named:
        assert text in error
    assert tree_of(out) == before


def changed(config, changes):
    config = json.loads(json.dumps(config))
    for name, value in changes.items():
        inside = config
        if name not in config and name in config.get("rope_parameters", {}):
            inside = config["rope_parameters"]
        inside[name] = value
    return config


# Overwriting.


def fails_to_plan(patch):
    patch.setattr("slidedp_jax.this_machine.plan", lambda *_, **__: 1 / 0)


def fails_to_load(patch):
    patch.setattr("slidedp_jax.pretrained.load_parameters", lambda *_, **__: 1 / 0)


def fails_in_the_first_step(patch):
    patch.setattr("slidedp_jax.step.passes.Passes.forward_backward", lambda *_, **__: 1 / 0)


def fails_to_save(patch):
    patch.setattr("slidedp_jax.checkpoint.array_streams.ArrayWriter.write", lambda *_, **__: 1 / 0)


@pytest.mark.parametrize(
    "failing",
    mostly_thorough(
        [fails_to_plan, fails_to_load, fails_in_the_first_step, fails_to_save],
        (fails_to_load, fails_to_save),
    ),
)
def test_a_run_that_was_to_be_overwritten_survives_every_later_error(
    inputs, finished, tmp_path, monkeypatch, failing
):
    out = shutil.copytree(finished, tmp_path / "run")
    before = tree_of(out)
    with monkeypatch.context() as patch:
        failing(patch)
        with pytest.raises(ZeroDivisionError):
            main(inputs.command(out, overwrite_output_dir=True, learning_rate=0.02, **SETTINGS))
    assert tree_of(out) == before
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    inputs.train(out, export=True, **SETTINGS)


def test_what_was_saved_beside_a_step_that_fails_replaces_the_old_run(
    inputs, finished, tmp_path, monkeypatch
):
    out = shutil.copytree(finished, tmp_path / "run")
    step = Trainer.step

    def fails_later(self, batch, **more):
        if self.step_count == 3:
            self.finish_save()  # nobody has looked since
            raise FloatingPointError("step 4 fails")
        return step(self, batch, **more)

    monkeypatch.setattr(Trainer, "step", fails_later)
    changes = {"save_steps": 3, "learning_rate": 0.02}
    with pytest.raises(FloatingPointError):
        main(inputs.command(out, overwrite_output_dir=True, **SETTINGS | changes))
    assert checkpoints(out) == [3] and [m["step"] for m in metrics(out)] == [1, 2, 3]
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_name_or_path": "/nowhere"},
        {"train_file": "/nowhere.jsonl"},
        {"host_memory_budget": 1e-6},
        {"freeze": "no.such.name"},
        {"per_device_train_batch_size": 100},
    ],
    ids=str,
)
def test_a_wrong_setting_beside_overwrite_deletes_nothing(inputs, finished, tmp_path, wrong):
    out = shutil.copytree(finished, tmp_path / "run")
    before = tree_of(out)
    assert main(inputs.command(out, overwrite_output_dir=True, **SETTINGS | wrong)) == 1
    assert tree_of(out) == before


@pytest.mark.thorough
def test_a_kill_before_the_first_checkpoint_leaves_the_old_run(inputs, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    before = tree_of(out)
    process = inputs.start(
        out, overwrite_output_dir=True, learning_rate=0.02, max_steps=5000, save_steps=5000
    )
    wait_for(out / ".replaced_run" / "set_aside", process)
    line = process.stdout.readline()
    while not line.startswith("step 2/"):
        assert line, process.communicate()[1]
        line = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    inputs.train(out, export=True, **SETTINGS)  # says that it is complete: the old run is back
    after = tree_of(out)
    assert {name: after[name] for name in before if name != "run.json"} == {
        name: before[name] for name in before if name != "run.json"
    }


def test_a_new_run_takes_the_place_of_the_old_one(inputs, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    (out / "report.html").write_text("old")
    for name in ("profile", "tensorboard"):
        (out / name).mkdir()
    inputs.train(out, overwrite_output_dir=True, learning_rate=0.02, max_steps=3)
    assert checkpoints(out) == [3] and not (out / "export").exists()
    assert len(losses(out)) == 3 and losses(out)[1:] != losses(finished)[1:3]
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "run.json",
    ]


STEPS = ["mkdir", "run.json", "metrics.jsonl", "checkpoints", "export", "mark"]


@pytest.mark.parametrize("reached", range(len(STEPS)))
def test_setting_aside_is_undone_from_any_point(finished, tmp_path, monkeypatch, reached):
    out = shutil.copytree(finished, tmp_path / "run")
    before = tree_of(out)
    old, left = ReplacedRun(out), [reached]

    class Stop(Exception):
        pass

    rename = type(out).rename

    def until(self, target):
        if left[0] == 0:
            raise Stop
        left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(out), "rename", until)
        try:
            old.set_aside()
            (out / "run.json").write_text("new")
            (out / "export_ema").mkdir()
        except Stop:
            pass
    # Bringing it back may be cut as well.
    for allowed in range(5):
        left[0] = allowed
        with monkeypatch.context() as patch:
            patch.setattr(type(out), "rename", until)
            try:
                old.settle(replaced=False)
            except Stop:
                continue
    _tidy(out)
    assert tree_of(out) == before


def test_what_a_save_writes_behind_the_old_run_does_not_keep_it_away(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    before = tree_of(out)
    old = ReplacedRun(out)
    old.set_aside()
    (out / ".replaced_run" / "set_aside").unlink()  # as `bring_back` does
    (out / "checkpoints" / ".step_00000008.partial" / "item").mkdir(parents=True)
    old.bring_back()
    assert tree_of(out) == before and not old.is_aside


@pytest.mark.parametrize("last_piece", [False, True])
def test_a_save_goes_wrong_whose_folder_is_tidied_away(tmp_path, monkeypatch, last_piece):
    """At any moment: it never gives its name to the half that is left."""
    array = StoredArray(item="one", name="a", number=None, shape=(3,), dtype=np.dtype("f4"))
    other = dataclasses.replace(array, name="b")
    folder = tmp_path / "checkpoints"

    def write(writer):
        for_each_piece(lambda block, piece: writer.write(block, piece, fill), pieces_of([array]))
        if not last_piece:
            _remove_leftovers(tmp_path)
        for_each_piece(lambda block, piece: writer.write(block, piece, fill), pieces_of([other]))
        if last_piece:
            _remove_leftovers(tmp_path)

    def fill(_, start, out):
        out[:] = start

    with pytest.raises(FileNotFoundError):
        _write_checkpoint(folder / "step_00000002", {}, [array, other], write)
    assert list(folder.iterdir()) == []


def test_a_failed_save_leaves_no_disk_full_of_pieces(inputs, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(os, "pwrite", full)
    out = tmp_path / "run"
    assert main(inputs.command(out, max_steps=2)) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "without the optimizer's state" in error
    assert (out / "export" / "model.safetensors").is_file()  # else the weights would be lost
    assert list((out / "checkpoints").iterdir()) == []


def test_an_export_that_fails_leaves_the_one_before(inputs, finished, tmp_path, monkeypatch):
    out = shutil.copytree(finished, tmp_path / "run")
    before = {name: file for name, file in tree_of(out).items() if name.startswith("export/")}
    with monkeypatch.context() as patch:
        patch.setattr("slidedp_jax.models.hf_export._copy_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(inputs.command(out, export=True, export_dtype="float32", **SETTINGS))
    after = tree_of(out)
    assert {name: after.get(name) for name in before} == before
    inputs.train(out, export=True, export_dtype="float32", **SETTINGS)
    assert (out / "export/model.safetensors").stat().st_size > 1.9 * len(
        before["export/model.safetensors"][1]
    )
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
