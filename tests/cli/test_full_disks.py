"""Disks that are too small: said before anything expensive, and in one line when it comes late."""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import subprocess

import pytest
from runs import checkpoints, losses
from safetensors.numpy import load_file

from slidedp_jax.disk_room import DiskFull, write_rate, writing
from slidedp_jax.pretrained import Pretrained
from slidedp_jax.run.metrics_file import MetricsFile
from slidedp_jax.train import main

SETTINGS = {"max_steps": 4, "save_steps": 2, "layers_per_chunk": 3}


@pytest.fixture
def small_disk(tmp_path):
    """A disk of so many bytes, mounted within the test's folder."""
    with contextlib.ExitStack() as stack:

        def mount(size):
            folder = tmp_path / "disk"
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip("nothing can be mounted here")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mount


@pytest.fixture
def free(monkeypatch):
    """Tell the command how much is free."""
    return lambda size: monkeypatch.setattr("slidedp_jax.run.disk.free_bytes", lambda _: size)


def planned(inputs, out, capsys, **settings):
    """Exit code of a dry run and what it says of the disk."""
    code = main(inputs.command(out, dry_run=True, **SETTINGS | settings))
    said, error = capsys.readouterr()
    lines = [line for line in said.splitlines() if not line.startswith("memory ")]
    return code, "\n".join(line for line in lines if "disk" in line), error


def sizes(straight):
    """Bytes of a checkpoint's arrays, and of an export's weights in bfloat16."""
    record = json.loads((straight / "run.json").read_text())["disk"]
    return record["checkpoint_bytes"], record["export_bytes"]


def test_what_is_planned_is_what_is_written(inputs, straight):
    planned, export = sizes(straight)
    folder = straight / "checkpoints" / "step_00000012"
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert planned <= written < 1.4 * planned + 100_000  # beside arrays, names and places
    exported = (straight / "export" / "model.safetensors").stat().st_size
    assert export <= exported < export + 10_000
    record = json.loads((straight / "run.json").read_text())["disk"]
    assert record["most_checkpoints"] == 6 and record["free_bytes"] > 1e6


def test_the_plan_says_what_it_needs_and_what_is_free(inputs, straight, tmp_path, capsys, free):
    out = tmp_path / "new" / "run"
    free(2**40)
    code, said, _ = planned(inputs, out, capsys, export=True)
    one, export = sizes(straight)
    assert code == 0 and said.startswith(f"disk: {(2 * one + export) / 2**20:.2f}")
    assert f"2 checkpoints of {one / 2**20:.2f} MiB (1 kept, one being written) and" in said
    assert said.endswith(f"1024.00 GiB free in {tmp_path}") and not out.parent.exists()
    _, said, _ = planned(inputs, out, capsys, save_steps=None, save_at_end=False)
    assert said == "disk: nothing is saved or exported"
    _, said, _ = planned(inputs, out, capsys, ema_decay=0.9, save_steps=1, save_total_limit=3)
    assert "4 checkpoints of" in said and f"{one * 16 / 12 / 2**20:.2f} MiB" in said
    assert "export" not in said
    code, said, _ = planned(inputs, out, capsys, hardware="h200", dtype="bfloat16")
    assert code == 0 and "free" not in said


def test_no_room_for_one_checkpoint_and_the_export_is_an_error(
    inputs, straight, tmp_path, capsys, free
):
    one, export = sizes(straight)
    out = tmp_path / "run"
    for room, settings in ((one + export - 1, {"export": True}), (one - 1, {})):
        free(room)
        for dry_run in (True, False):
            assert main(inputs.command(out, dry_run=dry_run, **SETTINGS | settings)) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"error: output_dir {out} has no room for a checkpoint of")
            assert f"{room / 2**20:.2f} MiB are free" in error and "\n" not in error.strip()
            assert not out.exists()
    free(one)
    assert planned(inputs, out, capsys, save_steps=None)[::2] == (0, "")


@pytest.mark.parametrize(
    ("room", "limit", "said"),
    [
        (3.1, 2, None),
        (2.9, 2, "at the save of step 3 or soon after, unless there is more by then; "
                 "--save_total_limit 1 fits"),
        (1.9, 1, "at the save of step 2 or soon after, unless there is more by then; "
                 "--save_steps null"),
    ],
)  # fmt: skip
def test_a_limit_that_cannot_be_kept_is_noted(
    inputs, straight, tmp_path, capsys, free, room, limit, said
):
    free(room * sizes(straight)[0])
    settings = {"save_steps": 1, "save_total_limit": limit}
    code, notes, _ = planned(inputs, tmp_path / "run", capsys, **settings)
    assert code == 0 and notes.count("note: ") == (said is not None)
    assert said is None or said in notes


def test_what_is_there_counts(inputs, straight, tmp_path, capsys, free):
    """A resumed run writes beside what it keeps; one that replaces another gets its room later."""
    one, _ = sizes(straight)
    out = shutil.copytree(straight, tmp_path / "run")
    for path in (out / "checkpoints").iterdir():
        if path.name > "step_00000002":
            shutil.rmtree(path)
    free(one - 1)
    assert planned(inputs, out, capsys)[0] == 1  # one is there, one more is to be written
    free(one)
    code, said, _ = planned(inputs, out, capsys, save_total_limit=1)
    assert code == 0 and "2 checkpoints" in said and "note" not in said
    assert "note" in planned(inputs, out, capsys, save_total_limit=2, save_steps=1)[1]
    replaced = {"overwrite_output_dir": True, "learning_rate": 0.5, "export": True}
    assert planned(inputs, out, capsys, **replaced)[0] == 0
    free(one - 1)
    assert planned(inputs, out, capsys, **replaced)[0] == 1
    free(0)
    assert planned(inputs, straight, capsys, max_steps=12, export=True)[0] == 0  # all is there


def test_how_long_saves_take_the_disk(inputs, straight, tmp_path, capsys, monkeypatch):
    """By what it writes now, or as assumed of another machine's."""
    one, export = sizes(straight)
    monkeypatch.setattr("slidedp_jax.run.disk.LARGE_BYTES", one)
    monkeypatch.setattr("slidedp_jax.run.disk.write_rate", lambda _: (2 * one + export) / 30)
    settings = SETTINGS | {"export": True, "dry_run": True}
    assert main(inputs.command(tmp_path / "run", **settings)) == 0
    said = capsys.readouterr().out
    size = f"{one / 2**20:.2f} MiB"
    assert f"; the disk takes 30.0 s for 2 saves of {size} and the export (" in said
    assert "GB/s, measured just now)" in said
    other = settings | {"hardware": "h200", "dtype": "bfloat16", "layers_per_chunk": "null"}
    assert main(inputs.command(tmp_path / "run", **other)) == 0
    assert "(1.5 GB/s, assumed)" in capsys.readouterr().out


def test_the_rate_is_that_of_the_disk_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("slidedp_jax.disk_room._MOST_BYTES", 2**20)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("slidedp_jax.disk_room.time.perf_counter", lambda: next(clock))
    assert write_rate(tmp_path / "not" / "yet") == 2**25 / 2
    assert not list(tmp_path.iterdir())


def fill_up(disk, leave):
    """Take what is free on a disk but for so many bytes; returns a function that gives it back."""
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(b"x" * (free - int(leave)))
    return (disk / "filler").unlink


def filled_while_running(inputs, out, disk, leave, **settings):
    """The command, whose disk others fill at its second step: exit code, stdout, stderr."""
    process = inputs.start(out, **settings)
    said = []
    while not (said and said[-1].startswith("step 2/")):
        said.append(process.stdout.readline())
        assert said[-1], process.communicate()[1]
    empty = fill_up(disk, leave)
    rest, error = process.communicate(timeout=600)
    empty()
    return process.returncode, "".join(said) + rest, error


@pytest.mark.thorough
def test_a_last_save_that_does_not_fit_is_one_line_and_the_weights_are_exported(
    inputs, straight, small_disk
):
    """In a process of its own: what Orbax's threads print is not this process's."""
    one, _ = sizes(straight)
    disk = small_disk(int(6 * one))
    out = disk / "run"
    settings = {"max_steps": 12, "save_steps": None, "layers_per_chunk": 1}
    code, said, error = filled_while_running(inputs, out, disk, 0.6 * one, **settings)
    assert code == 1 and "the weights are exported instead" in said
    assert len(error.splitlines()) == 2, error
    first, second = error.splitlines()
    target = out / "checkpoints" / "step_00000012"
    assert f"{target} cannot be written: No space left on device: it needs " in first
    assert first.endswith(f"MiB are free in {target.parent}") and "export" in second
    assert list(target.parent.iterdir()) == []
    weights = load_file(out / "export" / "model.safetensors")
    inputs.train(out, **settings | {"export": True})
    assert checkpoints(out) == [12]
    again = load_file(out / "export" / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(weights[name].tobytes() == again[name].tobytes() for name in weights)


@pytest.mark.thorough
def test_a_save_in_the_middle_that_does_not_fit_ends_the_run_which_goes_on_later(
    inputs, straight, small_disk
):
    one, _ = sizes(straight)
    disk = small_disk(int(6 * one))
    out = disk / "run"
    settings = {"max_steps": 12, "save_steps": 6, "layers_per_chunk": 1}
    code, _, error = filled_while_running(inputs, out, disk, 0.6 * one, **settings)
    assert code == 1 and len(error.splitlines()) == 1 and "it needs" in error
    assert not (out / "export").exists() and list((out / "checkpoints").iterdir()) == []
    inputs.train(out, **settings)
    assert checkpoints(out) == [6, 12] and len(losses(out)) == 12


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_a_path_wherever_it_comes(
    inputs, straight, tmp_path, capsys, monkeypatch
):
    """At the export, at metrics.jsonl, at run.json; and what is there stays."""
    out = shutil.copytree(straight, tmp_path / "run")
    weights = (out / "export" / "model.safetensors").read_bytes()
    for where, named in (
        ("slidedp_jax.models.hf_export._write_shard", "export"),
        ("slidedp_jax.whole_files.os.fsync", "run.json"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, no_room)
            words = inputs.command(out, max_steps=12, export=True, export_dtype="float32")
            assert main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"{out}\S*{named}\S* cannot be written: No space left on device", line)
        assert (out / "export" / "model.safetensors").read_bytes() == weights
    assert not list(out.glob(".*"))


def test_metrics_that_do_not_fit_name_their_file(tmp_path, small_disk):
    path = small_disk(8192) / "metrics.jsonl"
    file = MetricsFile(path)
    with pytest.raises(
        DiskFull, match=r"metrics\.jsonl cannot be written: No space left"
    ) as caught:
        for _ in range(1000):
            file.write({"text": "x" * 1000})
    assert caught.value.errno == errno.ENOSPC
    file.close()
    with pytest.raises(OSError, match=r"nowhere"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl")


def test_a_partly_written_line_is_finished(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path / "metrics.jsonl")

    class Slow(io.RawIOBase):
        def write(self, data):
            return whole.write(data[:3])

    whole, file._stream = file._stream, Slow()
    file.write({"loss": 1.5})
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"loss": 1.5')
    whole.close()


def test_other_errors_get_a_path_and_keep_their_number(tmp_path):
    with pytest.raises(OSError, match="weights") as caught, writing(tmp_path / "weights"):
        raise OSError(errno.EIO, "Input/output error")
    assert caught.value.errno == errno.EIO
    said = r"quota exceeded: it needs 3\.00 GiB"
    with pytest.raises(DiskFull, match=said), writing(tmp_path / "weights", 3 * 2**30):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


# An output folder that cannot be written.


def never(*_, **__):
    raise AssertionError("the command went on")


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("where", ["/proc/x/y", "file/run", "readonly/new"])
def test_an_output_folder_that_cannot_be_written_is_found_first(
    inputs, tmp_path, capsys, monkeypatch, small_disk, where, dry_run
):
    monkeypatch.setattr("slidedp_jax.run.checks.load_inputs", never)
    (tmp_path / "file").write_text("")
    if where.startswith("readonly"):
        disk = small_disk("1m")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        where = "disk/new"
    out = tmp_path / where
    assert main(inputs.command(out, dry_run=dry_run)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: output_dir {out} cannot be written: ")
    assert not out.exists()


@pytest.mark.parametrize("there", [True, False])
def test_trying_a_folder_leaves_nothing(inputs, tmp_path, there):
    out = tmp_path / "a" / "b"
    if there:
        out.mkdir(parents=True)
    assert main(inputs.command(out, dry_run=True)) == 0
    assert out.exists() == there and (not there or not list(out.iterdir()))
    assert (tmp_path / "a").exists() == there


def test_a_new_folder_is_locked_before_weights_are_read(inputs, tmp_path, capsys, monkeypatch):
    """Else two runs that begin at once read them for nothing."""
    out = tmp_path / "run"
    codes = []

    def second(self, write):
        codes.append(main(inputs.command(out)))
        raise OSError("enough")

    monkeypatch.setattr(Pretrained, "load_parameters", second)
    assert main(inputs.command(out)) == 1
    assert codes == [1] and "is in use by another run" in capsys.readouterr().err
    assert not out.exists()
