"""`--profile_steps`: a timeline in Chrome's format, and where the time went."""

import gzip
import itertools
import json

import pytest
from runs import metrics

from slidedp_jax.run.profile import (
    DeviceSpan,
    TracedStep,
    covered_s,
    read_device_spans,
    trace_events,
    what_bounds,
)
from slidedp_jax.tracer import Span


def rows_of(events):
    """(process, row) -> its complete events in order."""
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return {row: sorted(own, key=lambda event: event["ts"]) for row, own in found.items()}


def test_the_timeline_of_a_run(inputs, tmp_path, capsys):
    out = tmp_path / "run"
    inputs.train(out, max_steps=4, profile_steps="2:3")
    said = capsys.readouterr().out
    assert said.count("profile: 2 steps of ") == 1 and "the step" in said
    path = out / "profile" / "steps_2_3.trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    rows = rows_of(events)
    for own in rows.values():
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-2
    names = {event["name"] for event in events}
    assert {"step 2", "step 3", "forward layers.1-1", "upload layers.1-1"} <= names
    assert any(name.startswith("update ") for name in names)
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "update thread: the optimizer" in threads
    steps = [event for event in events if event["name"] in ("step 2", "step 3")]
    seconds = [record["step_time_s"] for record in metrics(out)[1:3]]
    for event, took in zip(steps, seconds, strict=True):  # the record is made in it too
        assert event["dur"] / 1e6 >= took - 1e-3
    assert (out / "profile" / "steps_2_3.txt").read_text().strip() in said


@pytest.mark.thorough
def test_a_run_that_ends_before_writes_what_there_is(inputs, tmp_path, capsys):
    out = tmp_path / "run"
    inputs.train(out, max_steps=2, profile_steps="2:9")
    assert (out / "profile" / "steps_2_2.trace.json").is_file()
    inputs.train(out, max_steps=3, profile_steps="1:2")
    assert "profile_steps 1:2 are done already: nothing is traced" in capsys.readouterr().out


def test_overlapping_spans_get_rows_of_their_own():
    spans = [
        Span(lane="save", name=name, start_s=s, end_s=e)
        for name, s, e in (("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 2.0, 4.0))
    ]
    events = trace_events(spans, [], [TracedStep(record={"step": 1}, begin_s=0.0, end_s=4.0)])
    rows = [[event["name"] for event in own] for own in rows_of(events).values()]
    assert sorted(rows) == [["a", "c"], ["b"], ["step 1"]]


def step(begin_s=0.0, **seconds):
    record = {"step": 1, "data_time_s": 0.0, "wait_device_s": 0.0, **seconds}
    return TracedStep(record=record, begin_s=begin_s, end_s=begin_s + 2.0)


def span(lane, name, start_s, end_s):
    return Span(lane=lane, name=name, start_s=start_s, end_s=end_s)


def on_gpu(lane, *spans):
    return [
        DeviceSpan(device="GPU:0", lane=lane, name="k", start_s=start, end_s=end)
        for start, end in spans
    ]


def test_what_bounds_a_step_is_said_with_its_share():
    spans = [
        span("wait", "layers.1 to be updated", 0.0, 0.9),
        span("host_update", "update layers.1", -0.5, 1.8),
        span("wait", "gradients of layers.1 to leave", 1.0, 1.1),
    ]
    text = what_bounds([step()], spans)
    assert text.startswith("1 step of 2 s: the step's thread waited 45% of the time for layers")
    assert "busy for 90%" in text and "The optimizer on the host bounds the step" in text
    leaves = [span("wait", "gradients of layers.1 to leave", 0.0, 0.5)]
    assert "Copies to the host bound" in what_bounds([step()], leaves)
    assert "Reading the rows bounds" in what_bounds([step(data_time_s=0.5)])
    assert "Compute on the devices bounds" in what_bounds([step(wait_device_s=1.0)])
    assert "Handing work over (Python) bounds" in what_bounds([step(wait_device_s=0.1)])
    busy = on_gpu("compute", (0.0, 1.0), (0.5, 1.9))
    assert "computed for 95%" in what_bounds([step()], [], busy)
    assert "Compute on the devices bounds" in what_bounds([step()], [], busy)
    slow = on_gpu("compute", (0.0, 0.5)) + on_gpu("h2d", (0.0, 1.8))
    assert "The link bounds the step" in what_bounds([step()], [], slow)
    assert "No lane is busy" in what_bounds([step()], [], on_gpu("compute", (0.0, 0.5)))
    assert covered_s([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5)]) == 3.0


def test_what_lies_between_steps_does_not_count():
    """An evaluation from 2 to 10, in which the update ends, and GPUs compute and copy."""
    steps = [step(), step(begin_s=10.0)]
    spans = [
        span("host_update", "update layers.1", 1.0, 9.0),
        span("wait", "layers.1 to be updated", 2.0, 9.0),
    ]
    text = what_bounds(steps, spans, on_gpu("compute", (1.0, 11.0)) + on_gpu("h2d", (3.0, 9.0)))
    assert text.startswith("2 steps of 2 s: the step's thread waited 0% of the time for layers")
    assert "busy for 25%" in text and "computed for 50%, copied to itself for 0%" in text
    shown = [event for event in trace_events(spans, [], steps) if event["name"] == "step 1"]
    assert [(event["ts"], event["dur"]) for event in shown] == [(0.0, 2e6), (10e6, 2e6)]


@pytest.mark.thorough
def test_a_step_after_an_evaluation_is_where_its_work_is(inputs, tmp_path):
    out = tmp_path / "run"
    settings = {"validation_file": inputs.rows, "eval_steps": 2, "max_steps": 3}
    inputs.train(out, profile_steps="2:3", **settings)
    events = json.loads((out / "profile" / "steps_2_3.trace.json").read_text())["traceEvents"]
    at = {n: next(event for event in events if event["name"] == f"step {n}") for n in (2, 3)}
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    took = next(line["eval_runtime"] for line in lines if line.get("eval_runtime"))
    assert at[3]["ts"] - (at[2]["ts"] + at[2]["dur"]) >= took * 1e6
    backward = [e for e in events if e["name"].startswith("backward") and e["ph"] == "X"]
    assert backward
    for event in backward:  # evaluations have none
        assert any(
            step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
            for step in at.values()
        )


def test_streams_of_gpus_are_read_from_a_profile(tmp_path):
    """As jax.profiler writes them; its rows of the XLA ops, which repeat them, are left out."""
    meta = [("process_name", 1, None, "/device:GPU:0"), ("process_name", 2, None, "/host:CPU")]
    meta += [("thread_name", 1, 7, "Stream #13(Compute)"), ("thread_name", 1, 8, "XLA Ops")]
    events = [
        {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}}
        | ({} if tid is None else {"tid": tid})
        for kind, pid, tid, name in meta
    ]
    for pid, tid, name in ((1, 7, "gemm"), (1, 7, "MemcpyH2D"), (1, 8, "gemm"), (2, 7, "python")):
        events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 5.0, "dur": 2.0})
    folder = tmp_path / "plugins" / "profile" / "x"
    folder.mkdir(parents=True)
    content = json.dumps({"traceEvents": [*events, {}]}).encode()
    (folder / "host.trace.json.gz").write_bytes(gzip.compress(content))
    found = read_device_spans(tmp_path)
    assert [(span.device, span.lane) for span in found] == [("GPU:0", "compute"), ("GPU:0", "h2d")]
    assert found[0].end_s - found[0].start_s == pytest.approx(2e-6)
    with pytest.raises(FileNotFoundError):
        read_device_spans(folder / "none")
