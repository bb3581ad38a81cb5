"""One process of `bench_multi_gpu.py`: do all device counts and routes train the same model?

Takes a JSON job and the file for its results. Five AdamW steps of a few layers on batches with
uneven supervision, under a clip that is hit in some steps and not in others; every device count
and route against one device. Then a checkpoint that goes from many devices to one and back, and a
longer run that must not hang.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import step_timing
from bench_children import Report

import slidedp_jax
from slidedp_jax.planner.hardware import ComputeDtype
from slidedp_jax.planner.strategy import GradientRoute, WeightRoute

TOLERANCES = {
    "float32": {"loss": 1e-5, "norm": 1e-5, "parameters": 1e-5},
    # bf16 rounds each device's products, and with host_sum each device's gradient.
    "bfloat16": {"loss": 3e-3, "norm": 3e-2, "parameters": 3e-3},
}
"""Largest relative differences from one device: of any step's loss and gradient norm, and of any
parameter after the last step (Frobenius norms)."""

ROUTES = [
    ("replicate", "reduce_scatter"),
    ("shard_all_gather", "reduce_scatter"),
    ("replicate", "host_sum"),
    ("shard_all_gather", "host_sum"),
]
RESIDENT_CHUNKS = 2
"""Embedding and first layer, on the GPUs in further runs with each pair that allows it."""
NUM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures by step, and the parameters after the last one."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Any]


def main() -> None:
    job = json.loads(sys.argv[1])
    report = Report(sys.argv[2])
    counts = [count for count in job["num_devices"] if count > 1]
    group = math.lcm(*counts)
    setup = slidedp_jax.configure(
        num_devices=max(counts),
        num_host_devices=-(-max(1, len(os.sched_getaffinity(0)) * 3 // 4) // group) * group,
        pinned_limit_gib=job["pinned_limit_gib"],
    )
    check = Check(job, setup.num_host_devices, max(counts))
    for dtype in job["dtypes"]:
        reference = check.train(1, dtype=dtype)
        for count in counts:
            for options in variants():
                run = check.train(count, dtype=dtype, **options)
                report(check.compare(run, reference, dtype=dtype, num_devices=count) | options)
        if dtype == "float32":
            for count in counts:
                report(check.checkpoint_travels(count))
    for count in counts:
        report(check.soak(count))


def variants() -> list[dict[str, Any]]:
    """All pairs of routes, and state on the GPUs."""
    pairs = [
        {"weight_route": weights, "gradient_route": gradients} for weights, gradients in ROUTES
    ]
    resident = [
        pair | {"resident_chunks": RESIDENT_CHUNKS}
        for pair in pairs
        if pair["gradient_route"] == "reduce_scatter"
    ]
    return pairs + resident


class Check:
    """The model, its batches, and a clip that some of them hit.

    Args:
      job: `model`, `layers`, `seq`, `soak_steps`.
      num_host_devices: a multiple of every device count.
      most_devices: the largest count; it decides the number of rows.
    """

    def __init__(self, job: dict[str, Any], num_host_devices: int, most_devices: int):
        from slidedp_jax.models import decoder

        self._job = job
        self._num_host_devices = num_host_devices
        self._config = step_timing.model_config(job["model"], job["layers"])
        self._model = decoder.build(self._config)
        self._num_rows = 2 * most_devices
        self._batches = [self._batch(step, self._num_rows) for step in range(NUM_STEPS)]
        self._kernel_form: Any = None
        self._limit = 1e9
        # Unclipped norms tell which limit some of the steps will hit.
        norms = self.train(1, dtype="float32").norms
        self._limit = statistics.median(norms[1:])

    def train(self, num_devices: int, **options: Any) -> Run:
        """All batches, one step each."""
        with self._trainer(num_devices, **options) as trainer:
            losses, norms = steps(trainer, self._batches)
            return Run(losses=losses, norms=norms, parameters=trainer.parameters())

    def compare(self, run: Run, reference: Run, *, dtype: str, num_devices: int) -> dict[str, Any]:
        """Largest relative differences, the limits that hold for them, and the clip's hits."""
        found = {
            "loss": largest_difference(run.losses, reference.losses),
            "norm": largest_difference(run.norms, reference.norms),
            "parameters": max(
                relative_distance(run.parameters[name], values)
                for name, values in reference.parameters.items()
            ),
        }
        tolerance = TOLERANCES[dtype]
        hits = sum(norm > self._limit for norm in reference.norms)
        return {
            "check": "against one device",
            "dtype": dtype,
            "num_devices": num_devices,
            "differences": found,
            "tolerances": tolerance,
            "clip_hits": hits,
            "losses": run.losses,
            "grad_norms": run.norms,
            "passed": 0 < hits < NUM_STEPS
            and all(found[name] <= tolerance[name] for name in found),
        }

    def checkpoint_travels(self, num_devices: int) -> dict[str, Any]:
        """Two steps on many devices, one on one device, the rest on many again."""
        from slidedp_jax.checkpoint.retention import list_steps

        whole = self.train(num_devices, dtype="float32")
        losses: list[float] = []
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for count, first, last in (
                (num_devices, 0, 2),
                (1, 2, 3),
                (num_devices, 3, NUM_STEPS),
            ):
                with self._trainer(count, dtype="float32") as trainer:
                    if first:
                        trainer.restore(list_steps(folder)[-1])
                    losses += steps(trainer, self._batches[first:last])[0]
                    if last < NUM_STEPS:
                        trainer.save(folder)
        difference = largest_difference(losses, whole.losses)
        tolerance = TOLERANCES["float32"]["loss"]
        return {
            "check": f"checkpoint {num_devices} -> 1 -> {num_devices}",
            "dtype": "float32",
            "num_devices": num_devices,
            "differences": {"loss": difference},
            "tolerances": {"loss": tolerance},
            "losses": losses,
            "seconds": time.perf_counter() - start,
            "passed": difference <= tolerance,
        }

    def soak(self, num_devices: int) -> dict[str, Any]:
        """Many steps; a hang shows as the process's time limit."""
        start = time.perf_counter()
        count = self._job["soak_steps"]
        with self._trainer(
            num_devices, dtype="bfloat16", resident_chunks=RESIDENT_CHUNKS
        ) as trainer:
            metrics = [trainer.step(self._batches[n % NUM_STEPS]) for n in range(count)]
            trainer.wait()
            losses = [metric.loss for metric in metrics]
        return {
            "check": f"{count} steps",
            "dtype": "bfloat16",
            "num_devices": num_devices,
            "losses": [*losses[:5], *losses[-5:]],
            "seconds": time.perf_counter() - start,
            "passed": all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0],
        }

    def _trainer(
        self,
        num_devices: int,
        *,
        dtype: ComputeDtype,
        weight_route: WeightRoute = "replicate",
        gradient_route: GradientRoute = "reduce_scatter",
        resident_chunks: int = 0,
    ) -> Any:
        import optax

        from slidedp_jax.planner.strategy import Strategy

        strategy = Strategy(
            layers_per_chunk=1,
            rows_per_microbatch=1,
            num_microbatches=-(-self._num_rows // num_devices),
            weight_route=weight_route,
            gradient_route=gradient_route,
            resident_chunks=resident_chunks,
            loss_chunk_tokens=512,
            compute_dtype=dtype,
            num_host_devices=self._num_host_devices,
        )
        trainer = slidedp_jax.Trainer(
            self._model,
            # Adam divides a gradient by its own size. With eps near that size, residues of rounding
            # count for no more than they are.
            optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-4, weight_decay=0.1),
            strategy=strategy,
            parameters=lambda write: step_timing.fill(self._model, write),
            max_grad_norm=self._limit,
            kernel_form=self._kernel_form,
            num_devices=num_devices,
        )
        self._kernel_form = trainer.kernel_form
        return trainer

    def _batch(self, step: int, rows: int) -> dict[str, Any]:
        """Random rows, each with a supervised part of its own length."""
        import numpy as np

        seq = self._job["seq"]
        rng = np.random.default_rng(step)
        ids = rng.integers(0, self._config.vocab_size, (rows, seq)).astype(np.int32)
        start = rng.integers(0, seq - 1, (rows, 1))
        labels = np.where(np.arange(seq) >= start, ids, -100).astype(np.int32)
        return {"input_ids": ids, "labels": labels}


def steps(trainer: Any, batches: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one step per batch."""
    metrics = [trainer.step(batch) for batch in batches]
    return [m.loss for m in metrics], [m.grad_norm for m in metrics]


def largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(v / r - 1) for v, r in zip(values, reference, strict=True))


def relative_distance(values: Any, reference: Any) -> float:
    import numpy as np

    return float(np.linalg.norm(values - reference) / np.linalg.norm(reference))


if __name__ == "__main__":
    main()
