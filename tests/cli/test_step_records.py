"""What a step's record has beside loss and norm: clipping, lanes, what is left, spikes."""

import json
import math

import pytest
from runs import metrics

from slidedp_jax.run.progress import Durations
from slidedp_jax.run.spikes import LEAST, Spikes, spike_text
from slidedp_jax.tracer import StepTracer


def test_clipped_steps_and_lanes_are_counted(inputs, tmp_path):
    out = tmp_path / "run"
    inputs.train(out, max_steps=4, max_grad_norm=1.0, weight_rounding="nearest")
    records = metrics(out)
    clipped = [record["grad_norm"] > 1.0 for record in records]
    assert [record["clipped"] for record in records] == clipped
    shares = [sum(clipped[:n]) / n for n in range(1, 5)]
    assert [record["clipped_share"] for record in records] == pytest.approx(shares, abs=1e-4)
    lanes = ("wait_update_s", "wait_leave_s", "wait_norm_s", "host_update_s", "save_s")
    for record in records:
        assert all(record[name] >= 0 for name in lanes)
        assert 0 <= record["wait_device_s"] <= record["step_time_s"]
    assert sum(record["host_update_s"] for record in records) > 0
    elapsed = [record["elapsed_s"] for record in records]
    assert elapsed == sorted(elapsed) and records[-1]["eta_s"] == 0.0
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.thorough
def test_without_a_clip_nothing_is_clipped(inputs, tmp_path):
    inputs.train(tmp_path / "run", max_steps=1, max_grad_norm=0)
    assert "clipped" not in metrics(tmp_path / "run")[0]


def test_what_is_left_counts_pauses_and_no_compilation():
    durations = Durations()
    assert durations.left_s(100.0, compiles=True, steps=9) is None
    assert durations.left_s(2.0, compiles=False, steps=8) == 16.0
    assert durations.left_s(60.0, compiles=True, steps=7) == 14.0  # rows of another width
    assert durations.left_s(4.0, compiles=False, steps=6) == 18.0  # with an evaluation before
    assert Durations().left_s(1.0, compiles=True, steps=0) == 0.0


def record(step, loss, norm=1.0, rows=(7,), **more):
    return {"step": step, "loss": loss, "grad_norm": norm, "row_ids": list(rows), **more}


def test_spikes_are_told_from_noise():
    spikes = Spikes()
    for step in range(LEAST):
        assert spikes.look(record(step, 2.0 + 0.1 * (step % 3))) == []
    assert spikes.look(record(30, 2.4)) == []  # 1.1 times what is usual
    assert spikes.look(record(31, 4.0)) == ["loss"]
    assert spikes.look(record(32, 2.1, norm=2.9)) == []
    assert spikes.look(record(33, 2.1, norm=3.1)) == ["grad_norm"]
    assert spikes.look(record(34, math.nan, norm=math.inf)) == ["loss", "grad_norm"]
    assert spikes.look(record(35, 2.0)) == []


def test_early_steps_are_no_spikes_but_for_what_is_not_finite():
    spikes = Spikes()
    assert spikes.look(record(1, 2.0)) == []
    assert spikes.look(record(2, 200.0)) == []
    bad = record(3, math.nan, rows=range(20), skipped=True)
    found = spikes.look(bad)
    assert found == ["loss"]
    text = spike_text(bad, found, spikes)
    assert text.startswith("step 3, skipped: loss nan (usually 101); its rows: 0 1 2 3 4 5 6 7 and")
    assert "preview --rows" in text


def test_a_skipped_step_names_its_rows(inputs, tmp_path, capsys):
    """Of a loss above `max_loss`, which the first one is."""
    out = tmp_path / "run"
    inputs.train(out, max_steps=2, max_loss=0.1, on_nonfinite="skip", export=False)
    said = capsys.readouterr().out
    rows = metrics(out)[0]["row_ids"]
    first = " ".join(map(str, rows[:8]))
    assert f"step 1, skipped: loss {metrics(out)[0]['loss']:.4g}" in said
    assert f"its rows: {first} and {len(rows) - 8} more" in said
    assert [entry["skipped"] for entry in metrics(out)] == [True, True]


def test_the_tracer_adds_up_and_keeps_spans_only_when_told():
    tracer = StepTracer()
    for name in ("wait for model.layers.0", "wait for gradients to leave", "wait for the norm"):
        with tracer.span("wait", name):
            pass
    with pytest.raises(RuntimeError), tracer.span("host_update", "update"):
        raise RuntimeError
    assert {*tracer.take()} == {
        ("wait", "update"),
        ("wait", "leave"),
        ("wait", "norm"),
        ("host_update", ""),
    }
    assert tracer.take() == {} and tracer.kept_spans() == []
    tracer.keep_spans()
    with tracer.span("h2d", "upload"):
        pass
    (span,) = tracer.kept_spans()
    assert span.lane == "h2d" and 0 <= span.start_s <= span.end_s < 5
    assert tracer.take()["h2d", ""] == pytest.approx(span.end_s - span.start_s)
    with tracer.span("h2d", "upload"):
        pass
    assert tracer.kept_spans() == []
