"""What is wrong with a command is said in one paragraph, before anything expensive or written."""

import json
import shutil
from functools import partial

import pytest

import slidedp_jax.run.loop  # noqa: F401  or the command imports it while `_never` is in its place
from slidedp_jax import this_machine
from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.run.lock import RunLock
from slidedp_jax.train import main

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture
def refused(inputs, tmp_path, capsys, monkeypatch):
    """Run the command with a file of `text`: exit code and stderr; weights must not be read."""

    def run(text=None, *, code=1, **settings):
        out = tmp_path / "out"
        if text is not None:
            path = tmp_path / "train.jsonl"
            path.write_text(text)
            settings = {"train_file": path} | settings
        with monkeypatch.context() as patch:
            patch.setattr("slidedp_jax.models.hf_load.load_parameters", _never)
            patch.setattr("slidedp_jax.trainer.Trainer.__init__", _never)
            assert main(inputs.command(out, **settings)) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "Traceback" not in error
        assert "\n\n" not in error.strip()
        assert not out.exists()
        return error

    return run


def _never(*_, **__):
    raise AssertionError("the command went on to the weights")


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_files(refused, tmp_path):
    for setting in ("train_file", "validation_file"):
        assert "nowhere.jsonl" in refused(**{setting: tmp_path / "nowhere.jsonl"})
    assert "train.jsonl" in refused("")


def test_rows(refused):
    error = refused(lines(*[CHAT] * 23) + '{"messages": [\n')
    assert "train.jsonl:24" in error
    for content in (None, [], [{"role": "owl", "content": "hoo"}]):
        error = refused(lines(*[CHAT] * 30, {"messages": content}))
        assert "train.jsonl:31" in error and "messages" in error


def test_nothing_to_learn(refused):
    rows = [{"prompt": "p" * 100, "completion": "c" * 5}] * 30
    error = refused(lines(*rows), max_seq_length=64)
    assert "max_seq_length" in error and "30" in error


def test_fewer_rows_than_a_step_names_the_numbers(refused):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    error = refused(lines(CHAT, CHAT, CHAT), max_steps=5, **settings)
    for number in ("3", "2", "4", "8", "64"):
        assert number in error
    assert "lower the micro batch, the accumulation" in error


def test_ids_beyond_the_vocabulary(refused):
    error = refused(lines(*[{"input_ids": [1, 2, 3]}] * 24, {"input_ids": [5, 272]}))
    assert "272" in error and "train.jsonl:25" in error


def test_a_plan_that_does_not_fit(refused):
    error = refused(device_memory_budget=0.00001)
    assert "MiB" in error or "GiB" in error


def test_broken_model_folders(refused, inputs, tmp_path):
    assert "nowhere" in refused(model_name_or_path=tmp_path / "nowhere")
    broken = shutil.copytree(inputs.model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    assert "model.safetensors" in refused(model_name_or_path=broken)
    weights.unlink()
    assert "safetensors" in refused(model_name_or_path=broken)
    weights.write_bytes(whole)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
    assert "q_proj" in refused(model_name_or_path=broken)
    (broken / "config.json").write_text("{")
    assert "config.json" in refused(model_name_or_path=broken)
    (broken / "config.json").unlink()
    assert "config.json" in refused(model_name_or_path=broken)


def test_a_template_that_is_missing(refused, tmp_path):
    assert "nowhere.jinja" in refused(chat_template_path=tmp_path / "nowhere.jinja")


def test_settings(refused):
    refused(code=2, learning_rate="fast")
    refused(code=2, lr_scheduler_type="cosin")
    refused(code=2, weigth_decay=0.1)
    for setting in ("loss_on", "over_long", "truncation_keep", "export_dtype", "attention"):
        assert setting in refused(code=2, **{setting: "sideways"})
    assert "hardware" in refused(code=2, hardware="h200")


@pytest.mark.thorough
def test_a_column_of_processes_ends_without_traceback(inputs, tmp_path):
    """The same in a process of its own: what a shell sees."""
    done = inputs.run(tmp_path / "out", train_file=tmp_path / "nowhere.jsonl")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1


def test_a_kernel_that_cannot_run_here(refused):
    assert "the platform is cpu, cuDNN needs cuda" in refused(attention="cudnn")


def test_a_stated_budget_is_what_may_be_used(inputs, tmp_path, capsys, monkeypatch):
    """Less than there is, and more than the kernel reports: machines may grow as they are used."""
    machine = tmp_path / "machine"
    (machine / "proc").mkdir(parents=True)
    (machine / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    monkeypatch.setattr(
        this_machine, "available_host_memory", partial(available_host_memory, machine)
    )

    def plan(gib):
        code = main(inputs.command(tmp_path / "out", dry_run=True, host_memory_budget=gib))
        return code, *capsys.readouterr()

    for gib in (3, 4, 100):
        code, printed, _ = plan(gib)
        assert code == 0 and f"of {gib}.00 GiB, " in printed
        assert ("physical memory as stated" in printed) == (gib == 100)
    (machine / "proc/self").mkdir()
    (machine / "proc/self/cgroup").write_text("0::/\n")
    (machine / "sys/fs/cgroup").mkdir(parents=True)
    (machine / "sys/fs/cgroup/memory.max").write_text(f"{16 * 2**30}\n")
    (machine / "sys/fs/cgroup/memory.current").write_text("0\n")
    code, _, error = plan(100)
    assert code == 1 and "host memory budget is 100.00 GiB" in error and "has 16.00 GiB" in error


def test_what_does_not_do_what_one_might_expect_is_noted(inputs, tmp_path, capsys):
    settings = {"eval_steps": 1, "warmup_steps": 50, "max_seq_length": 100_000, "packing": True}
    settings |= {"per_device_train_batch_size": 1, "rows_per_microbatch": 1, "max_steps": 3}
    rows = tmp_path / "long.jsonl"
    rows.write_text(lines(*[{"text": "word " * 9000}] * 24))
    command = inputs.command(tmp_path / "out", dry_run=True, train_file=rows, **settings)
    assert main(command) == 0
    printed = capsys.readouterr().out
    for what in ("eval_steps without validation_file", "the peak learning rate is never reached"):
        assert f"note: {what}" in printed or what in printed
    assert "(max_position_embeddings)" in printed


def test_a_folder_in_use_is_left_alone(refused, inputs, tmp_path, capsys):
    out = tmp_path / "busy"
    inputs.train(out, max_steps=2)
    held = RunLock(out)
    held.acquire()
    before = sorted(path.name for path in out.iterdir())
    capsys.readouterr()
    for more in ({}, {"overwrite_output_dir": True}):
        assert main(inputs.command(out, max_steps=3, **more)) == 1
        assert "is in use by another run" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == before
    held.release()
    inputs.train(out, max_steps=3)


def test_dry_run_writes_nothing(inputs, tmp_path, capsys):
    assert main(inputs.command(tmp_path / "out", dry_run="true")) == 0
    assert "memory of each device" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_rows_for_evaluation_are_reported_like_those_for_training(inputs, tmp_path, capsys):
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"messages": [*said[:1], said[1] | {"reasoning": "why"}]},
        {"messages": []},
        {"messages": said[:1]},
        {"prompt": "p", "completion": "long " * 99},
    ]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(lines(*rows))
    command = inputs.command(
        tmp_path / "out", dry_run=True, validation_file=held_out, skip_bad_rows=True
    )
    assert main(command) == 0
    training, evaluation = capsys.readouterr().out.split("for evaluation\n")
    assert f"data     {inputs.rows}" in training and "48 rows in, 48 kept" in training
    for part in (
        f"data     {held_out}",
        "4 rows in, 2 kept, 2 dropped, 1 truncated",
        "1 dropped: malformed",
        "1 dropped: conversations without an assistant message",
        f"skipped  {held_out}:2: `messages` must be a list",
        f"note     {held_out}: the reasoning of 1 of 1 assistant messages",
    ):
        assert part in evaluation
