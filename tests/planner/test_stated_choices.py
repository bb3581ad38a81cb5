"""What users decide themselves costs no more than they are told, and what comes next is worse."""

import json
from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.command import main
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import NEARLY, plan
from slidedp_jax.planner.stated_choices import cost_of_choices, why_not
from slidedp_jax.planner.workload import BatchShape, Workload


def job(model, hardware, num_devices, rows, seq_length, host_gib=None):
    profile = named_hardware(hardware, num_devices=num_devices)
    if host_gib is not None:
        profile = replace(profile, host_memory_bytes=host_gib * GIB)
    batch = BatchShape(num_rows=rows, seq_length=seq_length)
    return Workload.from_config(named_config(model), name=model), batch, profile


JOBS = {
    "4b": job("qwen3-4b", "h200", 1, 4, 4096),
    "8b-2": job("qwen3-8b", "h200", 2, 8, 4096, 120),
    "14b-4090": job("qwen3-14b", "rtx4090", 4, 8, 4096, 400),
    "0.6b": job("qwen3-0.6b", "rtx4090", 1, 24, 512),
    "1.7b-tight": job("qwen3-1.7b", "rtx4090", 2, 6, 2048, 40),
    "32b-8": job("qwen3-32b", "h200", 8, 64, 4096),
}
QUICK = ("4b",)
STATED = (
    {"resident_state": True},
    {"resident_state": False},
    {"keep_activations": False},
    {"keep_activations": True},
    {"choices": Choices(gradient_route="host_sum")},
    {"choices": Choices(weight_route="shard_all_gather")},
    {"choices": Choices(layers_per_chunk=2)},
    {"choices": Choices(rows_per_microbatch=1)},
    {"choices": Choices(loss_chunk_tokens=256)},
    {"choices": Choices(prefetch_depth=2)},
)


POINTS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in JOBS]


@pytest.mark.parametrize("name", POINTS)
def test_what_stated_choices_cost_is_said_and_none_is_better_than_the_search(name):
    free = plan(*JOBS[name])
    for stated in STATED:
        try:
            found = plan(*JOBS[name], **stated)
        except PlanError:
            continue
        step_s, free_s = found.chosen.time.step_s, free.chosen.time.step_s
        assert step_s >= free_s / NEARLY, stated
        notes = cost_of_choices(found, {"it": "so"}, lambda: free)
        if step_s > NEARLY * free_s:
            (note,) = notes
            assert note.startswith(f"as stated (it so) a step takes {step_s:.3f} s; left to the ")
            assert f"planner, {free_s:.3f} s: " in note
        elif step_s <= free_s:
            assert notes == []


@pytest.mark.parametrize("name", [*POINTS[:1], "8b-2", *POINTS[2:]])
def test_what_comes_next_is_worse_or_says_why_not(name):
    found = plan(*JOBS[name])
    chosen = found.chosen
    for other in found.runners_up:
        reason = why_not(other, chosen)
        assert (reason is None) == (other.time.step_s >= chosen.time.step_s)
        if reason is None:
            continue
        assert chosen.time.step_s <= NEARLY * other.time.step_s
        fewer = other.strategy.layers_per_chunk > chosen.strategy.layers_per_chunk
        assert fewer == ("compile sooner" in reason)
        assert fewer or other.memory.host_bytes > chosen.memory.host_bytes


def test_permission_does_not_make_it_slower():
    """State may stay on the devices; it does not have to."""
    for name in ("4b", "8b-2"):
        allowed = plan(*JOBS[name], resident_state=True).chosen
        assert allowed == plan(*JOBS[name]).chosen


def test_the_command_says_it(capsys):
    words = ["--preset", "qwen3-4b", "--hardware", "h200", "--tokens_per_step", "8192"]

    def note(*more):
        assert main([*words, *more, "--json"]) == 0
        return [text for text in json.loads(capsys.readouterr().out)["notes"] if "stated" in text]

    assert note() == [] == note("--resident_state")
    (text,) = note("--no-resident_state", "--loss_chunk_tokens", "512")
    assert text.startswith("as stated (--loss_chunk_tokens 512, --resident_state False) a step ")
    assert "resident_chunks" in text
    assert main([*words, "--no-resident_state"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: as stated (--resident_state False) a step takes" in out


def test_where_only_what_was_stated_fits_nothing_is_said():
    found = plan(*JOBS["4b"])

    def free():
        raise PlanError("does not fit")

    assert cost_of_choices(found, {"--layers_per_chunk": 1}, free) == []
    assert cost_of_choices(found, {"--layers_per_chunk": None}, free) == []
