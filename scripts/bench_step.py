"""Time one training step: resident compute, streamed compute, the full step with its host update.

    python scripts/bench_step.py --model qwen3-4b --tokens 16384 32768 --out docs/benchmarks/NAME

Weights are random in a named shape. *Resident* runs the same programs with all weights on the
devices and drops the gradients there; *streamed* brings the weights from the host state and sends
the gradients back; *full* adds norm, clip and the AdamW update on CPU devices. Ratios compare runs
of one process. Prints a table and writes OUT.json with the raw samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import bench_record
from bench_record import rss_gib

import slidedp_jax
from planner.strategy import Strategy

PEAK_FLOPS_PER_S = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape")
    parser.add_argument("--layers", type=int, help="only the first N layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows-per-microbatch", type=int, help="default: all of a step's")
    parser.add_argument("--block-size", type=int, default=Strategy.block_size)
    parser.add_argument("--layers-per-chunk", type=int, default=1)
    parser.add_argument("--prefetch-depth", type=int, default=1)
    parser.add_argument("--kept-chunks", type=int, default=0, help="top chunks not recomputed")
    parser.add_argument(
        "--resident-chunks", type=int, default=0, help="lowest chunks whose state stays on the GPUs"
    )
    parser.add_argument("--loss-chunk-tokens", type=int, default=4096)
    parser.add_argument("--num-devices", type=int)
    parser.add_argument("--num-host-devices", type=int)
    parser.add_argument("--weight-route", default="replicate")
    parser.add_argument("--gradient-route", default="reduce_scatter")
    parser.add_argument("--policies", nargs="*", default=["deferred"], help="full-step policies")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="of deferred steps")
    parser.add_argument("--steps", type=int, default=6, help="full steps timed per policy")
    parser.add_argument("--repeats", type=int, default=3, help="compute passes timed")
    parser.add_argument("--skip-resident", action="store_true")
    parser.add_argument("--kernel-form", choices=["blocked", "fused", "whole"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pinned-limit-gib", type=int, default=48)
    parser.add_argument("--compilation-cache", help="folder of JAX's persistent compilation cache")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    setup = slidedp_jax.configure(
        num_devices=args.num_devices,
        num_host_devices=args.num_host_devices,
        pinned_limit_gib=args.pinned_limit_gib,
        compilation_cache=args.compilation_cache,
    )
    results: list[dict[str, Any]] = []
    for policy in args.policies or ["none"]:
        for result in run_policy(args, setup, policy):
            results.append(result)
            save(args.out, results)
    print(table(results))


def save(out: pathlib.Path | None, results: list[dict[str, Any]]) -> None:
    """Write what has been measured so far, so that a run that is cut short leaves its part."""
    bench_record.save(out, bench_record.record(results=results))


def run_policy(args: argparse.Namespace, setup: Any, policy: str) -> Iterator[dict[str, Any]]:
    """All token counts with one update policy, one after the other; the state is made once."""
    import optax

    from models import decoder
    from models.config import named_config

    config = named_config(args.model)
    if args.layers:
        config = dataclasses.replace(
            config,
            num_hidden_layers=args.layers,
            layer_windows=config.layer_windows[: args.layers],
        )
    strategy = Strategy(
        layers_per_chunk=args.layers_per_chunk,
        rows_per_microbatch=args.rows_per_microbatch or 1,
        num_microbatches=1,
        weight_route=args.weight_route,
        gradient_route=args.gradient_route,
        update_policy="eager" if policy == "eager" else "deferred",
        prefetch_depth=args.prefetch_depth,
        kept_chunks=args.kept_chunks,
        resident_chunks=args.resident_chunks,
        weight_slots=args.prefetch_depth + 2,
        loss_chunk_tokens=args.loss_chunk_tokens,
        compute_dtype=args.dtype,
        num_host_devices=setup.num_host_devices,
        block_size=args.block_size,
    )
    model = decoder.build(config, loss_chunk_tokens=args.loss_chunk_tokens)
    tracer = timed_tracer()
    start = time.perf_counter()
    trainer = slidedp_jax.Trainer(
        model,
        optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.1),
        strategy=strategy,
        parameters=lambda write: fill(model, write),
        max_grad_norm=None if policy == "eager" else args.max_grad_norm,
        kernel_form=args.kernel_form,
        tracer=tracer,
    )
    ready_s = time.perf_counter() - start
    print(f"state ready in {ready_s:.1f} s, kernel {trainer.kernel_form}", flush=True)
    for tokens in args.tokens:
        result = measure(args, config, trainer, tracer, policy, tokens)
        result["state_ready_s"] = ready_s
        result["kernel_form"] = trainer.kernel_form
        print(table([result]), flush=True)
        yield result
    trainer.close()


def timed_tracer() -> Any:
    from slidedp_jax.trace import RecordingTracer

    return RecordingTracer()


def fill(model: Any, write: Any) -> None:
    """Random weights from one block of normal numbers, cut anew for each parameter."""
    import concurrent.futures
    import math

    import jax
    import numpy as np

    block = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)

    def one(item: tuple[str, tuple[int, ...]]) -> None:
        name, shape = item
        if len(shape) == 1:
            write(name, np.ones(shape, np.float32))
            return
        repeats = -(-math.prod(shape) // block.size)
        values = np.concatenate([block] * repeats)[: math.prod(shape)]
        write(name, values.reshape(shape))

    shapes = [
        (name, tuple(leaf.shape))
        for stage in model.stages()
        for name, leaf in zip(stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(one, shapes))


def measure(
    args: argparse.Namespace, config: Any, trainer: Any, tracer: Any, policy: str, tokens: int
) -> dict[str, Any]:
    """Resident, streamed and full step at one token count."""
    import jax
    import numpy as np

    from planner.workload import BatchShape, Workload

    rng = np.random.default_rng(1)
    ids = rng.integers(0, config.vocab_size, (tokens // args.seq, args.seq)).astype(np.int32)
    batch = {"input_ids": ids, "labels": ids}
    if args.rows_per_microbatch is None:
        rows = max(1, len(ids) // trainer.num_devices)
        trainer.strategy = dataclasses.replace(trainer.strategy, rows_per_microbatch=rows)
    device = jax.local_devices()[0]
    result: dict[str, Any] = {"model": args.model, "tokens": tokens, "policy": policy}
    result["max_grad_norm"] = None if policy == "eager" else args.max_grad_norm
    result["strategy"] = trainer.strategy.__dict__.copy()
    passes = ComputePasses(trainer, batch)
    (result["first_streamed_s"], *result["streamed_s"]), result["streamed_dispatch_s"] = (
        passes.streamed(args.repeats)
    )
    if device.platform != "cpu":
        result["device_peak_gib"] = device.memory_stats()["peak_bytes_in_use"] / 2**30
    if policy != "none":
        result.update(full_steps(args, trainer, tracer, batch))
    if device.platform != "cpu":
        result["device_peak_full_gib"] = device.memory_stats()["peak_bytes_in_use"] / 2**30
    if not args.skip_resident:  # last, since its weights would count among the peaks
        _, *result["resident_s"] = passes.resident(args.repeats)
    work = Workload.from_config(config).model_flops_per_step(
        BatchShape(num_rows=ids.shape[0], seq_length=args.seq)
    )
    result["model_flops"] = work
    result["num_parameters"] = config.num_parameters
    result["rss_gib"] = rss_gib()
    result["owned_bytes_per_parameter"] = trainer.store.owned_bytes / trainer.store.num_parameters
    return result


class ComputePasses:
    """Forward and backward without updates, on resident or on streamed weights."""

    def __init__(self, trainer: Any, batch: Any):
        self._trainer = trainer
        self._prepared = trainer.prepare(batch)

    def resident(self, repeats: int) -> list[float]:
        """Seconds per pass with every chunk's weights on the devices; gradients are dropped.

        The first pass is a warm-up.
        """
        import jax

        from slidedp_jax.weight_window import ResidentWeights

        trainer = self._trainer
        trainer.weights.require(trainer.step_count)
        trees = {}
        for chunk in range(len(trainer.store.layouts)):
            trees[chunk] = jax.block_until_ready(trainer.weights.take(chunk))
            trainer.weights.release(chunk)
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            outputs = trainer.forward_backward(
                ResidentWeights(trees), self._prepared, lambda *_: None
            )
            jax.block_until_ready((outputs.squares, outputs.losses))
            seconds.append(time.perf_counter() - start)
        return seconds

    def streamed(self, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds per pass until the last gradient is on the host, and those of dispatch.

        Dispatch is the CPU time of this thread, which issues everything: waits do not count. The
        first pass compiles what is new, and has no seconds of dispatch.
        """
        trainer = self._trainer
        trainer.wait()
        seconds, dispatch = [], []
        for _ in range(repeats + 1):
            arriving: list[Any] = []

            def send(chunk: int, wire: Any, arriving: list[Any] = arriving) -> None:
                arriving.append(trainer.send(chunk, wire))

            trainer.weights.require(trainer.step_count)
            start, busy = time.perf_counter(), time.thread_time()
            trainer.forward_backward(trainer.weights, self._prepared, send)
            dispatch.append(time.thread_time() - busy)
            while arriving:  # none may be held when the next pass makes its own
                arriving.pop(0).wait()
            seconds.append(time.perf_counter() - start)
        return seconds, dispatch[1:]


def full_steps(args: argparse.Namespace, trainer: Any, tracer: Any, batch: Any) -> dict[str, Any]:
    """Full steps back to back; the time between the ends of two steps is one step."""
    ends, losses, norms, rss = [time.perf_counter()], [], [], []
    tracer.spans.clear()
    for _ in range(args.steps + 1):
        metrics = trainer.step(batch)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm if trainer.strategy.update_policy == "deferred" else None)
        ends.append(time.perf_counter())
        rss.append(rss_gib())
    trainer.wait()
    ends.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(ends[:-1])]
    return {
        "full_s": seconds[1:],
        "drain_s": ends[-1] - ends[-2],
        "losses": losses,
        "grad_norms": norms,
        "rss_by_step_gib": rss,
        "host_update_busy_s": tracer.busy_s("host_update") / (args.steps + 1),
        "h2d_dispatch_s": tracer.busy_s("h2d") / (args.steps + 1),
        "waits_s": waits(tracer, ends[2], args.steps - 1),
        "last_step_spans": last_spans(tracer, ends[-3]),
    }


def waits(tracer: Any, since: float, steps: int) -> dict[str, float]:
    """Mean seconds per step waited for the norm, the embedding's update, the layers' updates."""
    seconds = {"norm": 0.0, "embed": 0.0, "layers and head": 0.0}
    for span in tracer.spans:
        if span.lane == "wait" and tracer.origin_s + span.start_s >= since:
            what = span.name.removeprefix("wait for ").removeprefix("the ")
            what = what if what in seconds else "layers and head"
            seconds[what] += (span.end_s - span.start_s) / steps
    return seconds


def last_spans(tracer: Any, since: float) -> list[tuple[str, str, float, float]]:
    """(lane, name, start, end) of what began after `since`, milliseconds after it."""
    return [
        (
            span.lane,
            span.name,
            round((tracer.origin_s + span.start_s - since) * 1e3, 2),
            round((tracer.origin_s + span.end_s - since) * 1e3, 2),
        )
        for span in tracer.spans
        if tracer.origin_s + span.start_s >= since
    ]


def table(results: list[dict[str, Any]]) -> str:
    header = (
        "| model | tokens | policy | resident s | streamed s | streamed/resident | full s | "
        "full/resident | tokens/s | update busy s | waits for norm / embed / layers s | "
        "TFLOP/s 6N | peak GiB | RSS GiB |"
    )
    lines = [header, "|" + "---|" * 14]
    for r in results:
        resident = statistics.median(r["resident_s"]) if r.get("resident_s") else float("nan")
        streamed = statistics.median(r["streamed_s"])
        full = statistics.median(r["full_s"]) if r.get("full_s") else float("nan")
        lines.append(
            f"| {r['model']} | {r['tokens']} | {r['policy']} | {resident:.3f} | {streamed:.3f} | "
            f"{resident / streamed:.3f} | {full:.3f} | {resident / full:.3f} | "
            f"{r['tokens'] / full:.0f} | {r.get('host_update_busy_s', 0):.2f} | "
            f"{' / '.join(f'{s:.2f}' for s in r.get('waits_s', {}).values())} | "
            f"{r['model_flops'] / full / 1e12:.0f} | {r.get('device_peak_full_gib', 0):.1f} | "
            f"{r['rss_gib']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
