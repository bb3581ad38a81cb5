"""Hosts that train together equal one process with as many devices.

Two processes with two devices each, or four with one, beside this one with four. The state's pieces
are the same, and so are all programs of the devices but for who carries out the collectives.
Gathers and exchanges move bits, so where gradients are exchanged and summed where they arrive
(bfloat16, one microbatch), results agree in every bit. A reduce-scatter in float32 adds in an order
that is its own: there weights agree to rounding.
"""

import json
import signal

import numpy as np
import pytest
from host_worker import train
from lanes import mostly_thorough
from many_hosts import Hosts
from streamed_training import small_config, strategy

from slidedp_jax.checkpoint.contents import items_of, verify
from slidedp_jax.jax_internals import read_arrays
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.stated_machine import Stated, machine
from slidedp_jax.planner.workload import BatchShape, Workload

WORKER = "tests/training/host_worker.py"

BASE = {
    "weight_route": "shard_all_gather",
    "gradient_route": "reduce_scatter",
    "rows_per_microbatch": 4,
}
BF16 = BASE | {"compute_dtype": "bfloat16"}
CASES = {
    "bf16": {"strategy": BF16, "clip": 0.7},
    "eager": {"strategy": BF16 | {"update_policy": "eager"}},
    "packed_tied": {"strategy": BF16, "packed": True, "tied": True, "clip": 0.7},
    "resident": {
        "strategy": BF16 | {"resident_chunks": 3, "kept_chunks": 1},
        "clip": 0.7,
        "ema_decay": 0.9,
        "steps": [0, 2],
    },
    "chunks_of_two": {
        "strategy": BF16 | {"layers_per_chunk": 2, "prefetch_depth": 2},
        "clip": 100.0,
        "rounding": "nearest",
    },
    "frozen": {"strategy": BF16, "frozen": ["model.layers.0.*", "*norm*"], "clip": 0.7},
    "boundaries": {
        "strategy": BF16 | {"host_boundaries": 2, "host_boundary_bytes": 4 * 12 * 32 * 2},
        "clip": 0.7,
    },
    "odd_rows": {"strategy": BF16, "rows": 5, "clip": 0.7},
    "accumulated": {
        "strategy": BF16 | {"rows_per_microbatch": 1, "num_microbatches": 4},
        "clip": 0.7,
    },
    "float32": {"strategy": BASE | {"compute_dtype": "float32"}, "clip": 0.7, "tied": True},
    "float32_accumulated_resident": {
        "strategy": BASE
        | {
            "compute_dtype": "float32",
            "rows_per_microbatch": 2,
            "num_microbatches": 2,
            "resident_chunks": 2,
        },
        "packed": True,
        "clip": 0.7,
    },
}
IN_EVERY_BIT = {name for name in CASES if "float32" not in name} - {"accumulated"}


ELASTIC = {
    "strategy": BF16 | {"resident_chunks": 1},
    "clip": 0.7,
    "ema_decay": 0.9,
    "packed": True,
}


@pytest.mark.thorough
def test_checkpoints_go_from_two_hosts_to_one_to_four(tmp_path):
    """As if one process had made all steps; and plain Orbax reads what two hosts have written."""
    straight = train(ELASTIC | {"steps": [0, 3], "host_devices": 8}, 1, num_devices=4)
    folder = str(tmp_path / "checkpoints")
    run(ELASTIC | {"steps": [0, 1], "save": folder}, 2, tmp_path / "two.npz")
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    assert verify(checkpoint)[1] == []
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == [checkpoint.name]
    two = dict(np.load(tmp_path / "two.npz"))
    for item in items_of(checkpoint):
        for name, arrays in read_arrays(item).items():
            np.testing.assert_array_equal(arrays["master"], two[f"weights/{name}"])
    one = ELASTIC | {"steps": [1, 2], "host_devices": 8, "restore": folder, "save": folder}
    train(one, 1, num_devices=4)
    four = run(ELASTIC | {"steps": [2, 3], "restore": folder}, 4, tmp_path / "four.npz")
    for key in (key for key in straight if "/" in key):
        assert np.asarray(straight[key]).tobytes() == four[key].tobytes(), key
    assert straight["losses"][-1] == four["losses"][-1]


@pytest.mark.thorough
def test_a_folder_of_each_host_is_refused_before_anything_is_written(tmp_path):
    case = ELASTIC | {"steps": [0, 1], "save": str(tmp_path / "host-{NODE_RANK}")}
    hosts = start(case, 2, tmp_path / "none.npz")
    assert hosts.wait() == [1, 1], hosts.text()
    assert "is not the folder that host 0 has by that name" in hosts.output(1)
    assert "host 1: " in hosts.output(0) or "host 1 (" in hosts.output(0)
    assert not any((tmp_path / "host-0").iterdir())
    assert not (tmp_path / "host-1").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
def test_a_host_killed_amid_a_save_leaves_no_checkpoint_and_the_next_save_is_whole(
    killed, tmp_path
):
    case = ELASTIC | {"steps": [0, 1], "save": str(tmp_path / "checkpoints")}
    hosts = start(case | {"killed_in_save": killed}, 2, tmp_path / "none.npz")
    codes = hosts.wait()
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] != 0, hosts.text()
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert all(name.startswith(".step_") for name in left), left
    assert left or killed  # the first host tidies up where it can
    run(case, 2, tmp_path / "again.npz")
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    assert verify(checkpoint)[1] == []
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"clip": 0.7}, "max_grad_norm is None on host 0 ("),
        ({"learning_rate": 2e-3}, "the optimizer is "),
    ],
)
def test_trainers_that_differ_are_refused_by_what_differs(changes, name, tmp_path):
    hosts = start({"strategy": BF16, "others_on": [1, changes]}, 2, tmp_path / "none.npz")
    assert hosts.wait() == [1, 1], hosts.text()
    for host in range(2):
        assert f"hosts differ: {name}" in hosts.output(host), hosts.text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"max_loss": 0.01}, ["step 1: the loss is", "No parameter was updated"]),
        ({"poisoned": True}, ["the gradient norm is nan", "non-finite gradient on this host is"]),
        ({"other_rows_on": 1}, ["step 2: hosts were given different rows (the devices from 2"]),
    ],
)
def test_all_hosts_stop_at_a_bad_step(changes, texts, tmp_path):
    hosts = start({"strategy": BF16, "clip": 0.7} | changes, 2, tmp_path / "none.npz")
    assert hosts.wait() == [1, 1], hosts.text()
    for text in texts:
        assert any(text in hosts.output(host) for host in range(2)), hosts.text()


@pytest.mark.thorough
def test_all_hosts_leave_out_the_same_steps(tmp_path):
    case = {"strategy": BF16, "clip": 0.7, "max_loss": 4.5, "on_nonfinite": "skip"}
    alone = train(case | {"host_devices": 8}, 1, num_devices=4)
    together = run(case, 2, tmp_path / "together.npz")
    for key in alone.keys() - {"bytes"}:
        assert np.asarray(alone[key]).tobytes() == together[key].tobytes(), key


def start(case, num_hosts, file):
    case = case | {"devices": 4 // num_hosts, "host_devices": 8 // num_hosts}
    return Hosts(num_hosts, [WORKER, json.dumps(case), str(file)])


def run(case, num_hosts, file):
    hosts = start(case, num_hosts, file)
    assert hosts.wait() == [0] * num_hosts, hosts.text()
    return dict(np.load(file))


def check_threads(dispatched):
    """Other threads than the one that issues steps run at their own pace.

    What they dispatch must not wait for another host.
    """
    assert {"all-gather", "none"} <= set(dispatched.pop("MainThread"))
    assert "host_update" in dispatched
    for thread, kinds in dispatched.items():
        assert kinds == ["none"], thread


def check_network(case, num_hosts, network):
    """What a step's collectives bring into each host is what the planner counts, to the byte.

    Beside that there is the small gather at the end, of losses, sums of squares and flags.
    """
    config = small_config(tied=case.get("tied", False), layers=2)
    strategy_ = strategy(num_hosts=num_hosts, num_host_devices=8 // num_hosts, **case["strategy"])
    rows = BatchShape(num_rows=case.get("rows", 16), seq_length=12)
    hardware = machine("h100", 4 // num_hosts, Stated(), num_hosts=num_hosts)
    durations = chunk_durations(Workload.from_config(config), rows, strategy_, hardware)
    *of_chunks, last = network
    planned = sum(chunk.network_bytes for chunk in durations)
    if "frozen" in case:  # plans take all parameters for trained
        assert 0 < sum(of_chunks) < planned
    else:
        assert sum(of_chunks) == planned
    assert 0 < last < 1000


@pytest.mark.parametrize("name", mostly_thorough(CASES, {"resident"}))
@pytest.mark.parametrize("num_hosts", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_hosts_equal_one_process_with_as_many_devices(name, num_hosts, tmp_path):
    alone = train(CASES[name] | {"host_devices": 8}, 1, num_devices=4)
    together = run(CASES[name], num_hosts, tmp_path / "together.npz")
    check_threads(json.loads(str(together.pop("dispatched"))))
    check_network(CASES[name], num_hosts, together.pop("network"))
    assert alone.keys() == together.keys()
    np.testing.assert_array_equal(alone["bytes"], num_hosts * together["bytes"])
    del alone["bytes"]
    for key, expected in alone.items():
        if name in IN_EVERY_BIT:
            assert np.asarray(expected).tobytes() == together[key].tobytes(), key
        else:
            scale = np.abs(expected).max() or 1.0
            np.testing.assert_allclose(
                together[key] / scale, expected / scale, rtol=0, atol=2e-5, err_msg=key
            )
