"""Time steps beside a save, and how long the save holds them up, against the planner's formula.

    python scripts/bench/bench_saves_beside.py --model qwen3-4b --folder DIR --out NAME

Weights are random, the strategy is the planner's. Per buffer (`--buffers`, GiB; `all`: as much as
there is to copy): a save is begun and steps go on until it is written. The first one's memory is
made ahead, as a run does. *stall* is what these steps took beyond as many undisturbed ones; *held*
is for how long updates waited for copies; *predicted* is `planner.disk.stall_s` with the rate at
which this save was written. *ratio* compares the median of these steps but the stalled first two
with undisturbed ones. The checkpoint's checksums are
compared with those of the state when the save began, all of which is read first. *raw* moves random
bytes in as many streams and blocks. `DIR` needs room for one checkpoint, and a twentieth more.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import statistics
import sys
import threading
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record
import step_timing
from bench_checkpoint import RawFiles, timed
from bench_record import rss_gib

import slidedp_jax
from slidedp_jax.planner.disk import stall_s

GIB = 2**30
ALL = "all"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape, or a model folder")
    parser.add_argument("--layers", type=int, help="only the first N layers, of a shape")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--resident-state", choices=["on", "off"], default="on")
    parser.add_argument("--buffers", nargs="+", default=[ALL, ALL, "24", "8"], help="GiB, or all")
    parser.add_argument("--steps", type=int, default=6, help="undisturbed ones")
    parser.add_argument("--most-steps", type=int, default=60, help="beside one save")
    parser.add_argument("--host-memory-budget", type=float, help="GiB")
    parser.add_argument("--compilation-cache", help="folder of JAX's persistent compilation cache")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


class Steps:
    """A trainer and its steps, each timed until its loss and norm are known."""

    def __init__(self, args: argparse.Namespace):
        import numpy as np
        import optax

        from slidedp_jax.models import decoder
        from slidedp_jax.this_machine import plan_for

        config = step_timing.model_config(args.model, args.layers)
        self.plan = plan_for(
            config,
            rows_per_step=args.tokens // args.seq,
            tokens_per_row=args.seq,
            resident_state=None if args.resident_state == "on" else False,
            host_memory_budget_gib=args.host_memory_budget,
        )
        model = decoder.build(config)
        self.trainer = slidedp_jax.Trainer(
            model,
            optax.adamw(1e-5),
            strategy=self.plan.strategy,
            parameters=lambda write: step_timing.write_weights(args.model, config, model, write),
        )
        shape = args.tokens // args.seq, args.seq
        ids = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
        self._batch = {"input_ids": ids, "labels": ids}

    def step(self) -> float:
        """One step; its seconds."""
        start = time.perf_counter()
        metrics = self.trainer.step(self._batch)
        _ = metrics.loss, metrics.grad_norm
        return time.perf_counter() - start


def checksums_now(trainer: Any) -> Any:
    """Of the present state, as a save that stops training adds them up."""
    from slidedp_jax.checkpoint.array_streams import checksums
    from slidedp_jax.checkpoint.state_arrays import from_state
    from slidedp_jax.checkpoint.stored_arrays import arrays_of

    with trainer.gate.reading() as reader:
        return checksums(arrays_of(trainer.gate, trainer.model.stages()), from_state(reader))


def beside(
    steps: Steps, args: argparse.Namespace, buffer: str, base_s: float, *, made_ahead: bool
) -> dict[str, Any]:
    """One save beside steps, through memory that was made ahead or is made when it is needed."""
    from slidedp_jax.checkpoint.record import read_record

    trainer = steps.trainer
    size = trainer.store.owned_bytes
    buffer_bytes = size + GIB if buffer == ALL else int(float(buffer) * GIB)
    if made_ahead:
        trainer.prepare_save(buffer_bytes=buffer_bytes)
        while any(thread.name.startswith("save-memory") for thread in threading.enumerate()):
            steps.step()
    wanted = checksums_now(trainer)
    cpu, before_gib, peak_gib = time.process_time(), rss_gib(), rss_gib()
    begun = time.perf_counter()
    saving = trainer.save_beside(args.folder, buffer_bytes=buffer_bytes)
    call_s = time.perf_counter() - begun
    times: list[float] = []
    while not saving.done and len(times) < args.most_steps:
        times.append(steps.step())
        peak_gib = max(peak_gib, rss_gib())
    took = saving.result()
    cpu = time.process_time() - cpu
    same = read_record(saving.path)["checksums"] == wanted
    shutil.rmtree(saving.path)
    rate = took.num_bytes / took.seconds
    calm = times[2:] or times
    return {
        "buffer": buffer,
        "made_ahead": made_ahead,
        "buffer_gib": took.buffer_bytes / GIB,
        "bytes": took.num_bytes,
        "seconds": took.seconds,
        "bytes_per_s": rate,
        "step_s": times,
        "stall_s": call_s + sum(times) - len(times) * base_s,
        "longest_step_s": max(times),
        "held_s": took.held_s,
        "predicted_stall_s": stall_s(took.num_bytes, buffer_bytes, rate, base_s),
        "ratio": statistics.median(calm) / base_s,
        "process_cpu_s": cpu,
        "extra_gib": peak_gib - before_gib,
        "same_bits": same,
    }


def main() -> None:
    args = parse()
    slidedp_jax.configure(compilation_cache=args.compilation_cache)
    start = time.perf_counter()
    steps = Steps(args)
    record = bench_record.record(
        ("jax", "orbax-checkpoint"),
        num_parameters=steps.trainer.store.num_parameters,
        resident_chunks=steps.trainer.strategy.resident_chunks,
        state_bytes=steps.trainer.store.owned_bytes,
        start_s=time.perf_counter() - start,
        saves=[],
    )
    for _ in range(2):
        steps.step()
    record["undisturbed_step_s"] = [steps.step() for _ in range(args.steps)]
    base_s = statistics.median(record["undisturbed_step_s"])
    record["rss_gib"] = rss_gib()
    cpu = time.process_time()
    steps.step()
    record["cpu_s_of_a_step"] = time.process_time() - cpu
    bench_record.save(args.out, record)
    for number, buffer in enumerate(args.buffers):
        result = beside(steps, args, buffer, base_s, made_ahead=not number)
        record["saves"].append(result)
        bench_record.save(args.out, record)
        print(line(result), flush=True)
    raw = RawFiles(args.folder / "raw", steps.trainer.store.owned_bytes // 20)
    record["raw_bytes"] = raw.num_bytes
    record["raw_write"], record["raw_read"] = timed(raw.write), timed(raw.read)
    shutil.rmtree(args.folder / "raw")
    bench_record.save(args.out, record)
    print(f"undisturbed step {base_s:.3f} s; the first save's memory was made ahead")
    for name in ("raw_write", "raw_read"):
        print(f"{name} {raw.num_bytes / record[name]['seconds'] / 1e9:.2f} GB/s")
    steps.trainer.close()


def line(result: dict[str, Any]) -> str:
    """One save in words."""
    return (
        f"buffer {result['buffer']}: {result['bytes'] / 1e9:.1f} GB in {result['seconds']:.1f} s "
        f"({result['bytes_per_s'] / 1e9:.2f} GB/s) beside {len(result['step_s'])} steps; "
        f"stall {result['stall_s']:.2f} s, held {result['held_s']:.2f} s, predicted "
        f"{result['predicted_stall_s']:.2f} s; steps x {result['ratio']:.3f}; "
        f"same bits: {result['same_bits']}"
    )


if __name__ == "__main__":
    main()
