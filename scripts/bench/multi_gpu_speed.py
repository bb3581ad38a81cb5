"""One process of `bench_multi_gpu.py`: speed and bytes of one device count and pair of routes.

Takes a JSON job and the file for its results. The process keeps to its share of the machine's
cores, so that one GPU has half of what two have.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import step_timing
from bench_children import Report
from bench_record import rss_gib

import slidedp_jax


def main() -> None:
    job = json.loads(sys.argv[1])
    report = Report(sys.argv[2])
    start = time.perf_counter()
    cores = keep_to_share(job["core_share"])
    setup = slidedp_jax.configure(
        num_devices=job["num_devices"], pinned_limit_gib=job["pinned_limit_gib"]
    )
    facts = {"cores": cores, "num_host_devices": setup.num_host_devices}
    config = step_timing.model_config(job["model"], job["layers"])
    trainer = None
    for tokens in job["tokens_per_device"]:
        rows = tokens * job["num_devices"] // job["seq"]
        if trainer is None or job["planned"]:
            if trainer is not None:
                trainer.close()
            strategy = make_strategy(job, setup, config, rows)
            trainer, tracer = make_trainer(config, strategy)
            facts |= about(trainer, time.perf_counter() - start)
        batch = random_batch(config, rows, job["seq"])
        result = compute_passes(job, trainer, batch)
        report({"tokens_per_device": tokens, **facts, **result, **memory()})
        if tokens in job["full_tokens"]:
            full = step_timing.full_steps(job["steps"], trainer, tracer, batch)
            report({"tokens_per_device": tokens, **facts, **full, **memory()})
    if trainer is not None:
        trainer.close()


def keep_to_share(share: float) -> int:
    """Restrict this process to the first part of its cores; how many those are."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, round(len(cores) * share))
    os.sched_setaffinity(0, cores[:count])
    return count


def make_strategy(job: dict[str, Any], setup: Any, config: Any, rows: int) -> Any:
    """As the command line says, or what a run of that many rows would be given.

    The former is for steps of the most tokens.
    """
    from slidedp_jax.planner.strategy import Strategy
    from slidedp_jax.this_machine import plan_for

    if job["planned"]:
        return plan_for(config, rows_per_step=rows, tokens_per_row=job["seq"]).strategy
    at_once = job["num_devices"] * job["rows_per_microbatch"]
    most_rows = max(job["tokens_per_device"]) * job["num_devices"] // job["seq"]
    return Strategy(
        layers_per_chunk=job["layers_per_chunk"],
        rows_per_microbatch=job["rows_per_microbatch"],
        num_microbatches=-(-most_rows // at_once),
        weight_route=job["weight_route"],
        gradient_route=job["gradient_route"],
        prefetch_depth=1,
        kept_chunks=job["kept_chunks"],
        resident_chunks=0 if job["gradient_route"] == "host_sum" else job["resident_chunks"],
        loss_chunk_tokens=job["loss_chunk_tokens"],
        num_host_devices=setup.num_host_devices,
    )


def make_trainer(config: Any, strategy: Any) -> tuple[Any, Any]:
    """A trainer with random weights, and its tracer."""
    import optax

    from slidedp_jax.models import decoder

    model = decoder.build(config)
    tracer = step_timing.timed_tracer()
    trainer = slidedp_jax.Trainer(
        model,
        optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.1),
        strategy=strategy,
        parameters=lambda write: step_timing.fill(model, write),
        max_grad_norm=1.0,
        tracer=tracer,
    )
    return trainer, tracer


def about(trainer: Any, ready_s: float) -> dict[str, Any]:
    """What is known before the first step."""
    return {
        "state_ready_s": ready_s,
        "strategy": trainer.strategy.__dict__.copy(),
        "kernel_form": trainer.kernel_form,
        "num_parameters": trainer.store.num_parameters,
        "owned_bytes_per_parameter": trainer.store.owned_bytes / trainer.store.num_parameters,
    }


def random_batch(config: Any, rows: int, seq: int) -> dict[str, Any]:
    import numpy as np

    ids = np.random.default_rng(1).integers(0, config.vocab_size, (rows, seq)).astype(np.int32)
    return {"input_ids": ids, "labels": ids}


def compute_passes(job: dict[str, Any], trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Streamed and resident passes, bytes moved by one pass, and Python's share per chunk.

    A *visit* is a chunk that computes forward or backward.
    """
    moved = count_bytes(trainer, batch)
    passes = step_timing.ComputePasses(trainer, batch)
    passes.streamed(0)  # compiles
    (_, *streamed), dispatch = passes.streamed(job["repeats"])
    _, *resident = passes.resident(job["repeats"])
    visits = 2 * len(trainer.store.layouts)
    return {
        **moved,
        "streamed_s": streamed,
        "resident_s": resident,
        "streamed_dispatch_s": dispatch,
        "visits": visits,
        "dispatch_ms_per_visit": statistics.median(dispatch) / visits * 1e3,
    }


def count_bytes(trainer: Any, batch: dict[str, Any]) -> dict[str, float]:
    """Bytes per parameter that one pass moves, over all devices: as fetched, and as arrived."""
    trainer.wait()
    trainer.weights.require(trainer.step_count)
    before, down, arriving = trainer.weights.bytes_fetched, 0, []

    def send(chunk: int, wire: Any) -> None:
        nonlocal down
        gradient = trainer.passes.send(chunk, wire)
        if not trainer.store.layouts[chunk].resident:
            down += sum(
                shard.data.nbytes for array in gradient.pinned for shard in array.addressable_shards
            )
        arriving.append(gradient)

    trainer.passes.forward_backward(
        trainer.weights, trainer.passes.prepare(batch, training=True), send
    )
    for gradient in arriving:
        gradient.wait()
    parameters = trainer.store.num_parameters
    return {
        "up_bytes_per_parameter": (trainer.weights.bytes_fetched - before) / parameters,
        "down_bytes_per_parameter": down / parameters,
    }


def memory() -> dict[str, float]:
    """Resident host memory, and the largest peak of the devices where they tell it."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] / 2**30 for s in stats if "peak_bytes_in_use" in s]
    return {"rss_gib": rss_gib(), **({"device_peak_gib": max(peaks)} if peaks else {})}


if __name__ == "__main__":
    main()
