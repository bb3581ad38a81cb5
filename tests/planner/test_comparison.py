"""Machines side by side for a job, and what more of one thing brings."""

import json

import pytest

from slidedp_jax.planner.comparison import main
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.upgrades import Upgrade

JOB = ["--preset", "qwen3-14b", "--tokens_per_step", "8192"]
MACHINES = ["--hardware", "h100", "rtx4090", "--num_devices", "1"]


def test_fitting_machines_first_with_what_binds_and_others_with_the_reason(capsys):
    assert main([*JOB, *MACHINES]) == 0
    heading, columns, first, second, hosts, note = capsys.readouterr().out.splitlines()
    assert heading.startswith("qwen3-14b (14.8B parameters), 8,192 tokens per step")
    assert columns.split()[0] == "machine"
    assert first.startswith("1 x h100 *")
    assert "the optimizer on the CPU" in first
    assert second.startswith("1 x rtx4090 *")
    assert "host memory: needs" in second and "has 120.00 GiB" in second
    share = "1 x h100 *: 26 cores, 225.00 GiB; 1 x rtx4090 *: 16 cores, 120.00 GiB"
    assert hosts == f"host for each GPU: {share}"
    assert "not measured" in note


def test_json_has_the_figures_of_the_plan_and_tokens_for_a_price(capsys):
    job = ["--preset", "qwen3-0.6b", "--tokens_per_step", "16384"]
    arguments = [*job, "--hardware", "h100", "l4", "--num_devices", "1", "2"]
    code = main([*arguments, "--prices", "H100=2.5", "--host_memory_gib", "500", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert code == 0 and len(rows) == 4
    assert [row["hardware"] for row in rows] == ["h100", "h100", "l4", "l4"]
    for row in rows:
        price = {"h100": 2.5}.get(row["hardware"])
        assert row["price_per_device_hour"] == price
        per_hour = 3600 * row["tokens_per_s"]
        expected = None if price is None else per_hour / (price * row["num_devices"])
        assert row["tokens_per_unit"] == (expected and pytest.approx(expected))
        assert row["tokens_per_s"] == pytest.approx(16384 / row["step_s"])
    paid = [row["tokens_per_unit"] for row in rows[:2]]
    assert paid == sorted(paid, reverse=True)


def test_what_forecasts_leave_out_is_noted(capsys):
    job = ["--preset", "qwen3-0.6b", "--tokens_per_step", "8192", "--optim", "muon", *MACHINES]
    job += ["--freeze", "model.norm.*"]
    main(job)
    text = capsys.readouterr().out
    for row in json.loads(_json_of(job, capsys)):
        frozen, whole = row["notes"]
        assert "1 parameter array frozen" in frozen and "muon updates whole" in whole
        assert f"note: {frozen}\nnote: {whole}\n" in text


def test_nothing_fits_anywhere(capsys):
    job = ["--preset", "qwen2.5-72b", "--tokens_per_step", "4096"]
    assert main([*job, "--hardware", "rtx3090", "--num_devices", "1"]) == 1
    assert "needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hardware", "h300"], "No hardware preset is named 'h300'"),
        (["--hardware", "rtx4080"], "--link_gb_per_s of `slidedp plan`"),
        (["--prices", "h100=2", "H100=3"], "names h100 twice"),
        (["--prices", "h100"], "give NAME=PRICE"),
        (["--prices", "h100=-1"], "give NAME=PRICE"),
        (["--hardware", "l4", "--prices", "h100=2"], "of which nothing is compared; compared are"),
        (["--num_devices", "0"], "at least one"),
        (["--hardware_profile", "nowhere.json"], "nowhere.json cannot be read"),
        (["--seq_length", "1000"], "multiple of --seq_length 1000"),
    ],
)
def test_wrong_words(words, said, capsys):
    assert main([*JOB, *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.thorough
def test_an_upgrade_that_makes_it_fit_and_what_others_gain(capsys):
    arguments = [*JOB, *MACHINES[:1], "rtx4090", *MACHINES[-2:]]
    assert main([*arguments, "--upgrades", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    found = {one["what"]: one for one in row["upgrades"]}
    assert len(found) == 5
    assert found["twice the host memory"]["tokens_per_s"] > 0
    assert found["twice the host memory"]["gain"] is None
    assert found["links twice as fast"]["tokens_per_s"] == 0
    need = json.loads(_json_of([*arguments, "--host_memory_gib", "240"], capsys))[0]
    assert need["tokens_per_s"] == pytest.approx(found["twice the host memory"]["tokens_per_s"])
    assert need["host_bytes"] > PRESETS["rtx4090"].host_memory_bytes == 120 * GIB


@pytest.mark.thorough
def test_more_of_anything_never_costs_much(capsys):
    rows = json.loads(_json_of([*JOB, *MACHINES[:2], *MACHINES[-2:], "--upgrades"], capsys))
    for row in rows:
        for one in row.get("upgrades", ()):
            assert one["tokens_per_s"] >= 0.97 * row.get("tokens_per_s", 0.0)


@pytest.mark.parametrize(
    ("after", "gain", "said"),
    [
        (995.0, 0.0, "+0%"),
        (980.0, pytest.approx(-0.02), "-2%"),
        (1100.0, pytest.approx(0.1), "+10%"),
    ],
)
def test_a_loss_that_the_search_takes_is_none(after, gain, said):
    upgrade = Upgrade(what="more", tokens_per_s=after, before=1000.0)
    assert upgrade.gain == gain
    assert upgrade.describe().endswith(f"({said})")


def _json_of(arguments, capsys) -> str:
    main([*arguments, "--json"])
    return capsys.readouterr().out
