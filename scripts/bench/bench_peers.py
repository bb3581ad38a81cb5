"""Time what one would run instead: PyTorch FSDP2, resident on the GPUs or offloaded to the CPU.

    python scripts/bench/bench_peers.py --model qwen3-4b --tokens 16384 32768 --out NAME

Same shapes, batch and optimizer as `bench_step.py`: random weights, sequences of 4096 tokens, bf16
compute on a float32 master, exact clip at norm 1.0, AdamW. Layers are compiled, attention is
whichever causal kernel (cuDNN or flash) is faster here, and the loss never holds all logits.

    resident            everything on the GPUs, no recomputation
    resident-recompute  everything on the GPUs, each layer recomputed in backward
    offload             CPUOffloadPolicy with recomputation, fused AdamW on the CPU

Each variant runs in processes of its own, one per GPU. Out of GPU memory, it is tried again with
half the rows per microbatch. Prints a table, and writes OUT.json after each result. Needs torch
and transformers, and no JAX.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_children
import bench_record

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.workload import BatchShape, Workload

VARIANTS: dict[str, dict[str, bool]] = {
    "resident": {"offload": False, "recompute": False},
    "resident-recompute": {"offload": False, "recompute": True},
    "offload": {"offload": True, "recompute": True},
}
WORKER = pathlib.Path(__file__).with_name("fsdp2_worker.py")
OFFLOAD_BYTES = 4 * 4
"""Host bytes per parameter of an offloaded run: master, gradient, two moments, all float32."""
TOKENS_WITHOUT_RECOMPUTE = 8192
"""Tokens of a microbatch that keeps all activations, where no rows are given: about the most whose
activations fit beside a 4B model's state on an H200."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape (tiny on a CPU)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768], help="per step")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--num-gpus", type=int, default=1, help="processes, on CPUs too")
    parser.add_argument("--rows-per-microbatch", type=int, help="rows a GPU computes at once")
    parser.add_argument("--loss-chunk-tokens", type=int, default=4096)
    parser.add_argument("--attention", nargs="+", default=["cudnn", "flash"], help="candidates")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--host-gib", type=float, help="skip an offload whose state alone needs more host memory"
    )
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps timed")
    parser.add_argument("--timeout-s", type=float, default=240, help="of one variant")
    parser.add_argument("--budget-s", type=float, default=560, help="of everything")
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json")
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    args = parse()
    if bad := [t for t in args.tokens if t % (args.seq * args.num_gpus)]:
        sys.exit(f"--tokens {bad} are no whole rows of {args.seq} on {args.num_gpus} GPUs")
    record = bench_record.record(packages=("torch", "transformers"), results=[], not_run=[])
    for variant in args.variants:
        first = first_job(args, variant)
        job: dict[str, Any] | None = first
        needed_gib = named_config(args.model).num_parameters * OFFLOAD_BYTES / 2**30
        if VARIANTS[variant]["offload"] and args.host_gib and needed_gib > args.host_gib:
            record["not_run"].append({**first, "reason": f"needs {needed_gib:.0f} GiB on the host"})
            continue
        while job is not None:
            left = args.budget_s - (time.perf_counter() - start)
            if left < min(30.0, args.timeout_s):
                record["not_run"].append({**job, "reason": "out of time"})
                break
            results: list[dict[str, Any]] = []

            def keep(result: dict[str, Any], job: Any = job, results: Any = results) -> None:
                results.append(complete(args, job, result))
                record["results"].append(results[-1])
                bench_record.save(args.out, record)

            reason = run(args, job, min(args.timeout_s, left), keep)
            if reason:
                record["not_run"].append({**job, "measured": len(results), "reason": reason})
            elapsed_s = time.perf_counter() - start
            print(
                f"{elapsed_s:5.0f} s  {variant}: {reason or 'done'}\n{table(results)}", flush=True
            )
            job = next_job(job, len(results), reason)
    bench_record.save(args.out, record)
    print(table(record["results"]))
    for job in record["not_run"]:
        print(f"not run: {job['variant']}, tokens {job['tokens']}: {job['reason']}")


def first_job(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """All token counts of a variant, with as many rows at once as can be expected to fit."""

    def rows(tokens: int) -> int:
        own: int = tokens // args.seq // args.num_gpus
        most: int = args.rows_per_microbatch or own
        if not args.rows_per_microbatch and not VARIANTS[variant]["recompute"]:
            most = max(1, TOKENS_WITHOUT_RECOMPUTE // args.seq)
        return min(own, most)

    return {
        "variant": variant,
        **VARIANTS[variant],
        "model": args.model,
        "seq": args.seq,
        "tokens": args.tokens,
        "rows": [rows(tokens) for tokens in args.tokens],
        "attention": args.attention,
        "compiled": not args.no_compile,
        "loss_chunk_tokens": args.loss_chunk_tokens,
        "warmup": args.warmup,
        "steps": args.steps,
    }


def next_job(job: dict[str, Any], num_done: int, reason: str | None) -> dict[str, Any] | None:
    """What remains to be tried after a failure: smaller microbatches, or the next token counts."""
    if reason is None or num_done == len(job["tokens"]):
        return None
    tokens, rows = job["tokens"][num_done:], list(job["rows"][num_done:])
    if not reason.startswith(bench_children.OUT_OF_MEMORY_TEXT):
        tokens, rows = tokens[1:], rows[1:]
    elif rows[0] == 1:
        return None  # more tokens need no less
    else:
        rows = [min(r, rows[0] // 2) for r in rows]
    return {**job, "tokens": tokens, "rows": rows} if tokens else None


def run(
    args: argparse.Namespace,
    job: dict[str, Any],
    timeout_s: float,
    on_result: Callable[[dict[str, Any]], None],
) -> str | None:
    """One process per GPU; why they did not all end well, or None."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/store"
        commands = [
            [str(WORKER), json.dumps(job), str(rank), str(args.num_gpus), meeting]
            for rank in range(args.num_gpus)
        ]
        return bench_children.run(
            commands,
            timeout_s=timeout_s,
            on_result=on_result,
            environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        )


def complete(
    args: argparse.Namespace, job: dict[str, Any], result: dict[str, Any]
) -> dict[str, Any]:
    """The result with the step's work, counted as for our own steps."""
    config = named_config(args.model)
    flops = Workload.from_config(config).model_flops_per_step(
        BatchShape(num_rows=result["tokens"] // args.seq, seq_length=args.seq)
    )
    named = {name: job[name] for name in ("variant", "model", "seq", "compiled")}
    return {
        **named,
        "num_gpus": args.num_gpus,
        "model_flops": flops,
        "num_parameters": config.num_parameters,
        **result,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Medians; memory is the largest over GPUs and the sum over processes."""
    header = (
        "| model | GPUs | variant | tokens | rows at once | step s | forward+backward s | clip s | "
        "optimizer s | tokens/s | TFLOP/s 6N per GPU | peak GiB | RSS GiB |"
    )
    lines = [header, "|" + "---|" * 13]
    for r in results:
        step = statistics.median(r["step_s"])
        phases = r["phases_s"]
        memory = r["memory_by_process"]
        peak = max((m["peak_gib"] or 0.0) for m in memory)
        lines.append(
            f"| {r['model']} | {r['num_gpus']} | {r['variant']} | {r['tokens']} | "
            f"{r['rows_per_microbatch']} | {step:.3f} | {phases['forward_backward']:.3f} | "
            f"{phases['clip']:.3f} | {phases['optimizer']:.3f} | {r['tokens'] / step:.0f} | "
            f"{r['model_flops'] / step / r['num_gpus'] / 1e12:.0f} | {peak:.1f} | "
            f"{sum(m['rss_gib'] for m in memory):.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
