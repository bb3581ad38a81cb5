"""Time one training step: resident compute, streamed compute, the full step with its host update.

    python scripts/bench/bench_step.py --model qwen3-4b --tokens 16384 32768 --out NAME

Weights are random in a named shape, or those of a Hugging Face folder. *Resident* runs the same
programs with all weights on the devices and drops the gradients there; *streamed* brings the
weights from the host state and sends the gradients back; *full* adds norm, clip and the AdamW
update on CPU devices. Ratios compare runs of one process. Prints a table and writes OUT.json with
the raw samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record
import step_timing
from bench_record import rss_gib

import slidedp_jax
from slidedp_jax.planner.strategy import Strategy


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape, or a model folder")
    parser.add_argument("--layers", type=int, help="only the first N layers, of a shape")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows-per-microbatch", type=int, help="default: all of a step's")
    parser.add_argument("--block-size", type=int, default=Strategy.block_size)
    parser.add_argument(
        "--planned",
        action="store_true",
        help="take the planner's strategy for each token count, with kept and resident chunks",
    )
    parser.add_argument("--layers-per-chunk", type=int, default=1)
    parser.add_argument("--prefetch-depth", type=int, default=1)
    parser.add_argument("--kept-chunks", type=int, default=0, help="top chunks not recomputed")
    parser.add_argument(
        "--resident-chunks", type=int, default=0, help="lowest chunks whose state stays on the GPUs"
    )
    parser.add_argument(
        "--attention-chunks", type=int, default=0, help="chunks below those that keep attention"
    )
    parser.add_argument(
        "--host-boundaries", type=int, default=0, help="lowest chunks whose inputs wait on the host"
    )
    parser.add_argument("--layer-block-tokens", type=int, default=0, help="0: whole rows")
    parser.add_argument("--loss-chunk-tokens", type=int, default=4096)
    parser.add_argument("--vocab-slices", type=int, default=1, help="of the head, in two passes")
    parser.add_argument("--slice-head-weights", action="store_true")
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
    parser.add_argument("--expert-products", default="auto", help="kernels of a mixture's experts")
    parser.add_argument("--weight-rounding", choices=["dither", "nearest"])
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
    """All token counts with one update policy; the state is made once for each strategy."""
    config = step_timing.model_config(args.model, args.layers)
    if args.planned:
        for tokens in args.tokens:
            plan = planned(args, config, policy, tokens)
            yield from run_strategy(args, config, policy, plan.strategy, [tokens], plan)
    else:
        strategy = stated_strategy(args, setup, policy)
        yield from run_strategy(args, config, policy, strategy, args.tokens, None)


def planned(args: argparse.Namespace, config: Any, policy: str, tokens: int) -> Any:
    """What a run of this size would be given."""
    from slidedp_jax.this_machine import plan_for

    return plan_for(
        config,
        rows_per_step=tokens // args.seq,
        tokens_per_row=args.seq,
        max_grad_norm=None if policy == "eager" else args.max_grad_norm,
        compute_dtype=args.dtype,
    )


def stated_strategy(args: argparse.Namespace, setup: Any, policy: str) -> Strategy:
    """The strategy of the command line, for steps of the most tokens."""
    cut = microbatches(args, max(args.tokens), len(setup.devices()[0]))
    width = step_timing.model_config(args.model, args.layers).hidden_size
    itemsize = 2 if args.dtype == "bfloat16" else 4
    boundary = cut["rows_per_microbatch"] * args.seq * width * itemsize
    return Strategy(
        layers_per_chunk=args.layers_per_chunk,
        rows_per_microbatch=cut["rows_per_microbatch"],
        num_microbatches=cut["num_microbatches"],
        weight_route=args.weight_route,
        gradient_route=args.gradient_route,
        update_policy="eager" if policy == "eager" else "deferred",
        prefetch_depth=args.prefetch_depth,
        kept_chunks=args.kept_chunks,
        attention_chunks=args.attention_chunks,
        host_boundaries=args.host_boundaries,
        host_boundary_bytes=boundary if args.host_boundaries else 0,
        layer_block_tokens=args.layer_block_tokens,
        resident_chunks=args.resident_chunks,
        loss_chunk_tokens=args.loss_chunk_tokens,
        vocab_slices=args.vocab_slices,
        slice_head_weights=args.slice_head_weights,
        compute_dtype=args.dtype,
        num_host_devices=setup.num_host_devices,
        block_size=args.block_size,
    )


def microbatches(args: argparse.Namespace, tokens: int, num_devices: int) -> dict[str, int]:
    """How a step is cut: as the command line says, by default not at all."""
    rows = max(1, tokens // args.seq // num_devices)
    at_once = args.rows_per_microbatch or rows
    return {"rows_per_microbatch": at_once, "num_microbatches": -(-rows // at_once)}


def run_strategy(
    args: argparse.Namespace,
    config: Any,
    policy: str,
    strategy: Strategy,
    token_counts: list[int],
    plan: Any,
) -> Iterator[dict[str, Any]]:
    """Token counts one after the other on one state."""
    import optax

    from slidedp_jax.models import decoder

    model = decoder.build(config, expert_products=args.expert_products)
    tracer = step_timing.timed_tracer()
    start = time.perf_counter()
    trainer = slidedp_jax.Trainer(
        model,
        optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.1),
        strategy=strategy,
        parameters=lambda write: step_timing.write_weights(args.model, config, model, write),
        max_grad_norm=None if policy == "eager" else args.max_grad_norm,
        kernel_form=args.kernel_form,
        weight_rounding=args.weight_rounding,
        tracer=tracer,
    )
    ready_s = time.perf_counter() - start
    print(f"state ready in {ready_s:.1f} s, kernel {trainer.kernel_form}", flush=True)
    for tokens in token_counts:
        result = measure(args, config, trainer, tracer, policy, tokens)
        result["state_ready_s"] = ready_s
        result["kernel_form"] = trainer.kernel_form
        result["weight_rounding"] = trainer.weight_rounding.rounding
        if plan is not None:
            result["planned_step_s"] = plan.chosen.time.step_s
            result["planned_device_gib"] = plan.chosen.memory.device_bytes / 2**30
            result["planned_host_gib"] = plan.chosen.memory.host_bytes / 2**30
        print(table([result]), flush=True)
        yield result
    trainer.close()


def measure(
    args: argparse.Namespace, config: Any, trainer: Any, tracer: Any, policy: str, tokens: int
) -> dict[str, Any]:
    """Resident, streamed and full step at one token count."""
    import jax
    import numpy as np

    from slidedp_jax.planner.presets import preset_of_kind
    from slidedp_jax.planner.workload import BatchShape, Workload

    rng = np.random.default_rng(1)
    ids = rng.integers(0, config.vocab_size, (tokens // args.seq, args.seq)).astype(np.int32)
    batch = {"input_ids": ids, "labels": ids}
    if not args.planned:
        cut = microbatches(args, tokens, trainer.num_devices)
        trainer.strategy = dataclasses.replace(trainer.strategy, **cut)
    device = jax.local_devices()[0]
    result: dict[str, Any] = {"model": args.model, "tokens": tokens, "policy": policy}
    result["expert_products"] = args.expert_products if config.num_experts else None
    result["max_grad_norm"] = None if policy == "eager" else args.max_grad_norm
    result["strategy"] = trainer.strategy.__dict__.copy()
    before_gib = device_peak_gib(device)
    passes = step_timing.ComputePasses(trainer, batch)
    (result["first_streamed_s"], *result["streamed_s"]), result["streamed_dispatch_s"] = (
        passes.streamed(args.repeats)
    )
    result["device_peak_gib"] = device_peak_gib(device)
    result["copies_s"] = passes.copies()
    if policy != "none":
        result.update(step_timing.full_steps(args.steps, trainer, tracer, batch))
    result["device_peak_full_gib"] = device_peak_gib(device)
    # The allocator's peak is that of the process: an earlier measurement may have set it.
    result["device_peak_is_a_bound"] = 0 < before_gib == result["device_peak_full_gib"]
    if not args.skip_resident:  # last, since its weights would count among the peaks
        try:
            _, *result["resident_s"] = passes.resident(args.repeats)
        except jax.errors.JaxRuntimeError as error:  # all weights beside all that is kept
            result["resident_error"] = str(error).splitlines()[0]
    work = Workload.from_config(config).model_flops_per_step(
        BatchShape(num_rows=ids.shape[0], seq_length=args.seq)
    )
    result["model_flops"] = work
    layers = config.num_active_parameters - config.num_embedding_parameters
    result["layer_flops_8n"] = 8.0 * tokens * (layers - config.num_head_parameters)
    result["num_active_parameters"] = config.num_active_parameters
    own = preset_of_kind(device.device_kind)
    result["peak_flops_per_s"] = own and trainer.num_devices * own.peak_flops_per_s
    result["num_parameters"] = config.num_parameters
    result["rss_gib"] = rss_gib()
    result["owned_bytes_per_parameter"] = trainer.store.owned_bytes / trainer.store.num_parameters
    return result


def device_peak_gib(device: Any) -> float:
    """Largest use of a device's memory since the process began; 0 on CPUs."""
    return float((device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30)


COLUMNS = (
    "model",
    "tokens",
    "policy",
    "resident s",
    "streamed s",
    "resident/streamed",
    "full s",
    "resident/full",
    "tokens/s",
    "busy h2d / compute / d2h / update s",
    "waits for norm / embed / layers s",
    "TFLOP/s 6N full",
    "MFU full",
    "TFLOP/s 8N of layers, resident",
    "kept / resident chunks",
    "peak GiB",
    "RSS GiB",
)


def table(results: list[dict[str, Any]]) -> str:
    """Medians; lanes are busy for what each would take alone."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for r in results:
        resident = statistics.median(r["resident_s"]) if r.get("resident_s") else float("nan")
        streamed = statistics.median(r["streamed_s"])
        full = statistics.median(r["full_s"]) if r.get("full_s") else float("nan")
        h2d, d2h = r["copies_s"].values()
        update = r.get("host_update_busy_s", 0.0)
        mfu = r["model_flops"] / full / r["peak_flops_per_s"] if r["peak_flops_per_s"] else None
        cells = [
            *(r["model"], str(r["tokens"]), r["policy"], f"{resident:.3f}", f"{streamed:.3f}"),
            *(f"{resident / streamed:.3f}", f"{full:.3f}", f"{resident / full:.3f}"),
            f"{r['tokens'] / full:.0f}",
            f"{h2d:.2f} / {resident:.2f} / {d2h:.2f} / {update:.2f}",
            " / ".join(f"{seconds:.2f}" for seconds in r.get("waits_s", {}).values()),
            f"{r['model_flops'] / full / 1e12:.0f}",
            f"{mfu:.1%}" if mfu is not None else "",
            f"{r['layer_flops_8n'] / resident / 1e12:.0f}",
            f"{r['strategy']['kept_chunks']} / {r['strategy']['resident_chunks']}",
            f"{'< ' * r['device_peak_is_a_bound']}{r['device_peak_full_gib']:.1f}",
            f"{r['rss_gib']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
