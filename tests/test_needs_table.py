"""The README's table of what models need is what the planner says."""

import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from slidedp_jax.planner.command import main as plan_command
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.stated_machine import Stated, machine

ROOT = Path(__file__).resolve().parent.parent
MADE = runpy.run_path(str(ROOT / "scripts" / "make" / "make_needs_table.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_one_model_of_the_table():
    head, rule, row = MADE["table"](["Qwen3-8B"])
    lines = README.splitlines()
    assert row in lines
    assert lines[lines.index(head) + 1] == rule


def test_the_table_and_the_plan_command_agree(capsys):
    """Marked cells do not fit the machine that the command assumes, others are what it says."""
    cells = next(line for line in README.splitlines() if line.startswith("| Qwen3-8B |"))
    cells = [text.strip() for text in cells.strip("|").split("|")][4:]
    for text, (hardware, num_devices) in zip(cells, MADE["MACHINES"].values(), strict=True):
        assert "*" not in text  # 32,768 tokens per device
        words = ["--preset", "Qwen/Qwen3-8B", "--hardware", hardware, "--json"]
        words += ["--num_devices", str(num_devices), "--tokens_per_step", str(32768 * num_devices)]
        code = plan_command(words)
        found = json.loads(capsys.readouterr().out)
        assert code == ("†" in text), text
        if code:
            assert [limit["name"] for limit in found["limits"]] == ["host memory"]
            continue
        host_bytes = found["chosen"]["memory"]["host_bytes"]
        assert f", {host_bytes / GIB:,.0f} GiB" in text, text
    larger = next(line for line in README.splitlines() if line.startswith("| Qwen3-14B |"))
    assert "†" in larger  # more than the host that the command assumes beside a card


def test_the_hosts_of_the_readme_are_those_of_the_presets():
    text = re.search(r"than it assumes there \((.*?)\)", README, re.DOTALL)[1]
    memory = [round(PRESETS[n].host_memory_bytes / GIB) for n in ("rtx4090", "a100-80g", "h100")]
    assert [int(number) for number in re.findall(r"\b(\d+) (?:GiB|beside|per)", text)] == memory


@pytest.mark.thorough
def test_the_whole_table():
    assert MADE["with_table"](README, MADE["table"]()) == README


def test_the_smallest_gpu_is_the_smallest():
    """On a card of that size the step fits, on one a gibibyte smaller not."""
    size = MADE["smallest_gpu_gib"]("qwen3-8b")

    def fits(gib):
        card = machine("rtx4090", 1, Stated(device_memory_gib=gib))
        try:
            return MADE["planned"]("qwen3-8b", card, 4096)
        except MADE["PlanError"]:
            return None

    assert fits(size) is not None and fits(size - 1) is None


def test_what_does_not_fit_has_no_figures():
    card = replace(PRESETS["rtx4090"], device_memory_bytes=12 * GIB)
    assert MADE["cell"]("qwen2.5-72b", card) is None
    assert str(MADE["Cell"](hours=1.61, host_gib=1234.5, tokens_per_device=32768)) == (
        "97 min, 1,234 GiB"
    )
    small = MADE["Cell"](hours=2.0, host_gib=9.6, tokens_per_device=8192, beyond_host=True)
    assert str(small) == "2.0 h*, 10 GiB †"
    assert MADE["disk_gib"]("qwen3-8b") == pytest.approx(38 * 8_190_735_360 / GIB)
    assert math.isclose(MADE["host_gib"]("tiny", "adamw"), 6.5, rel_tol=0.01)
