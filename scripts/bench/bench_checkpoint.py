"""Time a checkpoint of a model's whole training state: write, read back, and the disk alone.

    python scripts/bench/bench_checkpoint.py --model qwen3-4b --folder DIR --out NAME

Weights are random, the strategy is the planner's (or everything on the host, `--resident-state
off`), and one optimizer step has been taken, so moments are not zero. *save* is that of
`slidedp_jax.checkpoint`, checksums and the last file included; *restore* is that of a new trainer,
as a run that goes on does it, checksums included. *raw write* and *raw read* move random bytes in
as many streams and blocks of the same size, which says what the folder's disk can do. `DIR` needs
room for the checkpoint (12 bytes per parameter), and for `--disk-share` of it once more.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record
import step_timing
from bench_record import rss_gib

import slidedp_jax

RAW_FILE_BYTES = 1 << 28


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape, or a model folder")
    parser.add_argument("--layers", type=int, help="only the first N layers, of a shape")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of the step's only row")
    parser.add_argument("--resident-state", choices=["on", "off"], default="on")
    parser.add_argument("--disk-share", type=float, default=0.1, help="of the bytes, for *disk*")
    parser.add_argument("--host-memory-budget", type=float, help="GiB")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


class MemoryWatch:
    """The largest resident size of this process while it runs."""

    def __init__(self) -> None:
        self.peak_gib = rss_gib()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch for as long as the context lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.peak_gib = max(self.peak_gib, rss_gib())


def timed(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds of wall clock and of all threads' CPU, and memory beside what was there."""
    watch, before_gib = MemoryWatch(), rss_gib()
    start, busy = time.perf_counter(), time.process_time()
    with watch.running():
        run()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - busy,
        "extra_gib": watch.peak_gib - before_gib,
        "above_end_gib": watch.peak_gib - rss_gib(),
    }


class RawFiles:
    """Files of random bytes, written and read by as many threads as a checkpoint's."""

    def __init__(self, folder: pathlib.Path, num_bytes: int):
        from slidedp_jax.checkpoint.array_streams import THREADS
        from slidedp_jax.checkpoint.direct_io import Block

        folder.mkdir(parents=True)
        self._paths = [folder / str(n) for n in range(max(1, num_bytes // RAW_FILE_BYTES))]
        self.num_bytes = RAW_FILE_BYTES * len(self._paths)
        self._threads, self._local, self._block = THREADS, threading.local(), Block

    def write(self) -> None:
        """All files, each flushed to the disk."""
        self._with_all(self._write)

    def read(self) -> None:
        """All files."""
        self._with_all(self._read)

    def _with_all(self, work: Callable[[pathlib.Path], None]) -> None:
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, self._paths))

    def _own_block(self) -> Any:
        if not hasattr(self._local, "block"):
            self._local.block = self._block()
            self._local.block.array[:] = bytearray(os.urandom(len(self._local.block.array)))
        return self._local.block

    def _write(self, path: pathlib.Path) -> None:
        from slidedp_jax.checkpoint.direct_io import DirectFile

        block = self._own_block()
        with DirectFile(path, write=True) as file:
            for start in range(0, RAW_FILE_BYTES, len(block.array)):
                file.write(block, len(block.array), start)
            file.end(RAW_FILE_BYTES)

    def _read(self, path: pathlib.Path) -> None:
        from slidedp_jax.checkpoint.direct_io import DirectFile

        block = self._own_block()
        with DirectFile(path, write=False) as file:
            for start in range(0, RAW_FILE_BYTES, len(block.array)):
                file.read(block, len(block.array), start)


def make_trainer(args: argparse.Namespace, *, restores: bool = False) -> Any:
    """A trainer with random weights after one step, or one that waits for a checkpoint."""
    import numpy as np
    import optax

    from slidedp_jax.models import decoder
    from slidedp_jax.this_machine import plan_for

    config = step_timing.model_config(args.model, args.layers)
    resident = None if args.resident_state == "on" else False
    plan = plan_for(
        config,
        rows_per_step=1,
        tokens_per_row=args.seq,
        resident_state=resident,
        host_memory_budget_gib=args.host_memory_budget,
    )
    model = decoder.build(config)
    trainer = slidedp_jax.Trainer(
        model,
        optax.adamw(1e-5),
        strategy=plan.strategy,
        parameters=slidedp_jax.TO_BE_RESTORED
        if restores
        else lambda write: step_timing.write_weights(args.model, config, model, write),
        max_grad_norm=1.0,
    )
    if restores:
        return trainer
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, args.seq)).astype(np.int32)
    trainer.step({"input_ids": ids, "labels": ids})
    trainer.wait()
    return trainer


def main() -> None:
    args = parse()
    slidedp_jax.configure()

    made: list[Any] = []
    cold_start = timed(lambda: made.append(make_trainer(args)))
    trainer = made.pop()
    record = bench_record.record(
        ("jax", "orbax-checkpoint"),
        num_parameters=trainer.store.num_parameters,
        resident_chunks=trainer.strategy.resident_chunks,
        rss_before_gib=rss_gib(),
        cold_start=cold_start,
    )
    target = args.folder / "step_00000001"
    record["save"] = timed(lambda: trainer.save(args.folder))
    record["checkpoint_bytes"] = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    bench_record.save(args.out, record)
    trainer.close()
    trainer = make_trainer(args, restores=True)
    record["restore"] = timed(lambda: trainer.restore(target))
    trainer.close()
    if args.disk_share:
        raw = RawFiles(args.folder / "raw", int(args.disk_share * record["checkpoint_bytes"]))
        record["disk_bytes"] = raw.num_bytes
        record["raw_write"], record["raw_read"] = timed(raw.write), timed(raw.read)
        shutil.rmtree(args.folder / "raw")
    shutil.rmtree(target)
    bench_record.save(args.out, record)
    print(
        f"peak above what stays: cold start with its first step {cold_start['above_end_gib']:.2f} "
        f"GiB, restore {record['restore']['above_end_gib']:.2f} GiB"
    )
    print("| what | s | GB/s | CPU s per GB | memory beside GiB |\n|---|---|---|---|---|")
    for what in ("save", "restore", "raw_write", "raw_read"):
        if what in record:
            times = record[what]
            num_bytes = record["disk_bytes" if "raw" in what else "checkpoint_bytes"]
            print(
                f"| {what.replace('_', ' ')} | {times['seconds']:.1f} | "
                f"{num_bytes / times['seconds'] / 1e9:.2f} | "
                f"{times['cpu_seconds'] / num_bytes * 1e9:.2f} | {times['extra_gib']:.2f} |"
            )


if __name__ == "__main__":
    main()
