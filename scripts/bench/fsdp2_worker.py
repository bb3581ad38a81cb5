"""One process of an FSDP2 measurement; `bench_peers.py` starts one per GPU.

Takes a JSON job, rank, number of processes, where they meet, and where rank 0 puts its results.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import psutil
import torch
import torch.distributed as dist
from bench_children import Report, end_out_of_memory
from bench_record import rss_gib
from fsdp2_model import LossModel, build, choose_attention
from linear_cross_entropy import IGNORED
from torch.distributed.device_mesh import init_device_mesh

from slidedp_jax.models.config import named_config


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    meeting, report = sys.argv[4], Report(sys.argv[5])
    used_before_gib = psutil.virtual_memory().used / 2**30
    start = time.perf_counter()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
    try:
        for result in measurements(job, device, start):
            result["host_used_more_gib"] = psutil.virtual_memory().used / 2**30 - used_before_gib
            if rank == 0:
                report(result)
    except torch.OutOfMemoryError as error:
        end_out_of_memory(error)  # other ranks wait in collectives; the parent ends them
    dist.destroy_process_group()


def measurements(job: dict[str, Any], device: torch.device, start: float) -> Any:
    """One result per token count of the job."""
    config = named_config(job["model"])
    size, seq = dist.get_world_size(), job["seq"]
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        facts["attention"] = choose_attention(config, min(job["rows"]), seq, job["attention"])
    model = build(
        config,
        init_device_mesh(device.type, (size,)),
        offload=job["offload"],
        recompute=job["recompute"],
        compiled=job["compiled"],
        loss_chunk_tokens=job["loss_chunk_tokens"],
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    facts["state_ready_s"] = time.perf_counter() - start
    for tokens, rows in zip(job["tokens"], job["rows"], strict=True):
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (tokens // seq // size, seq)
        ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:]
        step = Step(model, optimizer, ids, labels, rows=rows, sync_each=not job["offload"])
        yield {"tokens": tokens, "rows_per_microbatch": rows, **facts, **measure(step, job)}


class Step:
    """A training step over a fixed batch: forward and backward, exact clip at 1.0, AdamW.

    Args:
      model: from `fsdp2_model.build`.
      optimizer: over its parameters.
      ids: this process's rows.
      labels: the token that follows each.
      rows: rows per microbatch.
      sync_each: reduce gradients after every microbatch; otherwise they add up, unsharded, on the
        device until the last one, which spares an offloaded model the copies.
    """

    def __init__(
        self,
        model: LossModel,
        optimizer: torch.optim.Optimizer,
        ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        rows: int,
        sync_each: bool,
    ):
        self._model = model
        self._optimizer = optimizer
        self._parameters = list(model.parameters())
        self._microbatches = list(zip(ids.split(rows), labels.split(rows), strict=True))
        # FSDP averages over processes, so a process's share of the mean loss is its sum over its
        # own tokens.
        self._scale = 1.0 / int((labels != IGNORED).sum())
        self._sync_each = sync_each
        self.loss = torch.zeros(())
        self.norm = torch.zeros(())

    def __call__(self, after_phase: Callable[[], None] = lambda: None) -> None:
        """Run the step; `after_phase` is called after backward, clip and update."""
        losses = []
        for number, (ids, labels) in enumerate(self._microbatches):
            last = number == len(self._microbatches) - 1
            self._model.set_requires_gradient_sync(self._sync_each or last)
            loss = self._model(ids, labels, self._scale)
            loss.backward()
            losses.append(loss.detach())
        self.loss = torch.stack(losses).sum()
        after_phase()
        self.norm = torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        after_phase()
        self._optimizer.step()
        self._optimizer.zero_grad()
        after_phase()


def measure(step: Step, job: dict[str, Any]) -> dict[str, Any]:
    """Warm-up, steps back to back, and one more with a wait after each phase."""
    start = time.perf_counter()
    losses, norms = [], []
    for _ in range(job["warmup"]):
        step()
        losses.append(step.loss.item())
        norms.append(_whole(step.norm))
    wait_for_device()
    warmup_s = time.perf_counter() - start
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = timed_steps(step, job["steps"])
    losses.append(step.loss.item())
    norms.append(_whole(step.norm))
    marks = [time.perf_counter()]

    def mark() -> None:
        wait_for_device()
        marks.append(time.perf_counter())

    step(mark)
    phases = [after - before for before, after in itertools.pairwise(marks)]
    memory = gather(
        {
            "rss_gib": rss_gib(),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if _cuda() else None,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if _cuda() else None,
            "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"] if _cuda() else 0,
        }
    )
    compiled = torch._dynamo.utils.counters
    return {
        "step_s": seconds,
        "phases_s": dict(zip(("forward_backward", "clip", "optimizer"), phases, strict=True)),
        "warmup_s": warmup_s,
        "losses": losses,
        "grad_norms": norms,
        "memory_by_process": memory,
        "compiled_graphs": compiled["stats"].get("unique_graphs", 0),
        "graph_breaks": dict(compiled["graph_break"]),
    }


def timed_steps(step: Step, count: int) -> list[float]:
    """Seconds of each of `count` steps that follow one another without a wait in between."""
    if not _cuda():
        ends = [time.perf_counter()]
        for _ in range(count):
            step()
            ends.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(ends)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def wait_for_device() -> None:
    if _cuda():
        torch.cuda.synchronize()


def gather(value: dict[str, Any]) -> list[dict[str, Any]]:
    """What every process has to say, on every process."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _cuda() -> bool:
    return bool(torch.cuda.is_available())


def _whole(norm: Any) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


if __name__ == "__main__":
    main()
