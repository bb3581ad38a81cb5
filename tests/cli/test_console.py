"""What a user sees: five lines, a bar that fits, lines that stay."""

import itertools
import json
import re
import sys
from dataclasses import replace

import pytest
from runs import ROOT, losses
from terminal import Screen, run_in_terminal

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.chunking import chunk_stages
from slidedp_jax.planner.device_phases import device_phases
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.words import CATEGORY_WORDS, PHASE_WORDS
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.run.bar import StepBar
from slidedp_jax.run.overview import overview_text
from slidedp_jax.run.step_text import step_line
from slidedp_jax.run.time_text import clock, duration
from slidedp_jax.train import main

NAMES = ["model", "data", "memory", "time", "output"]
BAR = re.compile(r"^(\d+)/6 \S{8,} (.*)$")


@pytest.fixture(scope="module")
def shown(inputs, tmp_path_factory):
    """The screen of 80 columns at the end of a run, and the bars that were on it."""
    out = tmp_path_factory.mktemp("console") / "run"
    settings = {"max_steps": 6, "logging_steps": 2, "num_devices": 1, "num_host_devices": 1}
    settings |= {"validation_file": inputs.rows, "eval_steps": 4, "save_steps": "null"}
    words = [sys.executable, "-m", "slidedp_jax.train", *inputs.command(out, **settings)]
    bars = []
    for screen in run_in_terminal(words, 80, cwd=ROOT):
        bars += [line for line in screen.lines() if BAR.match(line)]
    return screen.lines(), list(dict.fromkeys(bars)), out


def unbroken(lines):
    """The lines as they were before they were broken to fit, notes left out."""
    whole = []
    for line in lines:
        if line.startswith("      "):
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line)
    return [line for line in whole if not line.startswith("note: ")]


def test_five_lines_come_before_the_first_step(shown):
    lines, _, _ = shown
    loaded = next(i for i, line in enumerate(lines) if line.startswith("weights loaded"))
    before = unbroken(lines[:loaded])
    assert [line.split()[0] for line in before] == NAMES
    data, time, output = (before[NAMES.index(name)] for name in ("data", "time", "output"))
    assert "48 rows" in data and "6 steps of 3 rows" in data
    assert re.search(r"6 steps of [\d.]+ s, about [\d.]+ s", time)
    assert "checkpoint at the end, no" in output
    assert not any("layers_per_chunk" in line or "lane" in line for line in unbroken(lines))


def test_the_bar_keeps_step_loss_and_time_on_one_line_of_80_columns(shown):
    lines, bars, _ = shown
    assert all(len(line) <= 80 for line in lines)
    assert any(re.search(r"compiling \(first step\) \d:\d\d", bar) for bar in bars)
    assert any(re.search(r"evaluating \d:\d\d", bar) for bar in bars)
    steps = [bar for bar in bars if bar.endswith(" left")]
    assert 6 in {int(BAR.match(bar)[1]) for bar in steps}
    for bar in steps:
        assert re.search(r"loss [\d.]+ \| .*(\d:\d\d|-:--) left$", bar), bar


def test_lines_stay_in_the_scrollback(shown):
    lines, _, out = shown
    stayed = [line for line in lines if line.startswith("step ") and "/6" in line]
    assert [line.split()[1] for line in stayed] == ["2/6", "4/6", "6/6"]
    for line, loss in zip(stayed, losses(out)[1::2], strict=True):
        assert f"loss {loss:.4g} " in line
    assert any("held-out loss" in line for line in lines)


def test_the_whole_plan_is_in_run_json_dry_run_and_verbose(shown, inputs, tmp_path, capsys):
    plan = json.loads((shown[2] / "run.json").read_text())["plan"]
    assert plan["chosen"]["strategy"]["layers_per_chunk"] == 1
    settings = {"max_steps": 2, "save_at_end": False, "save_steps": "null"}
    for whole in ({"dry_run": True}, {"verbose": True}, {}):
        assert main(inputs.command(tmp_path / f"{whole}", **settings, **whole)) == 0
        said = "\n".join(unbroken(capsys.readouterr().out.splitlines()))
        assert ("layers_per_chunk " in said) == bool(whole)
        assert ("lengths  " in said) == bool(whole)
        assert [line.split()[0] for line in said.splitlines() if line[:9].strip() in NAMES][
            -5:
        ] == NAMES


def test_a_resumed_run_says_what_is_left(inputs, tmp_path, capsys):
    settings = {"save_steps": "null"}
    inputs.train(tmp_path / "out", max_steps=2, **settings)
    capsys.readouterr()
    inputs.train(tmp_path / "out", max_steps=5, dry_run=True, **settings)
    assert re.search(r"time     3 steps left of [\d.]+ s, about ", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_step_loss_and_time_stay_at_any_width(columns):
    from rich.console import Console

    moments = iter([0.0, 100.0, *[190.5] * 9])
    console = Console(width=columns, force_terminal=True, color_system=None, legacy_windows=False)
    bar = StepBar(first_step=0, num_steps=20_000, console=console, now=lambda: next(moments))
    bar.step(
        {
            "step": 12_345,
            "loss": 0.12345,
            "grad_norm": 12.345,
            "learning_rate": 1e-5,
            "tokens_per_second": 12_345.6,
            "eta_s": 5025.7,
        }
    )
    with console.capture() as captured:
        console.print(bar)
    screen = Screen(columns)
    screen.feed(captured.get())
    (line,) = screen.lines()
    assert re.match(r"12345/20000 [━╸]", line) and "loss 0.1235" in line
    assert line.endswith(" | 1:22:15 left"), line  # of the 5,025.7 s 90.5 are over
    assert ("lr 1e-05" in line) == (columns == 120)
    assert ("12.3k tok/s" in line) == (columns >= 80)


def test_a_line_of_a_long_run_fits_80_columns():
    record = {"step": 12_345, "loss": 0.123456, "grad_norm": 12.345678, "learning_rate": 1.25e-5}
    record |= {"tokens_per_second": 12_345.6, "eta_s": 5025.0}
    line = step_line(record, 20_000)
    assert line == (
        "step 12345/20000  loss 0.1235  norm 12.35  lr 1.3e-05  12.3k tok/s  1:23:45 left"
    )
    assert len(line) <= 80


def test_lines_are_broken_between_words():
    text = overview_text({"model": "word " * 30, "output": "x" * 50}, 40)
    assert all(len(line) <= 40 for line in text.splitlines()[:-2])
    assert text.splitlines()[1].startswith(" " * 9 + "word")
    assert len(overview_text({"model": "word " * 30}, None).splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0421, "0.0421 s"),
        (19.04, "19.0 s"),
        (720, "12 min"),
        (14_800, "4.1 h"),
        (2e5, "2.3 days"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_clocks():
    assert [clock(s) for s in (-3, 7, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_every_category_and_phase_of_a_plan_has_words():
    seen, phases = set(), set()
    for hardware in (PRESETS["h200"].with_devices(2), PRESETS["cpu"]):
        for tied, documents, deciding in itertools.product((True, False), (None, 64), (0, 8)):
            work = Workload.from_config(replace(named_config("qwen3-4b"), tie_word_embeddings=tied))
            work = replace(
                work, layers=tuple(replace(x, decided_elements=deciding) for x in work.layers)
            )
            batch = BatchShape(num_rows=8, seq_length=4096, documents_per_row=documents)
            rare = {
                "attention_chunks": 8,
                "host_boundaries": 12,
                "host_boundary_bytes": 1 << 24,
                "vocab_slices": 2,
            }
            for resident, kept, more in (
                *itertools.product((0, 4), (0, 20, 36), ({},)),
                (0, 20, rare),
            ):
                strategy = Strategy(
                    layers_per_chunk=1,
                    rows_per_microbatch=1,
                    num_microbatches=4,
                    update_policy="deferred",
                    num_host_devices=8,
                    gradient_route="reduce_scatter",
                    resident_chunks=resident,
                    kept_chunks=kept,
                    **more,
                )
                use = memory_use(work, batch, strategy, hardware)
                chunks = chunk_stages(work, 1, strategy.block_size, 8)
                every = device_phases(work, chunks, batch, strategy, hardware.num_devices)
                phases |= every.keys()
                seen |= use.device.keys() | use.host.keys() | set().union(*every.values())
    assert seen == CATEGORY_WORDS.keys()
    assert phases == PHASE_WORDS.keys()
