"""When a run saves, which checkpoints stay, and what schedulers get when they stop it."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from runs import ROOT, checkpoints, losses, metrics

from slidedp_jax.checkpoint.record import read_record
from slidedp_jax.checkpoint.retention import Retention, list_steps, step_of
from slidedp_jax.errors import UserError
from slidedp_jax.models.config import named_config
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.run.arguments import TrainArguments, parse_arguments
from slidedp_jax.run.evaluations import Measure, best_evaluated
from slidedp_jax.run.saving import Saves, planned_buffer_bytes, save_notes
from slidedp_jax.train import main
from slidedp_jax.trainer import Trainer


def arrays_of(out):
    """Bytes of everything in its checkpoints but their records, and the records' checksums."""
    folder = out / "checkpoints"
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "trainer.json"
    }
    return files, [read_record(path)["checksums"] for path in sorted(folder.iterdir())]


def test_saves_beside_steps_are_those_of_steps_that_wait(inputs, tmp_path, capsys, monkeypatch):
    settings = {"max_steps": 5, "save_steps": 2, "save_total_limit": 9}
    prepared, prepare = [], Trainer.prepare_save

    def note(self, **words):
        prepared.append(self.step_count)
        prepare(self, **words)

    monkeypatch.setattr(Trainer, "prepare_save", note)
    inputs.train(tmp_path / "beside", **settings)
    assert prepared in ([1], [1, 3])  # if the first save is done by then; the last one waits
    said = capsys.readouterr().out
    assert "step_00000002 beside steps in " in said and " predicted" in said
    assert said.rstrip().count("saved ") == 3
    inputs.train(tmp_path / "waiting", save_beside=False, **settings)
    assert "beside steps" not in capsys.readouterr().out
    assert losses(tmp_path / "beside") == losses(tmp_path / "waiting")
    assert checkpoints(tmp_path / "beside") == [2, 4, 5]
    assert arrays_of(tmp_path / "beside") == arrays_of(tmp_path / "waiting")


@pytest.mark.parametrize(
    ("settings", "step_s", "prepared"),
    [
        ({"save_steps": 500}, 1.0, range(495, 500)),  # five seconds before, and none after the last
        ({"save_steps": 500}, 0.01, range(1, 500)),
        ({"save_steps": 3000}, 0.01, ()),
        ({"save_steps": None, "save_minutes": 1.0}, 1.0, ()),
        ({"save_steps": None, "save_minutes": 0.045}, 1.0, range(1, 998)),
    ],
)
def test_memory_is_made_shortly_before_a_save(settings, step_s, prepared, tmp_path):
    arguments = TrainArguments(model_name_or_path="m", train_file=["t"], output_dir="o", **settings)
    plan = SimpleNamespace(chosen=SimpleNamespace(time=SimpleNamespace(step_s=step_s)))
    saves = Saves(arguments, plan, tmp_path, metrics=tmp_path, measure=None, saved=None)
    assert [n for n in range(1, 1000) if saves._is_near(n, 1000, 1)] == [*prepared]


@pytest.mark.parametrize("save_at_end", [True, False])
def test_a_save_that_fails_beside_the_last_step_does_not_cost_the_weights(
    inputs, tmp_path, capsys, monkeypatch, save_at_end
):
    """The last checkpoint is tried all the same; where none is due, the weights are exported."""
    out = tmp_path / "run"
    step, begin, write = Trainer.step, Trainer.save_beside, os.pwrite
    stepped = threading.Event()

    def full(*_):
        assert stepped.wait(60)  # sooner, the last step would not be taken
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begin_on_a_full_disk(self, *words, **more):
        os.pwrite = full
        return begin(self, *words, **more)

    def step_and_wait(self, batch, **more):
        result = step(self, batch, **more)
        if self.step_count == 3:
            stepped.set()
            self._saving.wait()
            os.pwrite = write
        return result

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(Trainer, "save_beside", begin_on_a_full_disk)
    monkeypatch.setattr(Trainer, "step", step_and_wait)
    code = main(inputs.command(out, max_steps=3, save_steps=2, save_at_end=save_at_end))
    said, error = capsys.readouterr()
    assert code == (0 if save_at_end else 1)
    assert checkpoints(out) == ([3] if save_at_end else [])
    assert (out / "export" / "model.safetensors").is_file() == (not save_at_end)
    text = "a checkpoint was not written: " if save_at_end else "the weights are exported instead"
    assert text in said
    assert save_at_end or "step_00000002 cannot be written: No space left" in error


def test_the_clock_the_best_and_every_third_decide_what_stays(inputs, tmp_path):
    """Every step takes longer than these minutes; losses grow, so the first is the best."""
    out = tmp_path / "run"
    inputs.train(
        out,
        max_steps=8,
        save_steps=None,
        save_minutes=1e-9,
        save_total_limit=1,
        save_keep_every=3,
        save_best=True,
        validation_file=inputs.rows,
        eval_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    evaluated = {m["step"]: m["eval_loss"] for m in map(json.loads, lines(out)) if "eval_loss" in m}
    best = min(range(1, 8), key=evaluated.get)  # that of the last step comes after its save
    assert checkpoints(out) == sorted({3, 6, 8, best})


def lines(out):
    return (out / "metrics.jsonl").read_text().splitlines()


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    """Also of more digits than names have zeros for."""
    steps = [2, 10, 100, 200, 1000, 99_999_999, 100_000_000]
    for step in reversed(steps):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / "trainer.json").touch()
    assert [step_of(path) for path in list_steps(tmp_path)] == steps
    Retention(last=2).apply(tmp_path)
    assert [step_of(path) for path in list_steps(tmp_path)] == steps[-2:]


def test_what_stays():
    steps = [1, 2, 3, 10, 20, 1000]
    assert Retention(last=2).kept(steps) == {20, 1000}
    assert Retention(last=1, every=10).kept(reversed(steps)) == {10, 20, 1000}
    assert Retention(last=9).kept(steps) == set(steps)
    assert Retention(last=1).kept(steps, best=[3, 7]) == {3, 1000}


def test_what_cannot_be_deleted_is_said_and_does_not_end_the_run(
    inputs, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "run"
    remove = shutil.rmtree

    def refused(path, ignore_errors=False, **more):
        if "step_00000001" not in str(path):
            return remove(path, ignore_errors=ignore_errors, **more)
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        inputs.train(out, max_steps=3, save_steps=1, save_total_limit=1)
    said = capsys.readouterr().out
    assert "what need not stay cannot be deleted: " in said and "resource busy" in said
    assert [path.name for path in list_steps(out / "checkpoints")] == ["step_00000003"]
    assert Retention(last=1).apply(out / "checkpoints") == [] and checkpoints(out) == [3]


def test_the_best_is_the_lowest_of_the_same_rows_that_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = Measure(rows={"": "rows"}, terms={})
    assert best_evaluated(path, [1], rows) is None
    records = [
        {"step": 1, "eval_loss": 3.0, "eval_data": "rows"},
        {"step": 2, "eval_loss": 1.0, "eval_data": "others"},
        {"step": 3, "eval_loss": 2.0, "eval_data": "rows"},
        {"step": 3, "loss": 0.5},
        {"step": 4, "eval_loss": 1.5, "eval_data": "rows"},
        {"step": 5, "eval_loss": None, "eval_data": "rows"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert best_evaluated(path, [1, 2, 3, 5], rows) == 3
    assert best_evaluated(path, [2, 5], rows) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save_best"], "give a validation_file"),
        (["--save_minutes", "0"], "save_minutes is 0.0; it must be positive"),
        (["--save_keep_every", "0"], "save_keep_every is 0; it must be at least 1"),
        (["--stop_within", "-1"], "stop_within"),
    ],
)
def test_settings_that_mean_nothing_are_refused(words, message):
    required = ["--model_name_or_path", "m", "--train_file", "f", "--output_dir", "o"]
    with pytest.raises(UserError, match=message):
        parse_arguments([*required, *words])


def test_a_save_that_will_hold_steps_up_is_noted_before():
    """8B on a host that the state nearly fills; none where steps wait anyway, or memory is left."""
    hardware = dataclasses.replace(PRESETS["h200"], host_memory_bytes=500 * GIB)
    workload = Workload.from_config(named_config("qwen3-8b"))
    batch = BatchShape(num_rows=8, seq_length=4096)
    arguments = TrainArguments(model_name_or_path="m", train_file=["t"], output_dir="o")
    size = 12 * workload.num_parameters
    tight, ample = (
        plan(workload, batch, hardware, host_budget_bytes=gib * GIB, resident_state=False)
        for gib in (128, 400)
    )
    (note,) = save_notes(arguments, tight, size, None)
    buffer_bytes = planned_buffer_bytes(tight)
    assert tight.chosen.memory.host["state_in_passing"] <= buffer_bytes < 0.3 * size
    copied_s = buffer_bytes / 14e9 + (size - buffer_bytes) / 1.5e9
    seconds = copied_s - tight.chosen.time.step_s
    assert f"holds steps up for about {seconds:.1f} s: " in note
    assert save_notes(arguments, ample, size, None) == []
    for changes in ({"save_beside": False}, {"save_steps": None}, {"save_buffer": 100.0}):
        assert save_notes(dataclasses.replace(arguments, **changes), tight, size, None) == []


# Schedulers.


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_a_scheduler_is_told_to_start_the_run_again(inputs, tmp_path, number):
    out = tmp_path / "run"
    settings = {"num_devices": 1, "num_host_devices": 1}
    process = inputs.start(out, max_steps=5000, save_steps=3, stop_within=300, **settings)
    while not process.stdout.readline().startswith("step 4/"):
        assert process.poll() is None, process.communicate()[1]
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == (75 if number == signal.SIGUSR1 else 130), error
    last = checkpoints(out)[-1]
    assert last >= 4 and len(metrics(out)) == last


LATE = """
import signal, sys, time
from slidedp_jax.interrupts import StopAtSignal

with StopAtSignal() as stop:
    stop.within_s, stop.last_words = 0.5, lambda: "last checkpoint: step_00000007"
    stop.tidy = lambda: print("tidy", flush=True)
    with stop.when_ready("saving"):
        signal.raise_signal(signal.SIGTERM)
        time.sleep({seconds})
        stop.in_time()
        time.sleep(1)
    sys.exit(stop.exit_code)
"""


def test_a_save_that_comes_too_late_is_said_before_the_process_is_killed():
    for seconds, code, said, last in (
        (0.1, 75, "", "saving"),
        (30, 128 + signal.SIGTERM, "tidy\n",
         "no checkpoint of this step within 0.5 s of SIGTERM; last checkpoint: step_00000007"),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", LATE.format(seconds=seconds)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=25,
        )
        assert (done.returncode, done.stdout) == (code, said), done.stderr
        assert done.stderr.splitlines()[-1] == last
