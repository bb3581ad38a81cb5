"""One process of `bench_multi_gpu.py`: does an error on one device end training, without a hang?

Takes a JSON job and the file for its results. Only the last device is given a row whose gradient is
NaN, then no memory to work in; both must surface as errors on the caller's side in bounded time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import step_timing
from bench_children import Report
from multi_gpu_speed import random_batch

import slidedp_jax

PIECE = 64 << 20
"""Bytes of which the last device is filled; twice that stays free."""

LIMIT_S = 90.0
"""A fault that has not surfaced by then counts as a hang."""


def main() -> None:
    job = json.loads(sys.argv[1])
    report = Report(sys.argv[2])
    count = max(job["num_devices"])
    setup = slidedp_jax.configure(num_devices=count, pinned_limit_gib=job["pinned_limit_gib"])
    faults = Faults(job, setup)
    report(faults.run("NaN on the last device", faults.nan_on_the_last_device))
    if setup.platform != "cpu":
        name = "no memory on the last device"
        hang = threading.Timer(LIMIT_S, give_up, (report, faults.result(name, None, LIMIT_S)))
        hang.start()
        report(faults.run(name, faults.no_memory_on_the_last_device))
    os._exit(0)  # what a full device has left undone must not hold up the end


def give_up(report: Report, result: dict[str, Any]) -> None:
    """Report a hang and end the process, whatever its threads wait for."""
    report(result)
    os._exit(0)


class Faults:
    """A few layers with an embedding of their own, so that one token spoils only its own row.

    Args:
      job: `model`, `layers`, `seq`.
      setup: the process's devices.
    """

    def __init__(self, job: dict[str, Any], setup: Any):
        from slidedp_jax.models import decoder
        from slidedp_jax.planner.strategy import Strategy

        self._seq = job["seq"]
        self._devices = setup.devices()[0]
        self._num_devices = len(self._devices)
        self._config = dataclasses.replace(
            step_timing.model_config(job["model"], job["layers"]), tie_word_embeddings=False
        )
        self._model = decoder.build(self._config)
        self._strategy = Strategy(
            layers_per_chunk=1,
            rows_per_microbatch=1,
            num_microbatches=1,
            loss_chunk_tokens=512,
            num_host_devices=setup.num_host_devices,
        )

    def run(self, name: str, fault: Callable[[Any, dict[str, Any]], None]) -> dict[str, Any]:
        """One undisturbed step, then the fault; passed if that raises and says why."""
        trainer = self._trainer()
        batch = random_batch(self._config, self._num_devices, self._seq)
        poison = self._config.vocab_size - 1
        batch["input_ids"][batch["input_ids"] == poison] = 0
        loss = trainer.step(batch).loss
        assert loss > 0
        start = time.perf_counter()
        try:
            fault(trainer, batch)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return self.result(name, message, time.perf_counter() - start)
        return self.result(name, None, time.perf_counter() - start)

    def result(self, name: str, message: str | None, seconds: float) -> dict[str, Any]:
        """One line of the table of checks."""
        return {
            "check": name,
            "dtype": "bfloat16",
            "num_devices": self._num_devices,
            "message": message and message[:600],
            "seconds": seconds,
            "passed": message is not None,
        }

    def nan_on_the_last_device(self, trainer: Any, batch: dict[str, Any]) -> None:
        """A token whose embedding is NaN, in the last device's row alone."""
        import numpy as np

        poison = self._config.vocab_size - 1
        name = trainer.store.parameter_names[0]
        trainer.wait()
        values = trainer.store.read(name)
        values[poison] = np.nan
        trainer.store.write(name, values)
        batch["input_ids"][-1, 0] = poison
        metrics = trainer.step(batch)
        print(metrics.grad_norm)

    def no_memory_on_the_last_device(self, trainer: Any, batch: dict[str, Any]) -> None:
        """Fill the last device, so that nothing of a step fits there."""
        import jax

        trainer.wait()
        device, hoard = self._devices[-1], []
        while (stats := device.memory_stats())["bytes_limit"] - stats["bytes_in_use"] > 2 * PIECE:
            hoard.append(jax.block_until_ready(jax.numpy.zeros(PIECE, "int8", device=device)))
        for _ in range(3):
            trainer.step(batch)
        trainer.wait()

    def _trainer(self) -> Any:
        import optax

        return slidedp_jax.Trainer(
            self._model,
            optax.adamw(1e-5),
            strategy=self._strategy,
            parameters=lambda write: step_timing.fill(self._model, write),
            kernel_form="blocked",
        )


if __name__ == "__main__":
    main()
