"""Stopping, killing and resuming the command against one run that was left alone."""

import json
import shutil
import signal

import numpy as np
import optax
import pytest
from runs import checkpoints, differing, losses, metrics, state, stop, tree_of, wait_for

from slidedp_jax import Trainer
from slidedp_jax.models.decoder import build
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.train import main


def cut_back(straight, out, step):
    """A copy of the straight run as if it had died after a checkpoint, with later metrics."""
    shutil.copytree(straight, out)
    shutil.rmtree(out / "export")
    for later in checkpoints(out):
        if later > step:
            shutil.rmtree(out / "checkpoints" / f"step_{later:08d}")
    return out


def assert_same(straight, out, step=12):
    assert losses(out)[:step] == losses(straight)[:step]
    assert differing(state(out, step), state(straight, step)) == []


def test_a_run_moves_every_parameter_and_its_loss_falls(straight):
    assert checkpoints(straight) == [2, 4, 6, 8, 10, 12]
    record = losses(straight)
    assert record[-1] < 0.8 * record[0]
    before, after = state(straight, 2), state(straight, 12)
    assert differing(before, after) == sorted(before)


def test_more_steps_of_the_same_command_continue_bitwise(inputs, straight, tmp_path, capsys):
    out = tmp_path / "run"
    inputs.train(out, max_steps=5)
    assert checkpoints(out) == [5]
    inputs.train(out)
    assert "at step 5" in capsys.readouterr().out
    assert checkpoints(out) == [5, 12]
    assert_same(straight, out)
    assert [m["row_ids"] for m in metrics(out)] == [m["row_ids"] for m in metrics(straight)]
    assert [m["num_tokens"] for m in metrics(out)] == [m["num_tokens"] for m in metrics(straight)]


@pytest.fixture(scope="module")
def warmed_up(inputs, tmp_path_factory):
    """Twenty steps, five of them warm-up, of a cosine."""
    out = tmp_path_factory.mktemp("warmed_up") / "run"
    inputs.train(out, **COSINE)
    (out / "export").mkdir()  # which `cut_back` removes
    return out


COSINE = {"max_steps": 20, "lr_scheduler_type": "cosine", "warmup_steps": 5}
COSINE |= {"save_steps": 3, "save_total_limit": 20}


@pytest.mark.thorough
@pytest.mark.parametrize("step", [3, 6, 18])
def test_rates_after_a_stop_are_those_of_the_unbroken_run(inputs, warmed_up, tmp_path, step):
    """Within warm-up, after it, and near the end."""
    rates = [m["learning_rate"] for m in metrics(warmed_up)]
    assert len(rates) == 20 and rates[0] == 0 and max(rates) == rates[5] == 1e-2
    out = cut_back(warmed_up, tmp_path / "run", step)
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:step]))
    inputs.train(out, **COSINE | {"save_steps": None})
    assert [m["learning_rate"] for m in metrics(out)] == rates
    assert_same(warmed_up, out, 20)


def test_a_moved_run_goes_on_where_it_is(inputs, straight, tmp_path, capsys, monkeypatch):
    """A copy, by a link and a relative path that ends in a slash; what it came from stays."""
    source = cut_back(straight, tmp_path / "source", 6)
    (tmp_path / "source" / "checkpoints" / "step_00000006" / "trainer.json").chmod(0o400)
    before = tree_of(source)
    shutil.copytree(source, tmp_path / "there" / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "there" / "copy")
    monkeypatch.chdir(tmp_path)
    inputs.train("link/")
    assert "at step 6" in capsys.readouterr().out
    assert_same(straight, tmp_path / "there" / "copy")
    assert tree_of(source) == before


def test_kill_after_a_checkpoint_loses_nothing(inputs, straight, tmp_path):
    out = cut_back(straight, tmp_path / "run", 2)
    settings = {"save_steps": 2, "save_total_limit": 6}
    process = inputs.start(out, **settings)
    wait_for(out / "checkpoints" / "step_00000004", process)
    code, _, _ = stop(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    inputs.train(out, **settings)
    assert_same(straight, out)
    # A killed save leaves a hidden folder, which the next save removes.
    assert not list((out / "checkpoints").glob(".*"))


@pytest.mark.thorough
def test_sigterm_saves_and_the_same_command_goes_on(inputs, straight, tmp_path):
    out = cut_back(straight, tmp_path / "run", 2)
    process = inputs.start(out, max_steps=5000, save_steps=5000)
    line = process.stdout.readline()
    while not line.startswith("step 4/"):
        assert line, process.communicate()[1]
        line = process.stdout.readline()
    code, _, stderr = stop(process, signal.SIGTERM)
    assert code == 75 and "Traceback" not in stderr
    last = checkpoints(out)[-1]
    assert last > 2 and len(losses(out)) == last
    inputs.train(out, max_steps=last + 2)
    assert len(losses(out)) == last + 2
    same = min(12, last + 2)
    assert losses(out)[:same] == losses(straight)[:same]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_devices", "layers_per_chunk"), [(3, 2), pytest.param(1, 3, marks=pytest.mark.thorough)]
)
def test_other_devices_and_chunks_continue(
    inputs, straight, tmp_path, num_devices, layers_per_chunk
):
    out = cut_back(straight, tmp_path / "run", 6)
    done = inputs.run(
        out,
        num_devices=num_devices,
        num_host_devices=num_devices,
        per_device_train_batch_size=24 // num_devices,
        layers_per_chunk=layers_per_chunk,
        rows_per_microbatch=4,
        save_total_limit=6,
        weight_route="shard_all_gather",
        gradient_route="host_sum" if num_devices > 1 else "reduce_scatter",
        verbose=True,
    )
    assert done.returncode == 0, done.stderr
    assert "shard_all_gather" in done.stdout
    assert "at step 6" in done.stdout
    np.testing.assert_allclose(losses(out), losses(straight), rtol=1e-6)
    assert [m["row_ids"] for m in metrics(out)] == [m["row_ids"] for m in metrics(straight)]
    end, expected = state(out, 12), state(straight, 12)
    for name, value in end.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-3 * scale, err_msg=name)


@pytest.mark.thorough
def test_another_batch_size_is_pointed_out(inputs, straight, tmp_path, capsys):
    out = cut_back(straight, tmp_path / "run", 6)
    inputs.train(out, max_steps=7, per_device_train_batch_size=6)
    said = capsys.readouterr().out
    assert "note: steps have 48 rows now, 24 before" in said
    assert "jumps" not in said  # at a constant rate a shorter run changes nothing
    assert len(metrics(out)[-1]["row_ids"]) == 48


@pytest.mark.thorough
def test_a_longer_run_says_that_the_learning_rate_jumps_and_may_be_cut_otherwise(
    inputs, tmp_path, capsys
):
    out = tmp_path / "run"
    inputs.train(out, max_steps=2, lr_scheduler_type="cosine")
    inputs.train(out, max_steps=3, lr_scheduler_type="cosine", loss_chunk_tokens=17)
    said = "the learning rate jumps here from 0 to 0.005: the run has 3 steps now, 2 before"
    assert said in capsys.readouterr().out
    record = json.loads((out / "run.json").read_text())
    assert record["plan"]["chosen"]["strategy"]["loss_chunk_tokens"] == 17
    assert len(losses(out)) == 3


def test_state_restored_into_other_chunks_is_bitwise(inputs, straight, tmp_path):
    saved = straight / "checkpoints" / "step_00000006"
    for num_devices, layers_per_chunk in ((1, 3), (2, 2)):
        strategy = Strategy(
            layers_per_chunk=layers_per_chunk,
            rows_per_microbatch=4,
            num_microbatches=1,
            compute_dtype="float32",
            num_host_devices=num_devices,
            block_size=512,
        )
        with Trainer(
            build(read_config(inputs.model)),
            optax.adamw(lambda count: 1e-2),  # a schedule, as the command makes
            strategy=strategy,
            num_devices=num_devices,
        ) as trainer:
            assert trainer.restore(saved).step == 6
            again = tmp_path / str(num_devices)
            trainer.save(again / "checkpoints")
        assert differing(state(again, 6), state(straight, 6)) == []


def test_incomplete_checkpoints_are_skipped_and_the_last_n_stay(inputs, straight, tmp_path, capsys):
    out = cut_back(straight, tmp_path / "run", 4)
    folder = out / "checkpoints"
    shutil.copytree(folder / "step_00000004", folder / "step_00000010")
    (folder / "step_00000010" / "trainer.json").unlink()
    shutil.copytree(folder / "step_00000004", folder / ".step_00000011.partial")
    inputs.train(out, save_steps=3, save_total_limit=2)
    assert "at step 4" in capsys.readouterr().out
    assert_same(straight, out)
    assert {9, 12} <= set(checkpoints(out)) <= {9, 10, 12}
    assert not (folder / ".step_00000011.partial").exists()


@pytest.mark.parametrize("max_steps", [10, pytest.param(8, marks=pytest.mark.thorough)])
def test_the_final_step_is_saved_once_and_a_rerun_changes_nothing(
    inputs, straight, tmp_path, capsys, max_steps
):
    out = cut_back(straight, tmp_path / "run", 6)
    settings = {"save_steps": 4, "max_steps": max_steps, "save_total_limit": 1}
    inputs.train(out, **settings)
    assert checkpoints(out) == [max_steps]
    before = tree_of(out)
    capsys.readouterr()
    inputs.train(out, **settings)
    assert (
        f"already complete: {max_steps} steps are done, {max_steps} are" in capsys.readouterr().out
    )
    after = tree_of(out)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name] and name != "run.json"] == []


def test_other_settings_are_refused_by_name_and_overwriting_starts_over(
    inputs, straight, tmp_path, capsys
):
    out = cut_back(straight, tmp_path / "run", 2)
    before = tree_of(out)
    words = inputs.command(out, learning_rate=2e-2, optim="lion", weight_decay=0.1)
    assert main(words) == 1
    error = capsys.readouterr().err
    for key in ("learning_rate was 0.01, now 0.02", "optim was", "weight_decay"):
        assert key in error
    assert "--overwrite_output_dir" in error and "seed" not in error
    assert tree_of(out) == before
    capsys.readouterr()
    inputs.train(out, learning_rate=2e-2, max_steps=3, overwrite_output_dir=True)
    assert checkpoints(out) == [3] and len(losses(out)) == 3
    assert losses(out)[0] == losses(straight)[0] and losses(out)[1:] != losses(straight)[1:3]


def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(
    inputs, straight, tmp_path, capsys
):
    out = tmp_path / "run"
    inputs.train(out, max_steps=2, save_steps=1)
    newest = out / "checkpoints" / "step_00000002"
    files = sorted(newest.rglob("0*"), key=lambda path: path.stat().st_size)
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert files and main(inputs.command(out, max_steps=3)) == 1
    message = capsys.readouterr().err
    assert "damaged" in message and f"move {newest} away" in message
    newest.rename(tmp_path / "damaged")
    inputs.train(out, max_steps=3)
    assert "at step 1" in capsys.readouterr().out
    np.testing.assert_allclose(losses(out), losses(straight)[:3], rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("flag", ["keep_activations", "resident_state"])
def test_a_run_goes_on_with_or_without_what_stays_on_devices(
    flag, inputs, straight, tmp_path, capsys
):
    """After too much device memory, dropping the flag must not cost the run."""
    out = tmp_path / "run"
    inputs.train(out, max_steps=2, **{flag: True})
    inputs.train(out, max_steps=4)
    assert "at step 2" in capsys.readouterr().out
    np.testing.assert_allclose(losses(out), losses(straight)[:4], rtol=1e-6)


def test_a_folder_with_other_files_is_left_alone(inputs, tmp_path, capsys):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("years of work")
    for overwrite in (False, True):
        assert main(inputs.command(out, overwrite_output_dir=overwrite)) == 1
        assert str(out) in capsys.readouterr().err
        assert [path.name for path in out.iterdir()] == ["chapter.txt"]
