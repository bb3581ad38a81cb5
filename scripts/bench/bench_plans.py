"""What the planner says beside what happens: step time and memory, each point in its own process.

    python scripts/bench/bench_plans.py --out docs/benchmarks/NAME
    python scripts/bench/bench_plans.py --points llama-8b-32k qwen3-4b-24gib --out NAME

A point is a model (mostly its first twelve layers), rows of a step, and budgets if any; it runs the
strategy that the planner chooses for this machine. Recorded are the plan, the seconds of each step,
the device's peak and where in the step it lies, host memory, and what each compiled program takes.
A process of its own, because the allocator's peak is that of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_children
import bench_record
import step_timing

from slidedp_jax.tracer import SpanLane, StepTracer

GIB = 2**30
TIMEOUT_S = 150.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """One job.

    Attributes:
      model: a named shape.
      layers: only so many of them; None: all.
      rows: of a step.
      seq: tokens of a row.
      device_gib: budget of the device; None: all that the allocator gives.
      documents: equal ones in a packed row; None: rows are not packed.
      eager: without clipping.
    """

    model: str
    layers: int | None = 12
    rows: int
    seq: int = 4096
    device_gib: float | None = None
    documents: int | None = None
    eager: bool = False


POINTS = {
    "qwen3-4b-whole-8k": Point(model="qwen3-4b", layers=None, rows=2),
    "qwen3-4b-whole-32k": Point(model="qwen3-4b", layers=None, rows=8),
    "qwen3-8b-whole-8k": Point(model="qwen3-8b", layers=None, rows=2),
    "qwen3-8b-whole-32k": Point(model="qwen3-8b", layers=None, rows=8),
    "qwen3-1.7b-whole-48k": Point(model="qwen3-1.7b", layers=None, rows=24, seq=2048),
    "qwen3-0.6b-whole-16k": Point(model="qwen3-0.6b", layers=None, rows=16, seq=1024),
    "llama-8b-32k": Point(model="llama-3.1-8b", rows=8),
    "llama-8b-24gib": Point(model="llama-3.1-8b", rows=4, device_gib=24),
    "mistral-7b-14k": Point(model="mistral-7b-v0.3", rows=7, seq=2048),
    "mistral-7b-32gib": Point(model="mistral-7b-v0.3", rows=31, device_gib=32),
    "qwen2.5-7b-32k": Point(model="qwen2.5-7b", rows=8),
    "qwen2.5-7b-packed": Point(model="qwen2.5-7b", rows=8, documents=8),
    "qwen3-14b-32k": Point(model="qwen3-14b", rows=8),
    "qwen3-14b-48gib": Point(model="qwen3-14b", rows=4, device_gib=48),
    "qwen3-14b-eager": Point(model="qwen3-14b", rows=5, eager=True),
    "qwen3-32b-16k": Point(model="qwen3-32b", rows=4),
    "qwen3-4b-12gib": Point(model="qwen3-4b", rows=2, device_gib=12),
    "qwen3-4b-20gib": Point(model="qwen3-4b", rows=8, device_gib=20),
    "qwen3-4b-packed": Point(model="qwen3-4b", rows=8, documents=16),
    "qwen3-4b-row-64k": Point(model="qwen3-4b", rows=1, seq=65536),
    "qwen3-8b-row-128k": Point(model="qwen3-8b", rows=1, seq=131072),
    "tiny": Point(model="qwen3-0.6b", layers=2, rows=2, seq=64),
    "cpu-smollm2": Point(model="smollm2-135m", layers=8, rows=2, seq=512),
    "cpu-smollm2-256": Point(model="smollm2-135m", layers=8, rows=2, seq=256),
    "cpu-smollm2-packed": Point(model="smollm2-135m", layers=8, rows=2, seq=512, documents=4),
    "cpu-smollm2-eager": Point(model="smollm2-135m", layers=4, rows=4, seq=512, eager=True),
    "cpu-qwen3-0.6b": Point(model="qwen3-0.6b", layers=2, rows=1, seq=384),
    "cpu-smollm2-long": Point(model="smollm2-135m", layers=6, rows=1, seq=1536),
    "cpu-smollm2-whole": Point(model="smollm2-135m", layers=None, rows=2, seq=512),
}
SMALL = ("tiny", *(name for name in POINTS if name.startswith("cpu-")))
"""Points for machines without a GPU; by default the others are measured."""


class MemoryTracer(StepTracer):
    """Notes the largest use of the device's memory by kind of work, as it is issued.

    Arrays of a program have their place from the moment on at which it is issued.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(keep=True)
        self._device = device
        self.highest: dict[str, int] = {}
        """What was issued -> bytes in use afterwards."""
        self.raised: dict[str, int] = {}
        """What was issued -> the peak that it set."""
        self._peak = 0

    @contextlib.contextmanager
    def span(self, lane: SpanLane, name: str) -> Iterator[None]:
        """Bracket a piece of work of `lane`."""
        with super().span(lane, name):
            yield
        stats = self._device.memory_stats() or {}
        now, peak = stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use", 0)
        self.highest[name] = max(now, self.highest.get(name, 0))
        if peak > self._peak:
            self.raised[name] = self._peak = peak


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--points",
        nargs="+",
        choices=POINTS,
        default=[name for name in POINTS if name not in SMALL],
    )
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that warm up")
    parser.add_argument("--host-memory-budget", type=float, help="GiB")
    parser.add_argument("--hardware-profile", help="rates of a file of `slidedp measure`, or auto")
    parser.add_argument("--budget-s", type=float, help="starts no point after this")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("results", nargs="?", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.child is not None:
        bench_children.Report(args.results)(measure(args, POINTS[args.child]))
        return
    start = time.perf_counter()
    record = bench_record.record(("jax", "optax"), results=[], not_run=[])
    print(HEAD, flush=True)
    for name in args.points:
        if args.budget_s and time.perf_counter() - start > args.budget_s:
            record["not_run"].append({"point": name, "reason": "out of time"})
            continue
        command = [__file__, "--child", name, "--steps", str(args.steps)]
        if args.host_memory_budget is not None:
            command += ["--host-memory-budget", str(args.host_memory_budget)]
        if args.hardware_profile is not None:
            command += ["--hardware-profile", args.hardware_profile]

        def keep(result: dict[str, Any], name: str = name) -> None:
            record["results"].append({"point": name, **result})
            print(line(record["results"][-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)

        reason = bench_children.run([command], timeout_s=TIMEOUT_S, on_result=keep)
        if reason is not None:
            record["not_run"].append({"point": name, "reason": reason})
            print(f"{name}: {reason}", flush=True)
        bench_record.save(args.out, record)
    bench_record.save(args.out, record)
    print(summary(record["results"]))


def measure(args: argparse.Namespace, point: Point) -> dict[str, Any]:
    """One point, in this process."""
    import optax

    import slidedp_jax

    slidedp_jax.configure(num_devices=1)
    import jax

    from slidedp_jax.models import decoder
    from slidedp_jax.this_machine import plan_for

    config = step_timing.model_config(point.model, point.layers)
    limit = None if point.eager else 1.0
    plan = plan_for(
        config,
        rows_per_step=point.rows,
        tokens_per_row=point.seq,
        documents_per_row=point.documents,
        document_lengths=document_lengths(point),
        max_grad_norm=limit,
        device_memory_budget_gib=point.device_gib,
        host_memory_budget_gib=args.host_memory_budget,
        hardware_profile=args.hardware_profile,
    )
    device = jax.local_devices()[0]
    tracer = MemoryTracer(device)
    model = decoder.build(config)
    start = time.perf_counter()
    with slidedp_jax.Trainer(
        model,
        optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.1),
        strategy=plan.strategy,
        parameters=lambda write: step_timing.write_weights(point.model, config, model, write),
        max_grad_norm=limit,
        tracer=tracer,
    ) as trainer:
        ready_s = time.perf_counter() - start
        at_start = dict(device.memory_stats() or {})
        batch = random_batch(point, config.vocab_size)
        steps = step_timing.full_steps(args.steps + 1, trainer, tracer, batch)
        steps.pop("last_step_spans")
        return {
            "job": asdict(point),
            "plan": described(plan),
            "strategy": plan.strategy.__dict__.copy(),
            "state_ready_s": ready_s,
            **steps,
            "full_s": steps["full_s"][1:],
            "memory_at_start": at_start,
            "memory": dict(device.memory_stats() or {}),
            "highest_bytes": largest(tracer.highest, 12),
            "peak_set_by": largest(tracer.raised, 6),
            "programs": programs(device),
            "rss_gib": bench_record.rss_gib(),
        }


def document_lengths(point: Point) -> list[int] | None:
    if point.documents is None:
        return None
    return [point.seq // point.documents] * point.documents


def random_batch(point: Point, vocab_size: int) -> dict[str, Any]:
    import numpy as np

    ids = np.random.default_rng(1).integers(0, vocab_size, (point.rows, point.seq))
    batch = {"input_ids": ids.astype(np.int32), "labels": ids.astype(np.int32)}
    if point.documents is not None:
        segments = np.arange(point.seq) // -(-point.seq // point.documents) + 1
        batch["segment_ids"] = np.broadcast_to(segments, ids.shape).astype(np.int32)
    return batch


def described(plan: Any) -> dict[str, Any]:
    """Of the chosen strategy: seconds, memory by category."""
    time_, memory = plan.chosen.time, plan.chosen.memory
    return {
        "step_s": time_.step_s,
        "busy_s": dict(time_.busy_s),
        "device_bytes": memory.device_bytes,
        "device": dict(memory.device),
        "device_phase": memory.device_phase,
        "host_bytes": memory.host_bytes,
        "host": dict(memory.host),
        "device_budget_bytes": plan.job.device_budget_bytes,
        "host_budget_bytes": plan.job.host_budget_bytes,
    }


def programs(device: Any) -> list[dict[str, Any]]:
    """Name, temporary, argument and output bytes of the device's programs, the largest first."""
    found = []
    for executable in device.client.live_executables():
        stats = executable.get_compiled_memory_stats()
        found.append(
            {
                "name": executable.hlo_modules()[0].name,
                "temp": stats.temp_size_in_bytes,
                "arguments": stats.argument_size_in_bytes,
                "output": stats.output_size_in_bytes,
                "alias": stats.alias_size_in_bytes,
            }
        )
    return sorted(found, key=lambda program: -program["temp"])[:16]


def largest(values: dict[str, int], count: int) -> dict[str, int]:
    return dict(sorted(values.items(), key=lambda item: -item[1])[:count])


HEAD = (
    "point                  step s (spread)        planned    off   device GiB  planned    off   "
    "host GiB  planned   kept/resident  budget used"
)


def errors(result: dict[str, Any]) -> tuple[float, float]:
    """Planned over measured, less one: of a step's time, and of the device's memory."""
    plan = result["plan"]
    peak = result["memory"].get("peak_bytes_in_use", 0)
    planned = plan["device_bytes"] - plan["device"].get("runtime_reserve", 0.0)
    return (
        plan["step_s"] / statistics.median(result["full_s"]) - 1,
        planned / peak - 1 if peak else float("nan"),
    )


def line(result: dict[str, Any]) -> str:
    """One line of the table; device memory without what the planner holds in reserve."""
    plan, seconds = result["plan"], result["full_s"]
    of_time, of_memory = errors(result)
    peak = result["memory"].get("peak_bytes_in_use", 0)
    planned = plan["device_bytes"] - plan["device"].get("runtime_reserve", 0.0)
    host = plan["host_bytes"] - plan["host"].get("state_in_passing", 0.0)
    strategy = result["strategy"]
    return (
        f"{result['point']:22s} {statistics.median(seconds):6.3f} "
        f"({min(seconds):.3f}..{max(seconds):.3f}) {plan['step_s']:8.3f} {of_time:+7.1%} "
        f"{peak / GIB:10.2f} {planned / GIB:9.2f} {of_memory:+7.1%} {result['rss_gib']:9.1f} "
        f"{host / GIB:8.1f} {strategy['kept_chunks']:9d}/{strategy['resident_chunks']:<4d} "
        f"{plan['device_bytes'] / plan['device_budget_bytes']:12.3f}"
    )


def summary(results: list[dict[str, Any]]) -> str:
    """Medians of the absolute errors, and the largest."""
    if not results:
        return "nothing was measured"
    texts = []
    for what, values in zip(
        ("time", "device memory"), zip(*map(errors, results), strict=True), strict=True
    ):
        worst = max(values, key=abs)
        texts.append(
            f"{what}: median {statistics.median(map(abs, values)):.1%}, worst {worst:+.1%}"
        )
    return "; ".join(texts)


if __name__ == "__main__":
    main()
