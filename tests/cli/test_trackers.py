"""TensorBoard and Weights & Biases get every figure, and a run never waits for them or fails."""

import json
import struct
import threading
import time

import pytest
from runs import losses, metrics

from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.run.trackers import Trackers, check_trackers, figures, run_id
from slidedp_jax.train import main


def events(folder):
    """All events of a folder's files, by the framing of TFRecord: length, sum, content, sum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_tensorboard_has_what_metrics_has(inputs, tmp_path):
    """Also after a resume; which steps the second file starts with is in it."""
    out = tmp_path / "run"
    settings = {"report_to": "tensorboard", "validation_file": inputs.rows, "eval_steps": 2}
    inputs.train(out, max_steps=2, **settings)
    inputs.train(out, max_steps=4, **settings)
    found = events(out / "tensorboard")
    begun = [event.step for event in found if event.HasField("session_log")]
    assert begun == [1, 3]
    shown = {
        (event.step, value.tag): value.simple_value
        for event in found
        for value in event.summary.value
    }
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 6
    for record in records:
        for name in ("loss", "grad_norm", "learning_rate", "wait_update_s", "clipped"):
            if name in record:
                expected = pytest.approx(float(record[name]), rel=1e-6)
                assert shown[record["step"], f"train/{name}"] == expected
        if "eval_loss" in record:
            assert shown[record["step"], "eval/loss"] == pytest.approx(record["eval_loss"])


def test_a_folder_that_cannot_be_is_said_once_and_the_run_goes_on(inputs, tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    wrong = tmp_path / "file"
    wrong.write_text("")
    out = tmp_path / "run"
    inputs.train(out, max_steps=3, report_to="tensorboard", logging_dir=wrong)
    said = capsys.readouterr().out
    assert said.count("warning: tensorboard failed (FileExistsError") == 1
    assert len(losses(out)) == 3


class Recorder:
    """A tool that keeps what it gets, and does at its second record what it is told to."""

    def __init__(self, at_second=lambda: None):
        self.taken, self.ended, self._at_second = [], None, at_second

    def begin(self):
        pass

    def write(self, step, figures):
        if len(self.taken) == 1:
            self._at_second()
        self.taken.append((step, dict(figures)))

    def end(self, complete):
        self.ended = complete


def test_an_early_end_is_an_end_and_what_is_evaluated_after_it_is_shown(
    inputs, tmp_path, monkeypatch
):
    tools = []

    def made(*_, **__):
        tools.append(Recorder())
        return {"it": tools[-1]}

    monkeypatch.setattr("slidedp_jax.run.loop.make_tools", made)
    settings = {"learning_rate": 0, "eval_steps": 1, "early_stopping_patience": 1}
    inputs.train(out := tmp_path / "run", validation_file=inputs.rows, max_steps=9, **settings)
    (tool,) = tools
    assert tool.ended is True and [step for step, _ in tool.taken] == [1, 1, 2, 2]
    named = f"more={inputs.rows}"
    inputs.train(out, validation_file=named, max_steps=2, **settings)
    assert tools[1].ended is True and len(tools[1].taken) == 1
    step, shown = tools[1].taken[0]
    assert step == 2 and "eval/more_loss" in shown
    inputs.train(out, validation_file=named, max_steps=2, **settings)
    assert len(tools) == 2


def fail():
    raise OSError(28, "No space left on device")


def test_a_tool_that_fails_on_the_way_is_left_out_and_others_go_on():
    said, good, bad = [], Recorder(), Recorder(fail)
    trackers = Trackers({"good": good, "bad": bad}, said.append)
    for step in range(1, 5):
        trackers.write({"step": step, "loss": 1.0, "row_ids": [1]})
        time.sleep(0.01)
    trackers.close(complete=True)
    assert good.taken == [(step, {"train/loss": 1.0}) for step in range(1, 5)]
    assert good.ended is True and bad.ended is None and len(bad.taken) == 1
    (line,) = said
    assert line.startswith("warning: bad failed (OSError: [Errno 28] No space left")


def test_a_tool_that_hangs_is_not_waited_for():
    said, event = [], threading.Event()
    trackers = Trackers({"slow": Recorder(event.wait)}, said.append, close_s=0.2)
    for step in range(3):
        trackers.write({"step": step, "loss": 1.0})
    trackers.close(complete=False)
    event.set()
    assert len(said) == 1 and "slow has not taken all figures within 0.2 s" in said[0]


def test_what_is_shown():
    record = {"step": 3, "loss": 2.0, "eval_loss": 1.5, "row_ids": [1], "grad_norm": float("nan")}
    record |= {"clipped": True, "device_peak_gib": None, "eval_data": "abc"}
    assert figures(record) == {"train/loss": 2.0, "eval/loss": 1.5, "train/clipped": 1.0}
    first = {"time": "t", "arguments": {"learning_rate": 1e-5}}
    assert run_id([first]) == run_id([first, {"time": "later"}])
    assert run_id([first]) != run_id([first | {"time": "u"}])


def test_settings_are_checked_before_anything_else(inputs, tmp_path, monkeypatch, capsys):
    words = inputs.command(tmp_path / "run", report_to="tensorboard")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package tensorboardX.*pip install"):
        check_trackers(parse_arguments(words))
    monkeypatch.undo()
    assert main([*words, "--profile_steps", "3"]) == 2
    assert "profile_steps is '3'; it must be first:last" in capsys.readouterr().err
    words[words.index("tensorboard")] = "mlflow"
    assert main(words) == 2
    words[words.index("mlflow")] = "none"
    assert parse_arguments(words).trackers == []


@pytest.mark.thorough
def test_wandb_offline_goes_on_with_its_run(inputs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    out = tmp_path / "run"
    inputs.train(out, max_steps=2, report_to="wandb")
    inputs.train(out, max_steps=3, report_to="wandb")
    assert "wandb failed" not in capsys.readouterr().out
    starts = json.loads((out / "run.json").read_text())["starts"]
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert {name.rsplit("-", 1)[1] for name in folders} == {run_id(starts)}
    assert len(metrics(out)) == 3
