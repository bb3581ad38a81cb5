"""Compare two ways of summing gradients over the GPUs: beside the next chunk's compute, and after.

    python scripts/bench/bench_gradient_sums.py --tokens-per-device 8192 32768 --out NAME

*beside* is what the trainer does: the sum of a chunk's gradients is part of the backward program of
the chunk below. *after* packs and sums each chunk's gradients in a program of its own, as a single
GPU does. One process and one state per token count, the planner's strategy, both ways in turn and
twice: forward and backward on streamed and on resident weights, and full steps with a clip.
On a CPU: --model tiny --seq 64 --tokens-per-device 128.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record
import multi_gpu_speed
import step_timing

import slidedp_jax

COLUMNS = ("streamed_s", "resident_s", "full_s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape")
    parser.add_argument("--num-devices", type=int, default=2)
    parser.add_argument("--tokens-per-device", type=int, nargs="+", default=[8192])
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5, help="passes and full steps timed")
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    slidedp_jax.configure(num_devices=args.num_devices)
    record = bench_record.record(results=[])
    for tokens in args.tokens_per_device:
        for result in both_ways(args, tokens):
            record["results"].append(result)
            bench_record.save(args.out, record)
    print("| tokens per device | sums | streamed s | resident s | full s |\n|---|---|---|---|---|")
    for result in record["results"]:
        cells = " | ".join(f"{statistics.median(result[column]):.4f}" for column in COLUMNS)
        print(f"| {result['tokens_per_device']} | {result['sums']} | {cells} |")


def both_ways(args: argparse.Namespace, tokens: int) -> Iterator[dict[str, Any]]:
    """Each way twice, in turn."""
    from slidedp_jax.planner.candidates import Choices
    from slidedp_jax.this_machine import plan_for

    config = step_timing.model_config(args.model, None)
    rows = args.num_devices * tokens // args.seq
    by_devices = Choices(gradient_route="reduce_scatter")
    strategy = plan_for(
        config, rows_per_step=rows, tokens_per_row=args.seq, choices=by_devices
    ).strategy
    trainer, tracer = multi_gpu_speed.make_trainer(config, strategy)
    batch = multi_gpu_speed.random_batch(config, rows, args.seq)
    passes = step_timing.ComputePasses(trainer, batch)
    for way in ("after", "beside") * 2:
        trainer._pipeline._sums_beside = way == "beside"
        passes.streamed(0)  # compiles
        _, *streamed = passes.streamed(args.repeats)[0]
        full = step_timing.full_steps(args.repeats, trainer, tracer, batch)
        _, *resident = passes.resident(args.repeats)
        yield {
            "tokens_per_device": tokens,
            "sums": way,
            "strategy": strategy.__dict__.copy(),
            **dict(zip(COLUMNS, (streamed, resident, full["full_s"]), strict=True)),
            "waits_s": full["waits_s"],
            **multi_gpu_speed.memory(),
        }
    trainer.close()


if __name__ == "__main__":
    main()
