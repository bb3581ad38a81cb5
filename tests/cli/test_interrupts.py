"""Ctrl-C at any time: a line, exit code 130, no traceback, nothing half written."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from runs import ROOT, checkpoints, tree_of

from slidedp_jax.interrupts import StopAtSignal

COMMAND = """
import importlib, os, signal, sys, time
from slidedp_jax.{command} import main
place, times, *words = sys.argv[1:]

def interrupted(*_, **__):
    for _ in range(int(times)):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
    time.sleep(100)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            interrupted()

if "." in place:
    owner, name = place.rsplit(".", 1)
    module, _, kind = owner.partition(":")
    owner = importlib.import_module(module)
    setattr(getattr(owner, kind) if kind else owner, name, interrupted)
else:
    sys.meta_path.insert(0, Finder())
sys.exit(main(words))
"""


def interrupt(inputs, place, times, words, command="train"):
    """Run a command that is interrupted where it calls or imports `place`: its last words."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(command=command), place, str(times), *words],
        cwd=ROOT,
        env=inputs.environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    *_, last = done.stderr.splitlines()
    assert last.startswith("stopped at once; ")
    return last.removeprefix("stopped at once; ")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("jax", "nothing was changed"),
        pytest.param(
            "slidedp_jax.run.checks.load_inputs",
            "last checkpoint: none",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "slidedp_jax.pretrained.load_parameters",
            "last checkpoint: none",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_before_training_one_is_enough_and_nothing_is_left(inputs, tmp_path, place, said):
    assert interrupt(inputs, place, 1, inputs.command(tmp_path / "out")) == said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("slidedp_jax.trainer:Trainer.step", marks=pytest.mark.thorough),
        "slidedp_jax.checkpoint.save_restore.write_record",
    ],
)
def test_a_second_one_ends_a_step_or_a_save_and_names_the_last_checkpoint(inputs, tmp_path, place):
    out = tmp_path / "out"
    inputs.train(out, max_steps=1)
    words = inputs.command(out, max_steps=3)
    saved = out / "checkpoints" / "step_00000001"
    assert interrupt(inputs, place, 2, words) == f"last checkpoint: {saved}"
    assert checkpoints(out) == [1] and not [p for p in tree_of(out) if ".partial" in p]
    inputs.train(out, max_steps=3)
    assert checkpoints(out) == [1, 3]


@pytest.mark.thorough
def test_an_export_ends_at_once_and_is_made_by_the_next_start(inputs, tmp_path):
    out = tmp_path / "out"
    words = inputs.command(out, max_steps=1, export=True)
    said = interrupt(inputs, "slidedp_jax.models.hf_export._write_shard", 1, words)
    assert said.endswith("step_00000001") and not list(out.glob(".*"))
    inputs.train(out, max_steps=1, export=True)
    assert (out / "export" / "model.safetensors").is_file()


@pytest.mark.thorough
def test_the_export_command_leaves_nothing(inputs, straight, tmp_path):
    words = [str(straight), str(tmp_path / "new")]
    place = "slidedp_jax.models.hf_export._write_shard"
    said = interrupt(inputs, place, 1, words, command="export")
    assert said == f"{tmp_path / 'new'} was not written" and list(tmp_path.iterdir()) == []


def test_the_first_is_a_request_where_that_is_possible(capfd):
    before = signal.getsignal(signal.SIGINT)
    with StopAtSignal() as stop:
        assert not stop.requested
        with stop.when_ready("soon"):
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 30
            while not stop.requested and time.monotonic() < deadline:
                time.sleep(0.01)
        assert stop.requested
    assert signal.getsignal(signal.SIGINT) == before and signal.set_wakeup_fd(-1) == -1
    assert capfd.readouterr().err == "soon\n"


def test_in_another_thread_signals_are_left_alone():
    seen = []

    def use():
        with StopAtSignal():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before]


def test_commands_take_signals_before_they_import_jax():
    """What a module imports at its top comes before its command can take any."""
    for name in ("train", "cli", "interrupts"):
        code = (
            f"import sys, slidedp_jax.{name}; print({{'jax', 'numpy', 'yaml'}} & {{*sys.modules}})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == "set()\n", name
