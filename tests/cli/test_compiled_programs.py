"""A run whose programs take more than planned says so before it reads a weight.

The CPU backend's own numbers are taken for those of the planner's devices, so that there is
something to compare; plans are made wrong on purpose.
"""

import dataclasses
import json

import pytest
from runs import losses

from slidedp_jax.pretrained import Pretrained
from slidedp_jax.train import main

FREE = {"rows_per_microbatch": "null", "max_steps": 2, "max_seq_length": 256}
GIB = 2**30


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setattr("slidedp_jax.run.compiled.is_checked", lambda *_: True)


@pytest.fixture
def no_weights(monkeypatch):
    """Weights must not be read."""

    def load(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(Pretrained, "load_parameters", load)


def lower(monkeypatch, factor):
    """The planner takes for a layer's backward so much of what it takes otherwise."""
    import slidedp_jax.planner.layer_work as file

    make = file.layer_work

    def less(*arguments):
        work = make(*arguments)
        names = "residual_elements", "backward_workspace_elements"
        return dataclasses.replace(
            work, **{name: int(factor * getattr(work, name)) for name in names}
        )

    monkeypatch.setattr("slidedp_jax.planner.workload.layer_work", less)


def record(out):
    return json.loads((out / "run.json").read_text())


def out_of(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_what_was_compiled_is_said_and_kept(inputs, tmp_path, capsys, checks):
    out, plain = tmp_path / "checked", tmp_path / "plain"
    inputs.train(out, **FREE)
    assert "device memory with the compiled programs" in out_of(capsys)
    found = record(out)["compiled_memory"]
    assert {one["name"].split()[0] for one in found["programs"]} == {"forward", "backward", "head"}
    for one in found["programs"]:
        assert one["compiled"] == one["temp"] + one["output"] - one["alias"] > 0
    assert found["compiled"] <= found["budget"]


def test_without_the_check_the_same_is_trained_and_nothing_said(inputs, tmp_path, capsys):
    inputs.train(tmp_path / "plain", **FREE)
    assert "compiled programs" not in out_of(capsys)
    assert record(tmp_path / "plain")["compiled_memory"] is None
