"""What a run says where a GPU cannot run cuDNN's attention."""

from types import SimpleNamespace

import pytest

from slidedp_jax.models import attention
from slidedp_jax.run.checks import attention_notes

ADA = attention.ComputeTarget(platform="cuda", compute_capability=8.9)


def notes(**changes):
    config = SimpleNamespace(head_dim=128)
    inputs = SimpleNamespace(pretrained=SimpleNamespace(config=config))
    settings = {"attention": "auto", "hardware": None, "dtype": "bfloat16", "packing": True}
    return attention_notes(inputs, SimpleNamespace(**(settings | changes)))


def test_packed_rows_on_compute_capability_8_are_said_to_be_slow(monkeypatch):
    monkeypatch.setattr(attention, "device_target", lambda _: ADA)
    (note,) = notes()
    assert "several times slower than cuDNN's" in note
    assert "packed rows need compute capability 9.0 or newer, this device has 8.9" in note


@pytest.mark.parametrize("changes", [{"packing": False}, {"attention": "chunked"}])
def test_nothing_is_said_where_cudnn_runs_or_was_not_wanted(monkeypatch, changes):
    monkeypatch.setattr(attention, "device_target", lambda _: ADA)
    assert notes(**changes) == []


def test_nothing_is_said_on_cpus():
    assert notes() == []
