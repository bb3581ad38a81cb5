"""What a run's profile holds: streams, spans, busy shares; fails where a GPU's work is missing.

    slidedp train ... --output_dir OUT --profile_steps 5:7
    python scripts/check/check_profile.py OUT

Reads OUT/profile/steps_*.trace.json, the timelines that the command has written. A run on GPUs
must have work of each of its GPUs in every step that was traced, kernels as well as copies to it
and from it. Where the command could not read what jax.profiler wrote, that is still in
OUT/profile/jax: its planes and lines are listed. Exits with 1 where something is missing.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slidedp_jax.run.profile import covered_s

NEEDED = ("compute", "h2d", "d2h")
MICROSECONDS = 1e6

Events = Sequence[Mapping[str, Any]]
Interval = tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="output_dir of the run")
    args = parser.parse_args()
    machine = json.loads((args.out / "run.json").read_text())["planned_for"]
    gpus = 0 if machine["device_kind"].lower() == "cpu" else machine["num_devices"]
    files = sorted((args.out / "profile").glob("steps_*.trace.json"))
    wrong = [] if files else [f"{args.out / 'profile'} holds no steps_*.trace.json"]
    for file in files:
        print(file)
        wrong += [f"{file.name}: {what}" for what in check(json.loads(file.read_text()), gpus)]
    raw = args.out / "profile" / "jax"
    if raw.is_dir():
        wrong.append(f"{raw} is still there: the command could not read it")
        list_raw(raw)
    for what in wrong:
        print(f"wrong: {what}")
    print(f"{len(files)} timelines of a run on {gpus} GPUs: {'WRONG' if wrong else 'fine'}")
    return 1 if wrong else 0


def check(timeline: Mapping[str, Any], gpus: int) -> list[str]:
    """Print each row of a timeline of so many GPUs; what is wrong with it."""
    events: Events = timeline["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    rows: dict[tuple[int, int], list[Mapping[str, Any]]] = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    steps = [span(e) for own in rows.values() for e in own if e["cat"] == "step"]
    if not steps:
        return ["no step"]
    total = sum(end - start for start, end in steps)
    print(f"  {len(steps)} steps of {total / len(steps):.4f} s")
    for (pid, tid), own in sorted(rows.items()):
        busy = covered_s(clipped(map(span, own), steps)) / total
        print(f"  {processes[pid]:>12}  {threads[pid, tid]:<52}{len(own):>8} spans {busy:7.1%}")
    devices = {pid: name for pid, name in processes.items() if "GPU" in name}
    wrong = [f"work of {len(devices)} GPUs"] if len(devices) != gpus else []
    for pid, name in devices.items():
        lanes: dict[str, list[Interval]] = collections.defaultdict(list)
        for (of, _), own in rows.items():
            for event in own if of == pid else ():
                lanes[event["cat"]].append(span(event))
        shares = {
            lane: covered_s(clipped(spans, steps)) / total for lane, spans in sorted(lanes.items())
        }
        print(f"  {name}: {', '.join(f'{lane} {share:.1%}' for lane, share in shares.items())}")
        for lane in NEEDED:
            idle = [n for n, step in enumerate(steps, 1) if not clipped(lanes[lane], [step])]
            if idle:
                wrong.append(f"{name} has no {lane} in step {idle[0]} of {len(steps)}")
    return wrong


def span(event: Mapping[str, Any]) -> Interval:
    return event["ts"] / MICROSECONDS, (event["ts"] + event["dur"]) / MICROSECONDS


def clipped(spans: Iterable[Interval], steps: Sequence[Interval]) -> list[Interval]:
    """The parts of spans that lie in a step."""
    return [
        (max(start, begin), min(end, until))
        for start, end in spans
        for begin, until in steps
        if start < until and end > begin
    ]


def list_raw(folder: pathlib.Path) -> None:
    """Planes and lines of what jax.profiler has written."""
    import jax

    for file in sorted(folder.rglob("*.xplane.pb")):
        print(file)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                names = collections.Counter(event.name for event in line.events)
                print(f"  {plane.name}: {line.name}: {names.total()} {names.most_common(3)}")


if __name__ == "__main__":
    sys.exit(main())
