"""Asking before buying: other machines as they are, what would fit, and no weights for it."""

import importlib.util
import json
import re
import shutil
import sys
import types

import pytest

from slidedp_jax import UserError, plan_for
from slidedp_jax.models.config import named_config
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.run.checks import load_inputs, make_plan
from slidedp_jax.train import main

OTHER = {"dry_run": True, "hardware": "rtx4090", "layers_per_chunk": "null"}
OTHER |= {"rows_per_microbatch": "null", "dtype": "bfloat16"}


@pytest.fixture
def asked(inputs, tmp_path, capsys):
    """Exit code, stdout and stderr of a command."""

    def run(**settings):
        code = main(inputs.command(tmp_path / "out", **settings))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_another_machine_is_as_it_is_stated(asked):
    code, said, _ = asked(**OTHER)
    assert code == 0
    assert "host: 128 cores, 960.00 GiB, 25 GB/s to each GPU and back (assumed; --host" in said
    stated = {"host_memory_gib": 125, "host_cores": 8, "link_gb_per_s": 12, "device_memory_gib": 20}
    code, said, _ = asked(**OTHER, **stated, host_memory_budget=124)
    assert code == 0 and "host: 8 cores, 125.00 GiB, 12 GB/s to each GPU and back\n" in said
    assert re.search(r"GPU [\d.]+ of 1\d\.\d GiB, host [\d.]+ of 124\.0 GiB", said)
    code, _, error = asked(**OTHER, host_memory_budget=961)
    assert code == 1
    assert "rtx4090 is taken to have 960.00 GiB: say with --host_memory_gib what" in error
    code, _, error = asked(host_memory_gib=125)
    assert code == 2 and "host_memory_gib says what another machine has" in error


def test_what_would_fit_is_named(asked, inputs, tmp_path):
    """The largest step that fits, by its flags; the host has room for none."""
    job = OTHER | {"gradient_accumulation_steps": 2}

    def need(size):  # of each device, for the leanest plan
        settings = job | {"per_device_train_batch_size": size, "device_memory_budget": 0.01}
        args = parse_arguments(inputs.command(tmp_path, **settings))
        with pytest.raises(UserError) as caught:
            make_plan(args, load_inputs(args, 8), 8)
        (limit,) = caught.value.__cause__.limits
        return limit.need_bytes / 2**30

    budget = (need(1) + need(3)) / 2
    code, _, error = asked(**job, device_memory_budget=budget)
    assert code == 1 and "device memory: needs" in error
    flag = "--per_device_train_batch_size 1"
    assert f"Also tried:\n- a step of 16 rows of 64 tokens ({flag}) fits: " in error
    code, _, error = asked(**job, host_memory_gib=4)
    flags = f"{flag} --gradient_accumulation_steps 1"
    assert code == 1 and "Also tried:\n- --optim lion still needs" in error
    assert f"- a step of 8 rows of 64 tokens ({flags}) still needs " in error


@pytest.fixture
def without_weights(inputs, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(inputs.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_a_dry_run_needs_no_weights(asked, without_weights):
    code, said, _ = asked(dry_run=True, model_name_or_path=without_weights)
    assert code == 0 and f"there are no weights in {without_weights}, so they are not" in said
    code, _, error = asked(model_name_or_path=without_weights)
    assert code == 1 and "model.safetensors" in error


def test_an_incomplete_download_is_refused_by_a_dry_run_too(asked, inputs, without_weights):
    """One of two files is not there, whatever the other holds."""
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    shutil.copy(inputs.model / "model.safetensors", without_weights / first)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": first, "model.norm.weight": second}}
    (without_weights / "model.safetensors.index.json").write_text(json.dumps(index))
    for settings in ({}, {"dry_run": True}):
        code, _, error = asked(model_name_or_path=without_weights, **settings)
        assert code == 1 and f"{second}. The download looks incomplete" in error


def test_a_hub_names_weights_are_fetched_after_the_plan(
    asked, without_weights, monkeypatch, tmp_path
):
    """The hub's package stands in by name: there is no network in tests."""
    fetched = []

    def snapshot_download(name, *, revision, allow_patterns):
        fetched.append((revision, "*.safetensors" in allow_patterns))
        return str(without_weights)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert asked(dry_run=True, model_name_or_path="some/model")[0] == 0
    assert asked(host_memory_budget=0.001, model_name_or_path="some/model")[0] == 1
    assert fetched == [(None, False)] * 2
    code, said, error = asked(model_name_or_path="some/model")  # whose weights do not come
    assert code == 1 and "model.safetensors" in error and said.startswith("model    model (qwen3)")
    assert fetched[2:] == [(None, False), (without_weights.name, True)]


@pytest.mark.parametrize(
    ("optim", "rate", "said"),
    [
        ("adamw", 1e5, "with adamw, more than 0.01 rarely trains anything"),
        ("adamw", 0, "learning_rate is 0: nothing is learnt"),
        ("adamw", 1e-2, None),
        ("sgd", 1, None),
    ],
)
def test_a_learning_rate_that_looks_mistyped_is_noted(asked, optim, rate, said):
    code, told, _ = asked(dry_run=True, optim=optim, learning_rate=rate)
    assert code == 0 and ("note: learning_rate is" in told) == (said is not None)
    assert said is None or said in told


def test_packed_rows_are_told_from_the_files_rows(asked):
    _, said, _ = asked(
        dry_run=True, packing=True, per_device_train_batch_size=1, rows_per_microbatch=1
    )
    assert re.search(r"48 rows, packed into \d+, .*; 12 steps of 8 packed rows, ", said)


def test_a_plan_for_hardware_by_name():
    job = {"rows_per_step": 8, "tokens_per_row": 64}
    planned = plan_for(named_config("tiny"), hardware="NVIDIA GeForce RTX 4090", **job)
    assert planned.job.hardware == PRESETS["rtx4090"]
    with pytest.raises(UserError, match=r"No hardware preset is named 'rtx409'.*nearest.*rtx4090"):
        plan_for(named_config("tiny"), hardware="rtx409", **job)
