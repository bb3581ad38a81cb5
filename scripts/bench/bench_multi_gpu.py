"""Measure every device count and route in one command: speed, bytes, memory, exactness.

    python scripts/bench/bench_multi_gpu.py --num-devices 1 2 --out docs/benchmarks/NAME

Per count and pair of routes, in a process of its own: forward and backward on streamed and on
resident weights, Python's dispatch per chunk beside its compute, bytes moved per parameter, and
full steps (AdamW, exact clip, deferred) at the largest token count; then the same with the
planner's strategy for each token count. A device count gets its share of the cores: half of them
for one GPU beside two. Another process trains a few layers on all counts and
routes and compares with one device, takes a checkpoint from many devices to one and back, and one
injects errors on the last device.

The most telling work comes first, what no longer fits into --budget-s is named, and OUT.json is
written after each result. On a CPU: --model tiny --check-model tiny with a short --seq.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_children
import bench_record

FOLDER = pathlib.Path(__file__).parent
PARTS = ("planned", "speed", "check", "faults", "host_sum")
PLANNED = "planned"
EXTRAPOLATED_DEVICES = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="qwen3-4b", help="named shape")
    parser.add_argument("--layers", type=int, help="only the first N layers")
    parser.add_argument(
        "--tokens-per-device", type=int, nargs="+", default=[8192, 16384, 32768], help="per step"
    )
    parser.add_argument(
        "--full-tokens", type=int, nargs="+", help="of full steps; default: the most"
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows-per-microbatch", type=int, help="default: of the fewest tokens")
    parser.add_argument("--layers-per-chunk", type=int, default=1)
    parser.add_argument("--kept-chunks", type=int, default=0, help="top chunks not recomputed")
    parser.add_argument(
        "--resident-chunks", type=int, default=0, help="lowest chunks whose state stays on the GPUs"
    )
    parser.add_argument("--loss-chunk-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3, help="compute passes timed")
    parser.add_argument("--steps", type=int, default=5, help="full steps timed")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="speed: reduce_scatter"
    )
    parser.add_argument("--check-model", default="qwen3-0.6b")
    parser.add_argument("--check-layers", type=int, default=3)
    parser.add_argument("--check-dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--check-seq", type=int, default=512)
    parser.add_argument("--soak-steps", type=int, default=200)
    parser.add_argument("--pinned-gib-per-device", type=int, default=32)
    parser.add_argument("--timeout-s", type=float, default=300, help="of one process")
    parser.add_argument("--budget-s", type=float, default=560, help="of everything")
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json")
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    args = parse()
    record = bench_record.record(speed=[], checks=[], not_run=[])
    for job in jobs(args):
        left = args.budget_s - (time.perf_counter() - start)
        if left < min(40.0, args.timeout_s):
            record["not_run"].append({**job, "reason": "out of time"})
            continue

        def keep(result: dict[str, Any], job: dict[str, Any] = job) -> None:
            add(record, job, result)
            bench_record.save(args.out, record)

        reason = bench_children.run(
            [[str(FOLDER / job["script"]), json.dumps(job)]],
            timeout_s=min(args.timeout_s, left),
            on_result=keep,
        )
        if reason:
            record["not_run"].append({**job, "reason": reason})
        bench_record.save(args.out, record)
        print(f"{time.perf_counter() - start:5.0f} s  {label(job)}: {reason or 'done'}", flush=True)
        if "weight_route" in job:
            print(speed_table(record["speed"][-len(args.tokens_per_device) :]), flush=True)
    print(summary(record))
    if any(not check["passed"] for check in record["checks"]):
        sys.exit("a check failed")


def jobs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One process each, the most telling first."""
    most = max(args.num_devices)
    several = [count for count in args.num_devices if count > 1]
    speed = {
        "script": "multi_gpu_speed.py",
        "model": args.model,
        "layers": args.layers,
        "tokens_per_device": args.tokens_per_device,
        "full_tokens": args.full_tokens or [max(args.tokens_per_device)],
        "seq": args.seq,
        "rows_per_microbatch": args.rows_per_microbatch or min(args.tokens_per_device) // args.seq,
        "layers_per_chunk": args.layers_per_chunk,
        "kept_chunks": args.kept_chunks,
        "resident_chunks": args.resident_chunks,
        "loss_chunk_tokens": args.loss_chunk_tokens,
        "repeats": args.repeats,
        "steps": args.steps,
    }

    def job(count: int, weight_route: str, gradient_route: str) -> dict[str, Any]:
        return {
            **speed,
            "num_devices": count,
            "core_share": count / most,
            "pinned_limit_gib": args.pinned_gib_per_device * count,
            "weight_route": weight_route,
            "gradient_route": gradient_route,
            "planned": weight_route == PLANNED,
        }

    largest_first = sorted(args.num_devices, reverse=True)
    if "planned" in args.parts:
        for count in largest_first:
            everywhere = {"full_tokens": args.tokens_per_device}
            yield job(count, PLANNED, PLANNED) | everywhere
    if "speed" in args.parts:
        for count in largest_first:
            yield job(count, "replicate", "reduce_scatter")
        for count in sorted(several, reverse=True):
            yield job(count, "shard_all_gather", "reduce_scatter")
    for part in ("faults", "check"):
        if part in args.parts and several:
            yield {
                "script": f"multi_gpu_{part}.py",
                "model": args.check_model,
                "layers": args.check_layers,
                "seq": args.check_seq,
                "dtypes": args.check_dtypes,
                "soak_steps": args.soak_steps,
                "num_devices": args.num_devices,
                "pinned_limit_gib": args.pinned_gib_per_device * most,
            }
    if "host_sum" in args.parts:
        for count in sorted(several, reverse=True):
            for weight_route in ("shard_all_gather", "replicate"):
                yield job(count, weight_route, "host_sum")


def label(job: dict[str, Any]) -> str:
    if "weight_route" not in job:
        return f"{job['script']} on {job['num_devices']} devices"
    return f"{job['num_devices']} devices, {job['weight_route']}, {job['gradient_route']}"


def add(record: dict[str, Any], job: dict[str, Any], result: dict[str, Any]) -> None:
    """File a result; what belongs to the same count, routes and tokens becomes one entry."""
    if "check" in result:
        record["checks"].append(result)
        return
    kept = (
        *("model", "layers", "seq", "layers_per_chunk", "kept_chunks", "resident_chunks"),
        *("rows_per_microbatch", "num_devices"),
    )
    named = {name: job[name] for name in (*kept, "weight_route", "gradient_route")}
    named["tokens_per_device"] = result["tokens_per_device"]
    for entry in record["speed"]:
        if all(entry[name] == value for name, value in named.items()):
            entry.update(result)
            return
    record["speed"].append({**named, **result})


def summary(record: dict[str, Any]) -> str:
    """All tables."""
    lines = []
    if record["speed"]:
        lines += [speed_table(record["speed"]), "", dispatch_table(record["speed"]), ""]
    if record["checks"]:
        lines += [check_table(record["checks"]), ""]
    lines += [f"not run: {label(job)}: {job['reason']}" for job in record["not_run"]]
    return "\n".join(lines)


def speed_table(entries: list[dict[str, Any]]) -> str:
    """Medians; the last rate is relative to one device and its share of the cores."""
    header = (
        "| devices | cores | weights | gradients | tokens per device | resident s | streamed s | "
        "resident/streamed | full s | tokens/s | times one device | up B/param | down B/param | "
        "state B/param | peak GiB | RSS GiB |"
    )
    alone = {
        e["tokens_per_device"]: rate(e) for e in entries if e["num_devices"] == 1 and "full_s" in e
    }
    lines = [header, "|" + "---|" * 16]
    for e in entries:
        resident, streamed = statistics.median(e["resident_s"]), statistics.median(e["streamed_s"])
        full = times = "| "
        if "full_s" in e:
            full = f"{statistics.median(e['full_s']):.3f} | {rate(e):.0f}"
            if e["tokens_per_device"] in alone:
                times = f"{rate(e) / alone[e['tokens_per_device']]:.2f} | "
        lines.append(
            f"| {e['num_devices']} | {e['cores']} | {e['weight_route']} | {e['gradient_route']} | "
            f"{e['tokens_per_device']} | {resident:.3f} | {streamed:.3f} | "
            f"{resident / streamed:.3f} | {full} | {times.removesuffix('| ')}| "
            f"{e['up_bytes_per_parameter']:.2f} | {e['down_bytes_per_parameter']:.2f} | "
            f"{e['owned_bytes_per_parameter']:.2f} | {e.get('device_peak_gib', 0):.1f} | "
            f"{e['rss_gib']:.1f} |"
        )
    return "\n".join(lines)


def rate(entry: dict[str, Any]) -> float:
    """Tokens per second of full steps, all devices together."""
    tokens = entry["tokens_per_device"] * entry["num_devices"]
    return float(tokens / statistics.median(entry["full_s"]))


def dispatch_table(entries: list[dict[str, Any]]) -> str:
    """Python's dispatch beside compute, per chunk and pass over it, and where 8 devices would be.

    The line through two or more counts; with one count alone, as if all of it grew with devices.
    """
    lines = [
        f"| weights | gradients | tokens per device | devices: dispatch ms per chunk | compute ms "
        f"per chunk | dispatch on {EXTRAPOLATED_DEVICES} devices, ms |",
        "|" + "---|" * 6,
    ]

    def routes(entry: dict[str, Any]) -> tuple[Any, ...]:
        return entry["weight_route"], entry["gradient_route"], entry["tokens_per_device"]

    for key, group in itertools.groupby(sorted(entries, key=routes), routes):
        points = {e["num_devices"]: e["dispatch_ms_per_visit"] for e in group}
        alone = [e for e in entries if e["num_devices"] == 1 and routes(e)[2] == key[2]]
        for entry in alone:  # one device has no routes: its point belongs to all of them
            points.setdefault(1, entry["dispatch_ms_per_visit"])
        compute = [
            statistics.median(e["resident_s"]) / e["visits"] * 1e3
            for e in entries
            if routes(e) == key
        ]
        measured = ", ".join(f"{count}: {ms:.2f}" for count, ms in sorted(points.items()))
        lines.append(
            f"| {' | '.join(map(str, key))} | {measured} | {statistics.median(compute):.2f} | "
            f"{extrapolate(points, EXTRAPOLATED_DEVICES):.2f} |"
        )
    return "\n".join(lines)


def extrapolate(points: dict[int, float], count: int) -> float:
    """Least-squares line through (devices, value) at `count`; through zero with one point."""
    if len(points) == 1:
        ((devices, value),) = points.items()
        return value / devices * count
    fit = statistics.linear_regression(list(points), list(points.values()))
    return fit.intercept + fit.slope * count


def check_table(checks: list[dict[str, Any]]) -> str:
    lines = [
        "| check | devices | dtype | weights | gradients | resident | largest relative differences "
        "| passed |",
        "|" + "---|" * 8,
    ]
    for c in checks:
        limits = c.get("tolerances", {})
        differences = ", ".join(
            f"{name} {value:.1e} (limit {limits[name]:.0e})"
            for name, value in c.get("differences", {}).items()
        )
        lines.append(
            f"| {c['check']} | {c['num_devices']} | {c['dtype']} | {c.get('weight_route', '')} | "
            f"{c.get('gradient_route', '')} | {c.get('resident_chunks', 0)} | {differences} | "
            f"{'yes' if c['passed'] else 'NO'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
