"""`--profile_steps`: a timeline in Chrome's format, and where the time went."""

import functools
import itertools
import json
import math
import runpy

import jax
import jax.numpy as jnp
import pytest
from runs import ROOT, metrics

from slidedp_jax.run.device_trace import DeviceSpan, read_device_spans
from slidedp_jax.run.profile import Profile, TracedStep, covered_s, trace_events, what_bounds
from slidedp_jax.tracer import Span, StepTracer


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
    assert_valid(events)
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
        DeviceSpan(device="GPU:0", stream="s", lane=lane, name="k", start_s=start, end_s=end)
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
    assert "What the devices compute or copy to the host bounds" in what_bounds([step()], leaves)
    late, idle = (on_gpu("compute", (0.0, seconds)) for seconds in (1.9, 0.9))
    assert "Compute on the devices bounds" in what_bounds([step()], leaves, late)
    assert "Copies to the host bound" in what_bounds([step()], leaves, idle)
    talk = what_bounds([step()], [], late + on_gpu("exchange", (0.0, 0.5)))
    assert (
        "copied to itself for 0% and from itself for 0%, and exchanged with others for 25%" in talk
    )
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


BEGUN_NS = 1_800_000_000_000_000_000
KERNEL = 'stats { metadata_id: 1 str_value: "regs:32" }'


def plane(name, lines, stats=""):
    """An XPlane as text; lines: name -> (event, start us, duration us, its stats)."""
    names = dict.fromkeys(event for events in lines.values() for event, *_ in events)
    ids = {event: number for number, event in enumerate(names, start=1)}
    text = f'planes {{ name: "{name}" {stats}'
    text += ' stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }'
    for event, number in ids.items():
        text += f' event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }}'
    for line, events in lines.items():
        text += f' lines {{ name: "{line}" timestamp_ns: 1000000'
        for event, start, took, *more in events:
            text += f" events {{ metadata_id: {ids[event]} offset_ps: {start * 10**6}"
            text += f" duration_ps: {took * 10**6} {' '.join(more)} }}"
        text += " }"
    return text + " }"


ENVIRONMENT = (
    f'planes {{ name: "Task Environment" stats {{ metadata_id: 7 uint64_value: {BEGUN_NS} }}'
    ' stat_metadata { key: 7 value { id: 7 name: "profile_start_time" } } }'
)
STREAMS = {
    "Stream #13(Compute,Memset)": [("gemm", 5, 2), ("ncclDevKernel_AllGather", 8, 1)],
    "Stream #14(MemcpyH2D)": [("MemcpyH2D", 0, 9)],
    "Stream #15(MemcpyD2H,MemcpyD2D,MemcpyP2P)": [
        *(("MemcpyD2H", 0, 1), ("MemcpyD2D", 2, 1), ("MemcpyP2P", 4, 1)),
    ],
    "CUPTI overhead": [("Buffer flush", 0, 90), ("fusion", 91, 2, KERNEL)],
    "XLA Ops": [("gemm", 5, 2)],
    "XLA Modules": [("jit_step", 0, 99)],
    "Steps": [("1", 0, 99)],
    "Framework Name Scope": [("forward", 0, 99)],
}


def write_profile(folder, *planes, host="vm", session="2026_12_01_10_00_00"):
    at = folder / "plugins" / "profile" / session
    at.mkdir(parents=True, exist_ok=True)
    profile = jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(planes))
    (at / f"{host}.xplane.pb").write_bytes(profile)
    return folder


def test_streams_of_gpus_are_read_from_a_profile(tmp_path):
    """With the names of XLA's collector; rows that repeat the same work are left out."""
    gpus = [plane(f"/device:GPU:{n}", STREAMS) for n in (0, 1)]
    host = plane("/host:CPU", {"Stream #1(Compute)": [("python", 0, 1)]})
    write_profile(tmp_path, *gpus, host, ENVIRONMENT)
    found = read_device_spans(tmp_path, BEGUN_NS + 500_000)
    assert [span.device for span in found] == ["GPU:0"] * 7 + ["GPU:1"] * 7
    assert [(span.name, span.lane) for span in found[:7]] == [
        ("gemm", "compute"),
        ("ncclDevKernel_AllGather", "exchange"),
        ("MemcpyH2D", "h2d"),
        ("MemcpyD2H", "d2h"),
        ("MemcpyD2D", "copies"),
        ("MemcpyP2P", "exchange"),
        ("fusion", "compute"),
    ]
    assert found[0].start_s == pytest.approx(505e-6) and found[0].stream.startswith("Stream #13")
    assert found[0].end_s - found[0].start_s == pytest.approx(2e-6)


def test_the_newest_session_is_read_with_all_its_hosts(tmp_path):
    gpu = plane("/device:GPU:0", {"Stream #13(Compute)": [("gemm", 5, 2)]})
    write_profile(tmp_path, plane("/device:GPU:5", STREAMS), ENVIRONMENT)
    for host in ("a", "b"):
        write_profile(tmp_path, gpu, ENVIRONMENT, host=host, session="2026_12_01_10_00_01")
    found = read_device_spans(tmp_path, BEGUN_NS)
    assert [span.device for span in found] == ["a GPU:0", "b GPU:0"]


def test_a_profile_without_work_of_gpus_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        read_device_spans(tmp_path / "none", 0)
    only = {name: events for name, events in STREAMS.items() if not name.startswith("Stream")}
    only["CUPTI overhead"] = [("Buffer flush", 0, 90)]
    write_profile(tmp_path / "a", plane("/device:GPU:0", only), ENVIRONMENT)
    with pytest.raises(ValueError, match=r"no work on a stream of a GPU.*GPU:0: XLA Ops"):
        read_device_spans(tmp_path / "a", 0)
    write_profile(tmp_path / "b", plane("/device:GPU:0", STREAMS))
    with pytest.raises(ValueError, match="does not say when the profile began"):
        read_device_spans(tmp_path / "b", 0)


def test_what_cannot_be_read_of_gpus_stays_and_is_said(tmp_path, monkeypatch):
    """Of a profiler that sees no GPU: jax.profiler runs here as it does there.

    It begins and ends while nothing else uses the devices.
    """
    said, tracer, order = [], StepTracer(), []
    for name in ("start_trace", "stop_trace"):
        whole = getattr(jax.profiler, name)

        def noted(*words, name=name, whole=whole, **more):
            order.append(name)
            whole(*words, **more)

        monkeypatch.setattr(jax.profiler, name, noted)
    settle = functools.partial(order.append, "settle")
    profile = Profile((1, 1), tmp_path / "profile", tracer, said.append, settle=settle, gpus=True)
    profile.before(1)
    with tracer.span("host_update", "update a"):
        jnp.ones(3).block_until_ready()
    profile.after({"step": 1})
    assert said[0].startswith("warning: what the GPUs did is not known (ValueError: no work on a")
    assert list((tmp_path / "profile" / "jax").rglob("*.xplane.pb"))
    assert said[1].startswith("profile: 1 step of ") and len(said) == 2
    assert order == ["settle", "start_trace", "settle", "stop_trace"]


def assert_valid(events):
    """The rules of Chrome's trace event format, and what Perfetto's importer drops else.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete
    events and metadata; times in microseconds; events of a thread nest. Perfetto takes process and
    thread 0 for the idle ones.
    """
    named = {"process_name": {}, "thread_name": {}}
    for event in events:
        assert event["ph"] in "MX" and type(event["name"]) is str and event["name"]
        assert type(event["pid"]) is int and event["pid"] > 0 and type(event["tid"]) is int
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "M":
            kinds = {"process_name": str, "thread_name": str}
            kinds |= {"process_sort_index": int, "thread_sort_index": int}
            (argument,) = event["args"].items()
            assert argument[0] == ("name" if event["name"].endswith("_name") else "sort_index")
            assert type(argument[1]) is kinds[event["name"]]
            of = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            if event["name"] in named:
                assert named[event["name"]].setdefault(of, argument[1]) == argument[1]
        else:
            assert event["tid"] > 0 and math.isfinite(event["dur"]) and event["dur"] >= 0
            assert event["pid"] in named["process_name"]
            assert (event["pid"], event["tid"]) in named["thread_name"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for row in rows_of(events).values():
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-2
    tids = [tid for _, tid in named["thread_name"]]
    assert len(set(tids)) == len(tids)
    assert len(set(named["process_name"].values())) == len(named["process_name"])


def test_the_timeline_is_valid_with_gpus_and_whatever_began_before(tmp_path):
    write_profile(tmp_path, *(plane(f"/device:GPU:{n}", STREAMS) for n in (0, 1)), ENVIRONMENT)
    on_devices = read_device_spans(tmp_path, BEGUN_NS + 1_000_003)
    spans = [span("host_update", "update a", -0.5, 0.2), span("save", "b", 0.0, 0.5)]
    spans += [span("save", "c", 0.2, 0.3), span("wait", "wait for the norm", 0.1, 0.1)]
    events = json.loads(json.dumps(trace_events(spans, on_devices, [step(), step(2.5)])))
    assert_valid(events)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["slidedp_jax", "GPU:0", "GPU:1"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert rows == [name for name in STREAMS if name.startswith(("Stream", "CUPTI"))]
    assert_valid(trace_events([], [], []))


def test_a_profile_without_a_lane_or_a_gpu_is_told(tmp_path, capsys):
    """`scripts/check/check_profile.py`, on timelines as GPUs give them."""
    check = runpy.run_path(str(ROOT / "scripts" / "check" / "check_profile.py"))["check"]

    def wrong(gpus, *lost):
        streams = {name: own for name, own in STREAMS.items() if not name.startswith(lost)}
        folder = write_profile(tmp_path / str(lost), plane("/device:GPU:0", streams), ENVIRONMENT)
        on_devices = read_device_spans(folder, BEGUN_NS + 1_000_000)
        return check({"traceEvents": trace_events([], on_devices, [step()])}, gpus)

    assert wrong(1, "nothing") == []
    assert "GPU:0  Stream #14(MemcpyH2D)" in capsys.readouterr().out
    assert wrong(1, "Stream #14") == ["GPU:0 has no h2d in step 1 of 1"]
    assert wrong(2, "nothing") == ["work of 1 GPUs"]
    assert check({"traceEvents": trace_events([], [], [step()])}, 1) == ["work of 0 GPUs"]
