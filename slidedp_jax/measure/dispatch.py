"""Python's part of a step: what it takes to issue programs and copies, whatever their size.

Whole trainings of a model of almost no size, of two depths: what a layer more costs the thread that
issues is what Python needs for a chunk's forward and backward. What a step takes beyond its layers
is its end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from slidedp_jax.measure.links import locked_slabs, mesh_of, platform_of
from slidedp_jax.measure.stopwatch import Measurement, Stopwatch
from slidedp_jax.models import decoder
from slidedp_jax.models.config import named_config
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.process import current_setup
from slidedp_jax.trainer import Trainer
from slidedp_jax.transfer.copies import upload
from slidedp_jax.transfer.device_groups import DATA_AXIS

DEPTHS = (4, 20)
TOKENS = 64
STEPS = 12
PIECE_BYTES = {"gpu": 1 << 20, "cpu": 1 << 13}
"""On CPUs the call itself copies, which is counted with the link: so few bytes take no time."""


def measure_uploads(watch: Stopwatch, devices: Sequence[jax.Device]) -> None:
    """Python's time for one piece, to one device and to all."""
    with locked_slabs(devices, PIECE_BYTES[platform_of(devices)]) as slabs:
        for group in {1: devices[:1], len(devices): devices}.values():
            sharding = NamedSharding(mesh_of(group), PartitionSpec(DATA_AXIS))
            shape = (len(group) * slabs[0].size,)
            seconds = []
            for number in range(23):
                begin = time.perf_counter()
                copies = [upload(slabs[: len(group)], sharding, shape) for _ in range(8)]
                took = time.perf_counter() - begin
                jax.block_until_ready(copies)
                if number > 2:
                    seconds.append(took / 8)
            about = {"devices": len(group)}
            watch.keep(Measurement(name="upload call", seconds=tuple(seconds), about=about))


def measure_steps(watch: Stopwatch, devices: Sequence[jax.Device]) -> None:
    """Steps of two depths, one row of a few tokens per device."""
    for depth in DEPTHS:
        about = {"layers": depth, "devices": len(devices)}
        seconds, issuing = _step_seconds(depth, len(devices))
        watch.keep(Measurement(name="tiny step", seconds=tuple(seconds), about=about))
        watch.keep(Measurement(name="tiny step, issuing", seconds=tuple(issuing), about=about))


def _step_seconds(depth: int, num_devices: int) -> tuple[list[float], list[float]]:
    """Of steps, and of the thread that issues them: its own work, without what it waits for."""
    tiny = named_config("tiny")
    config = dataclasses.replace(tiny, num_hidden_layers=depth, layer_windows=(), sparse_layers=())
    strategy = Strategy(
        layers_per_chunk=1,
        rows_per_microbatch=1,
        num_microbatches=1,
        weight_route="shard_all_gather" if num_devices > 1 else "replicate",
        num_host_devices=current_setup().num_host_devices,
        block_size=256,
    )
    trainer = Trainer(decoder.build(config), optax.adamw(1e-5), strategy=strategy)
    try:
        ids = np.ones((num_devices, TOKENS), np.int32)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        seconds, issuing = [], []
        for number in range(STEPS):
            begin, busy = time.perf_counter(), time.thread_time()
            metrics = trainer.step(batch)
            took = time.thread_time() - busy
            float(metrics.loss)
            if number > 2:
                seconds.append(time.perf_counter() - begin)
                issuing.append(took)
        trainer.wait()
        return seconds, issuing
    finally:
        trainer.close()
