"""The command on two hosts is the command on one with as many devices; and how its runs end."""

import json
import signal

import numpy as np
import pytest
from many_hosts import Hosts, until
from runs import checkpoints, losses, metrics
from safetensors.numpy import load_file

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


def start(inputs, out, **settings) -> Hosts:
    """Two hosts of four devices each."""
    fields = SETTINGS | {"num_devices": 4, "num_host_devices": 4} | settings
    words = inputs.command(out, validation_file=inputs.rows, **fields)
    return Hosts(2, ["-m", "slidedp_jax.train", *words])


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


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_ends_both_and_the_run_goes_on_from_its_checkpoint(
    inputs, single, tmp_path, killed
):
    out = tmp_path / "run"
    hosts = start(inputs, out, max_steps=5000, eval_steps=5000)
    until(lambda: (out / "checkpoints" / "step_00000002").exists(), hosts, 400)
    hosts.processes[killed].send_signal(signal.SIGKILL)
    try:
        assert hosts.processes[1 - killed].wait(60) != 0
    finally:
        hosts.kill()
    again = start(inputs, out, max_steps=checkpoints(out)[-1] + 1)
    assert again.wait(600) == [0, 0], again.text()
    known = len(losses(single))
    assert losses(out)[:known] == losses(single)[: len(losses(out))]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sample_prompts": ["a"]}, "sample_prompts is not for 2 hosts"),
        ({"save_minutes": 1}, "save_minutes is not for 2 hosts"),
        ({"optim": "muon"}, "optim is not for 2 hosts"),
        ({"weight_route": "replicate"}, "weight_route is replicate; each of 2 hosts"),
    ],
)
def test_what_several_hosts_cannot_is_refused_by_name(inputs, tmp_path, settings, text):
    hosts = start(inputs, tmp_path / "run", **settings)
    assert hosts.wait(120) == [1, 1], hosts.text()
    assert text in hosts.output(0)
