"""The command on two hosts is the command on one with as many devices; and how its runs end."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
from many_hosts import Hosts, until
from runs import checkpoints, losses, metrics, write_model, write_rows
from safetensors.numpy import load_file

from slidedp_jax.checkpoint.record import RECORD
from slidedp_jax.whole_files import UNFINISHED

pytestmark = pytest.mark.thorough

SETTINGS = {
    "dtype": "bfloat16",
    "max_steps": 4,
    "save_steps": 2,
    "export": True,
    "ema_decay": 0.9,
    "eval_steps": 2,
}
ROUTES = {"weight_route": "shard_all_gather", "gradient_route": "reduce_scatter"}


def start(inputs, out, num_hosts=2, **settings) -> Hosts:
    """Hosts of eight devices in all; `{host}` in settings is each one's index."""
    each = 8 // num_hosts
    fields = SETTINGS | {"validation_file": inputs.rows} | settings
    words = inputs.command(out, **fields | {"num_devices": each, "num_host_devices": each})
    return Hosts(num_hosts, ["-m", "slidedp_jax.train", *words])


def alone(inputs, out, **settings) -> None:
    fields = SETTINGS | ROUTES | settings
    inputs.train(out, validation_file=inputs.rows, **fields)


@pytest.fixture(scope="module")
def single(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("single") / "run"
    alone(inputs, out)
    return out


def evaluations(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def test_two_hosts_leave_what_one_process_leaves(inputs, single, tmp_path):
    out = tmp_path / "run"
    hosts = start(inputs, out)
    assert hosts.wait(600) == [0, 0], hosts.text()
    assert "host 0 of 2" in hosts.output(0)
    assert "steps wait for each save: 2 hosts write it together" in hosts.output(0)
    assert "step 4/4" in hosts.output(0) and "step 4/4" not in hosts.output(1)
    assert checkpoints(out) == checkpoints(single) == [2, 4]
    assert losses(out) == losses(single)
    for name in ("row_ids", "num_tokens", "num_supervised_tokens", "grad_norm"):
        assert [m[name] for m in metrics(out)] == [m[name] for m in metrics(single)]
    assert evaluations(out) == evaluations(single)
    for folder in ("export", "export_ema"):
        ours, theirs = (load_file(run / folder / "model.safetensors") for run in (out, single))
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            assert np.array_equal(values.view(np.uint16), theirs[name].view(np.uint16)), name
    assert {path.name for path in out.iterdir()} == {path.name for path in single.iterdir()}
    strategy = json.loads((out / "run.json").read_text())["plan"]["chosen"]["strategy"]
    assert strategy["num_hosts"] == 2


@pytest.mark.parametrize("signalled", [0, 1])
def test_sigterm_to_one_saves_on_all_and_one_host_goes_on(inputs, single, tmp_path, signalled):
    out = tmp_path / "run"
    hosts = start(inputs, out, max_steps=5000, save_steps=5000, eval_steps=5000)
    until(lambda: "step 2/" in hosts.output(0), hosts, 400)
    hosts.processes[signalled].send_signal(signal.SIGTERM)
    assert hosts.wait(300) == [75, 75], hosts.text()
    last = checkpoints(out)[-1]
    assert len(losses(out)) == last >= 2
    alone(inputs, out, max_steps=last + 1)
    assert checkpoints(out)[-1] == last + 1
    assert losses(out)[: len(losses(single))] == losses(single)[: last + 1]


@pytest.mark.parametrize(("killed", "num_hosts"), [(0, 2), (1, 2), (2, 4)])
def test_a_killed_host_ends_all_in_a_minute_and_the_run_goes_on_from_its_checkpoint(
    inputs, single, tmp_path, killed, num_hosts
):
    out = tmp_path / "run"
    hosts = start(inputs, out, num_hosts, max_steps=5000, eval_steps=5000)
    until(lambda: (out / "checkpoints" / "step_00000002").exists(), hosts, 400)
    hosts.processes[killed].send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60  # as is promised
    try:
        for host in {*range(num_hosts)} - {killed}:
            assert hosts.processes[host].wait(max(0.0, deadline - time.monotonic())) != 0
            told = hosts.output(host)
            assert f"host {killed} (" in told or "coordination service" in told.lower(), told
    finally:
        hosts.kill()
    again = start(inputs, out, max_steps=checkpoints(out)[-1] + 1)
    assert again.wait(600) == [0, 0], again.text()
    known = len(losses(single))
    assert losses(out)[:known] == losses(single)[: len(losses(out))]


def test_a_run_goes_on_with_one_host_two_and_four_and_ends_as_if_one_had_made_it(
    inputs, single, tmp_path
):
    """On hosts as many as there are; what a save that was cut short has left goes."""
    out, plain = tmp_path / "run", {"eval_steps": 5000, "export": False, "save_steps": 1}
    alone(inputs, out, max_steps=1, **plain)
    for number, num_hosts in ((2, 2), (3, 4)):
        leave_a_save_cut_short(out, number)
        hosts = start(inputs, out, num_hosts, max_steps=number, **plain)
        assert hosts.wait(600) == [0] * num_hosts, hosts.text()
        assert "resuming from" in hosts.output(0)
    alone(inputs, out, max_steps=4, **plain)
    assert losses(out) == losses(single)
    assert checkpoints(out) == [3, 4]  # as many as are kept


def leave_a_save_cut_short(out, number):
    """As by a kill while hosts write `step_number`: full-sized files, and the sign of the start."""
    folder = out / "checkpoints"
    last = folder / f"step_{number - 1:08d}"
    shutil.copytree(last, folder / f".step_{number:08d}{UNFINISHED}")
    (folder / f".step_{number:08d}{UNFINISHED}" / RECORD).unlink()
    (out / f".hosts-0123{UNFINISHED}").write_text("0123")


def test_early_stopping_and_saves_by_the_clock_are_the_first_hosts_to_decide(inputs, tmp_path):
    out = tmp_path / "run"
    settings = {"eval_steps": 1, "early_stopping_patience": 2, "learning_rate": 0, "max_steps": 9}
    settings |= {"save_steps": 5000, "save_minutes": 1e-9}
    hosts = start(inputs, out, **settings)
    assert hosts.wait(600) == [0, 0], hosts.text()
    assert "stopping early at step 3: 2 evaluations without a lower eval_loss" in hosts.output(0)
    assert len(losses(out)) == 3 and checkpoints(out)[-1] == 3
    again = start(inputs, out, **settings)
    assert again.wait(600) == [0, 0], again.text()
    assert "stopping early at step 3" in again.output(0) and len(losses(out)) == 3


def test_a_run_that_is_under_way_keeps_its_folder(inputs, tmp_path):
    out = tmp_path / "run"
    running = start(inputs, out, max_steps=5000, save_steps=5000, eval_steps=5000)
    try:
        until(lambda: "step 1/" in running.output(0), running, 400)
        second = start(inputs, out)
        assert second.wait() == [1, 1], second.text()
        for host in range(2):
            assert "is in use by another run" in second.output(host)
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.wait(300) == [75, 75], running.text()
    finally:
        running.kill()


def write_what_differs(folder):
    """Models of other weights, and files of other rows: `model0`, `model1`, `rows0`, `rows1`."""
    for host in range(2):
        write_rows(folder / f"rows{host}.jsonl", 48 + host)
        weights = write_model(folder / f"model{host}") / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1000 - host] ^= 1  # within the last tensor
        weights.write_bytes(content)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learning_rate": "0.0{host}1"}, "hosts differ: learning_rate is 0.001 on host 0 ("),
        ({"export": "{host}"}, "hosts differ: export is False on host 0 ("),
        ({"train_file": "{here}/rows{host}.jsonl"}, "hosts differ: rows and tokenizer is"),
        ({"validation_file": "{here}/rows{host}.jsonl"}, "hosts differ: held-out rows is"),
        ({"model_name_or_path": "{here}/model{host}"}, "hosts differ: model.safetensors is"),
        ({"output_dir": "{here}/out{host}"}, "is not the folder that host 0 has by that name"),
    ],
)
def test_hosts_that_are_given_other_things_say_so_before_the_first_step(
    inputs, tmp_path, settings, text
):
    write_what_differs(tmp_path)
    settings = {name: value.replace("{here}", str(tmp_path)) for name, value in settings.items()}
    hosts = start(inputs, settings.pop("output_dir", tmp_path / "run"), **settings)
    assert hosts.wait() == [1, 1], hosts.text()
    for host in range(2):
        assert text in hosts.output(host), hosts.text()
    assert not list(tmp_path.glob("*/checkpoints")) and not list(tmp_path.glob("*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sample_prompts": ["a"]}, "sample_prompts is not for 2 hosts"),
        ({"optim": "muon"}, "optim is not for 2 hosts"),
        ({"weight_route": "replicate"}, "weight_route is replicate; each of 2 hosts"),
    ],
)
def test_what_several_hosts_cannot_is_refused_by_name(inputs, tmp_path, settings, text):
    hosts = start(inputs, tmp_path / "run", **settings)
    assert hosts.wait() == [1, 1], hosts.text()
    assert text in hosts.output(0)
