"""What benchmarks of a step time: passes on resident and streamed weights, copies, full steps."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import time
from typing import Any

from bench_record import rss_gib


def model_config(model: str, layers: int | None) -> Any:
    """Of a named shape or a Hugging Face folder; only its first layers if a number is given."""
    from slidedp_jax.models.config import named_config
    from slidedp_jax.models.hf_config import read_config

    folder = pathlib.Path(model)
    config = read_config(folder) if folder.is_dir() else named_config(model)
    if layers is None:
        return config
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        layer_windows=config.layer_windows[:layers],
        sparse_layers=config.sparse_layers[:layers],
    )


def write_weights(source: str, config: Any, model: Any, write: Any) -> None:
    """The weights of a folder, or random ones for a named shape."""
    from slidedp_jax.models.hf_load import load_parameters

    folder = pathlib.Path(source)
    if folder.is_dir():
        load_parameters(folder, config.parameter_shapes(), write)
    else:
        fill(model, write)


def timed_tracer() -> Any:
    from slidedp_jax.tracer import StepTracer

    return StepTracer(keep=True)


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


class ComputePasses:
    """Forward and backward without updates, on resident or on streamed weights."""

    def __init__(self, trainer: Any, batch: Any):
        self._trainer = trainer
        self._prepared = trainer.passes.prepare(batch, training=True)
        self._wires: dict[Any, Any] = {}

    def resident(self, repeats: int) -> list[float]:
        """Seconds per pass with every chunk's weights on the devices; gradients are dropped.

        The first pass is a warm-up.
        """
        import jax

        from slidedp_jax.transfer.weight_window import ResidentWeights

        trainer = self._trainer
        trainer.weights.require(trainer.step_count)
        trees = {}
        for chunk in range(len(trainer.store.layouts)):
            trees[chunk] = jax.block_until_ready(trainer.weights.take(chunk))
            trainer.weights.release(chunk)
        slices = {}
        if (count := trainer.strategy.vocab_slices) > 1:
            if not trainer.model.tied:
                trees[-1] = trainer.weights.take_others()
            slices = {n: jax.block_until_ready(trainer.weights.take_slice(n)) for n in range(count)}
            trainer.weights.release_slices()
        weights = ResidentWeights(trees, slices)
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            outputs = trainer.passes.forward_backward(weights, self._prepared, lambda *_: None)
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
                self._wires.setdefault(trainer.store.layouts[chunk].signature, wire)
                arriving.append(trainer.passes.send(chunk, wire))

            trainer.weights.require(trainer.step_count)
            start, busy = time.perf_counter(), time.thread_time()
            trainer.passes.forward_backward(trainer.weights, self._prepared, send)
            dispatch.append(time.thread_time() - busy)
            while arriving:  # none may be held when the next pass makes its own
                arriving.pop(0).wait()
            seconds.append(time.perf_counter() - start)
        return seconds, dispatch[1:]

    def copies(self) -> dict[str, float]:
        """Seconds of a step's uploads and downloads, one chunk after the other and nothing beside.

        Chunks that look alike are timed once; after `streamed`, whose gradients are sent again.
        Unpacking counts with the uploads.
        """
        trainer, layouts = self._trainer, self._trainer.store.layouts
        trainer.weights.require(trainer.step_count)
        up: dict[Any, float] = {}
        down: dict[Any, float] = {}
        for chunk, layout in enumerate(layouts):
            if layout.signature not in up:
                up[layout.signature] = min(self._upload_s(chunk) for _ in range(3))
                wires = self._wires[layout.signature]
                down[layout.signature] = min(self._download_s(chunk, wires) for _ in range(3))
        strategy = trainer.strategy
        first_kept = len(layouts) - 1 - max(1, strategy.kept_chunks)
        again = layouts[1 : max(1, first_kept)]
        return {
            "h2d": sum(up[layout.signature] for layout in (*layouts, *again)),
            "d2h": sum(down[layout.signature] for layout in layouts),
        }

    def _upload_s(self, chunk: int) -> float:
        import jax

        start = time.perf_counter()
        jax.block_until_ready(self._trainer.weights.take(chunk))
        self._trainer.weights.release(chunk)
        return time.perf_counter() - start

    def _download_s(self, chunk: int, wires: Any) -> float:
        start = time.perf_counter()
        self._trainer.passes.send(chunk, wires).wait()
        return time.perf_counter() - start


def full_steps(num_steps: int, trainer: Any, tracer: Any, batch: Any) -> dict[str, Any]:
    """Full steps back to back; the time between the ends of two steps is one step."""
    ends, losses, norms, rss = [time.perf_counter()], [], [], []
    own, all_ = [time.process_time()], [machine_busy_s()]
    tracer.spans.clear()
    for _ in range(num_steps + 1):
        metrics = trainer.step(batch)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm if trainer.strategy.update_policy == "deferred" else None)
        ends.append(time.perf_counter())
        own.append(time.process_time())
        all_.append(machine_busy_s())
        rss.append(rss_gib())
    trainer.wait()
    ends.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(ends[:-1])]
    return {
        "full_s": seconds[1:],
        "own_cpu_s": (own[-1] - own[1]) / num_steps,
        "others_cpu_s": max(0.0, all_[-1] - all_[1] - own[-1] + own[1]) / num_steps,
        "drain_s": ends[-1] - ends[-2],
        "losses": losses,
        "grad_norms": norms,
        "rss_by_step_gib": rss,
        "host_update_busy_s": busy_s(tracer, "host_update") / (num_steps + 1),
        "h2d_dispatch_s": busy_s(tracer, "h2d") / (num_steps + 1),
        "waits_s": waits(tracer, ends[2], num_steps - 1),
        "last_step_spans": last_spans(tracer, ends[-3]),
    }


def busy_s(tracer: Any, lane: str) -> float:
    """Seconds that the spans of a lane cover in sum."""
    return float(sum(s.end_s - s.start_s for s in tracer.spans if s.lane == lane))


def machine_busy_s() -> float:
    """Seconds that all processes together have had of the machine's processors."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def waits(tracer: Any, since: float, steps: int) -> dict[str, float]:
    """Mean seconds per step waited for the norm, updates of embedding and layers, gradients."""
    seconds = {"norm": 0.0, "embed": 0.0, "layers and head": 0.0, "gradients to leave": 0.0}
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
