"""Failures in the middle of a run: exit code, message, and what the folder holds afterwards."""

import json

import jax
import pytest
from runs import checkpoints, losses, metrics

from slidedp_jax.checkpoint.save_restore import list_steps
from slidedp_jax.data import BatchSource
from slidedp_jax.step.passes import Passes
from slidedp_jax.train import main
from slidedp_jax.update.part_updates import PartUpdates

pytestmark = pytest.mark.timeout(300)
SETTINGS = {"max_steps": 6, "save_steps": 2}


@pytest.mark.thorough
def test_a_failure_in_data_loading_ends_the_run_and_the_next_one_goes_on(
    inputs, tmp_path, capsys, monkeypatch
):
    straight, out = tmp_path / "straight", tmp_path / "run"
    inputs.train(straight, **SETTINGS)
    load, calls = BatchSource.__next__, []

    def failing(self):
        calls.append(0)
        if len(calls) == 4:
            raise OSError("the disk is gone")
        return load(self)

    monkeypatch.setattr(BatchSource, "__next__", failing)
    assert main(inputs.command(out, **SETTINGS)) == 1
    assert "the disk is gone" in capsys.readouterr().err
    assert checkpoints(out) == [2] and len(losses(out)) == 3
    monkeypatch.undo()
    inputs.train(out, **SETTINGS)
    assert losses(out) == losses(straight)


def test_bad_steps_are_counted_and_too_many_in_a_row_end_the_run(inputs, tmp_path, capsys):
    """A limit below every loss makes all steps bad."""
    out = tmp_path / "run"
    bad = {"max_loss": 0.01, "on_nonfinite": "skip", "max_consecutive_skips": 3}
    assert main(inputs.command(out, **SETTINGS | bad)) == 1
    error = capsys.readouterr().err
    rows = metrics(out)[-1]["row_ids"]
    assert "step 4: the loss is" in error and "max_consecutive_skips" in error
    assert [m["skipped_steps"] for m in metrics(out)] == [1, 2, 3]
    assert len(rows) == 24 and "Its rows are " in error
    record = json.loads((out / "checkpoints/step_00000002/trainer.json").read_text())
    assert record["extra"]["skipped_steps"] == 2


@pytest.mark.parametrize(
    "where", ["step", pytest.param("update thread", marks=pytest.mark.thorough)]
)
def test_running_out_of_device_memory_says_what_to_change(
    where, inputs, tmp_path, capsys, monkeypatch
):
    """The allocation is real: more than there is."""
    calls = []

    def too_much(function):
        def call(*args, **kwargs):
            calls.append(0)
            if len(calls) == 4:
                jax.numpy.zeros(10**14)
            return function(*args, **kwargs)

        return call

    owner, name = {
        "step": (Passes, "forward_backward"),
        "update thread": (PartUpdates, "start"),
    }[where]
    monkeypatch.setattr(owner, name, too_much(getattr(owner, name)))
    out = tmp_path / "run"
    assert main(inputs.command(out, max_steps=6, save_steps=1)) == 1
    error = capsys.readouterr().err
    assert "Out of memory allocating" in error and "Traceback" not in error
    assert "--device_memory_budget" in error and "The plan was" in error
    monkeypatch.undo()
    inputs.train(out, max_steps=6, save_steps=1)
    assert len(losses(out)) == 6


@pytest.mark.thorough
def test_a_full_disk_is_called_one(inputs, tmp_path, capsys, monkeypatch):
    """TensorStore calls it RESOURCE_EXHAUSTED too, which is no lack of device memory."""

    def full(*_, **__):
        raise ValueError(
            "RESOURCE_EXHAUSTED: Error writing local file: No space left on device "
            "[os_error_code='28']"
        )

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", full)
    out = tmp_path / "run"
    assert main(inputs.command(out, max_steps=6, save_steps=2)) == 1
    error = capsys.readouterr().err
    assert "cannot be written: " in error and "No space left on device" in error
    assert "device_memory_budget" not in error and "Traceback" not in error
    assert list_steps(out / "checkpoints") == []
    monkeypatch.undo()
    (out / "checkpoints" / "step_00000002").mkdir()  # as a broken copy leaves it
    inputs.train(out, max_steps=6, save_steps=2)
    assert checkpoints(out) == [4, 6]
