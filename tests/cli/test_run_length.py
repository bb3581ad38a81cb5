"""A run is as long as its data: resumed with other rows per step, it takes what is left, once."""

import json
import shutil

import numpy as np
import pytest
from runs import losses, metrics

from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.run.learning_rate import learning_rate
from slidedp_jax.train import main
from slidedp_jax.update.step_guard import StepGuard

ROWS = 48
QUIET = {"save_at_end": True, "save_steps": 500}


def rows_taken(out):
    """Row numbers of each step, 1, 2, ... without gap."""
    records = metrics(out)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["row_ids"] for record in records]


def epochs_of(steps):
    """Rows of all steps, cut into epochs."""
    flat = [row for step in steps for row in step]
    return [sorted(flat[start : start + ROWS]) for start in range(0, len(flat), ROWS)]


@pytest.mark.parametrize(
    ("first", "steps", "then", "epochs", "sizes"),
    [
        # (rows per device, accumulation) of 8 devices: 8 rows, then 16, and so on
        ((1, 1), 3, (2, 1), 1, [8, 8, 8, 16, 8]),
        pytest.param((2, 1), 2, (1, 1), 1, [16, 16, 8, 8], marks=pytest.mark.thorough),
        pytest.param((1, 1), 5, (3, 2), 2, [8] * 5 + [8, 48], marks=pytest.mark.thorough),
        pytest.param((3, 1), 3, (1, 3), 2.5, [24] * 3 + [24, 24], marks=pytest.mark.thorough),
        pytest.param((5, 1), 2, (1, 2), 1, [40, 8], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_every_row_once_per_epoch(inputs, tmp_path, capsys, first, steps, then, epochs, sizes):
    out = tmp_path / "run"

    def settings(size):
        return {"per_device_train_batch_size": size[0], "gradient_accumulation_steps": size[1]}

    inputs.train(out, rows_per_microbatch=1, max_steps=steps, **settings(first), **QUIET)
    capsys.readouterr()
    again = inputs.command(
        out, rows_per_microbatch=1, num_train_epochs=epochs, **settings(then), **QUIET
    )
    at = again.index("--max_steps")
    del again[at : at + 2]
    assert main(again) == 0
    said = capsys.readouterr().out
    taken = rows_taken(out)
    assert [len(step) for step in taken] == sizes
    *whole, last = epochs_of(taken)
    assert all(rows == list(range(ROWS)) for rows in whole) and len(set(last)) == len(last)
    if epochs == int(epochs):
        assert last == list(range(ROWS)) and len(whole) == epochs - 1
    assert f"{len(sizes)} steps of {8 * then[0] * then[1]} rows, {epochs:.2f} epochs" in said
    record = json.loads((out / "checkpoints" / f"step_{len(sizes):08d}/trainer.json").read_text())
    assert record["extra"]["num_steps"] == len(sizes)
    # The same command again has nothing to do, and takes nothing twice.
    assert main(again) == 0
    assert "already complete" in capsys.readouterr().out
    assert rows_taken(out) == taken


@pytest.mark.thorough
def test_other_devices_take_what_is_left(inputs, tmp_path):
    out = tmp_path / "run"
    inputs.train(out, rows_per_microbatch=1, per_device_train_batch_size=2, max_steps=1)
    command = {"num_devices": 3, "num_host_devices": 3, "per_device_train_batch_size": 5}
    done = inputs.run(out, max_steps="null", num_train_epochs=1, rows_per_microbatch=1, **command)
    assert done.returncode == 0, done.stderr
    assert [len(step) for step in rows_taken(out)] == [16, 15, 15, 2]
    assert epochs_of(rows_taken(out)) == [list(range(ROWS))]
    assert "4 steps of 15 rows, 1.00 epochs; 1 step, 0.33 epochs are done" in done.stdout
    assert "planned anew" in done.stdout and "num_devices was 8, now 3" in done.stdout


def test_a_dry_run_says_what_is_left(inputs, tmp_path, capsys):
    out = tmp_path / "run"
    inputs.train(out, rows_per_microbatch=1, per_device_train_batch_size=1, max_steps=3)
    capsys.readouterr()
    settings = {"rows_per_microbatch": 1, "per_device_train_batch_size": 2}
    inputs.train(out, max_steps="null", dry_run=True, **settings)
    said = capsys.readouterr().out
    assert "5 steps of 16 rows, 1.00 epochs; 3 steps, 0.50 epochs are done" in said


@pytest.mark.thorough
def test_the_learning_rate_falls_to_its_end_over_the_steps_that_are_left(inputs, tmp_path, capsys):
    out = tmp_path / "run"
    rate = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "warmup_ratio": 0.0}
    sizes = {"rows_per_microbatch": 1, "max_steps": "null"}
    half = inputs.command(out, per_device_train_batch_size=1, **rate | sizes | {"max_steps": 3})
    assert main(half) == 0
    inputs.train(out, per_device_train_batch_size=2, **rate | sizes)
    schedule = learning_rate(parse_arguments(half), 5)
    wanted = [float(schedule(step)) for step in (3, 4)]
    np.testing.assert_allclose([m["learning_rate"] for m in metrics(out)][3:], wanted, rtol=1e-6)
    assert "the learning rate jumps here from 0 to 0.0004" in capsys.readouterr().out
    assert [m["epoch"] for m in metrics(out)] == [0.1667, 0.3333, 0.5, 0.8333, 1.0]


def test_the_logged_rate_is_the_optimizers_also_after_skipped_steps(inputs, tmp_path, monkeypatch):
    """Skipped steps do not advance the optimizer's count; two of them lie before a resume."""
    judge, calls, bad = StepGuard.problem, [], {2, 3, 6}

    def problem(self, norm, loss):
        calls.append(0)
        return "injected" if len(calls) in bad else judge(self, norm, loss)

    monkeypatch.setattr(StepGuard, "problem", problem)
    out = tmp_path / "run"
    settings = {"lr_scheduler_type": "linear", "on_nonfinite": "skip", "warmup_ratio": 0.0}
    inputs.train(out, max_steps=8, save_steps=4, **settings)
    shutil.rmtree(out / "checkpoints" / "step_00000008")
    before = [m["learning_rate"] for m in metrics(out)]
    calls[:] = [0] * 4
    inputs.train(out, max_steps=8, save_steps=4, **settings)
    assert [m["learning_rate"] for m in metrics(out)] == before
    schedule = learning_rate(parse_arguments(inputs.command(out, max_steps=8, **settings)), 8)
    counts = [0, 1, 1, 1, 2, 3, 3, 4]
    np.testing.assert_allclose(before, [float(schedule(count)) for count in counts], rtol=1e-6)
    assert len(losses(out)) == 8
