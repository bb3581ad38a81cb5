"""`--profile_steps`: a timeline in Chrome's format, and where the time went."""

import gzip
import itertools
import json

import pytest
from runs import metrics

from slidedp_jax.run.profile import (
    DeviceSpan,
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
    assert [event["dur"] / 1e6 for event in steps] == pytest.approx(seconds, abs=1e-3)
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
    events = trace_events(spans, [], [{"step": 1, "step_time_s": 4.0}])
    rows = [[event["name"] for event in own] for own in rows_of(events).values()]
    assert sorted(rows) == [["a", "c"], ["b"], ["step 1"]]


def step(**seconds):
    return {"step": 1, "step_time_s": 2.0, "data_time_s": 0.0, **seconds}


def on_gpu(lane, *spans):
    return [
        DeviceSpan(device="GPU:0", lane=lane, name="k", start_s=start, end_s=end)
        for start, end in spans
    ]


def test_what_bounds_a_step_is_said_with_its_share():
    text = what_bounds([step(wait_update_s=0.9, host_update_s=1.8, wait_leave_s=0.1)])
    assert text.startswith("1 step of 2 s: the step's thread waited 45% of the time for layers")
    assert "busy for 90%" in text and "The optimizer on the host bounds the step" in text
    assert "Copies to the host bound" in what_bounds([step(wait_leave_s=0.5)])
    assert "Reading the rows bounds" in what_bounds([step(data_time_s=0.5)])
    assert "Compute on the devices bounds" in what_bounds([step()])
    busy = on_gpu("compute", (0.0, 1.0), (0.5, 1.9))
    assert "computed for 95%" in what_bounds([step()], busy)
    slow = on_gpu("compute", (0.0, 0.5)) + on_gpu("h2d", (0.0, 1.8))
    assert "The link bounds the step" in what_bounds([step()], slow)
    assert "No lane is busy" in what_bounds([step()], on_gpu("compute", (0.0, 0.5)))
    assert covered_s([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5)]) == 3.0


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
