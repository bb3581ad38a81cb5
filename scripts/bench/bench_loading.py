"""Loading time and peak extra memory of a model folder, beside reading its bytes and doing nothing.

Writes a folder of the given shapes (kept with --folder, else removed), then measures in turn, with
the files out of the page cache (cold) and in it (warm):

- raw read: the files' bytes through `readinto` one 16 MiB buffer per thread;
- load: `models.hf_load.load_parameters` into arrays allocated and touched before.

Peak extra memory is the highest resident size during the load minus the resident size before it,
which already includes the destination.

    python scripts/bench/bench_loading.py --config qwen3-4b --num-threads 8 --json loading.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from slidedp_jax.models.config import ModelConfig, named_config
from slidedp_jax.models.hf_config import ARCHITECTURES
from slidedp_jax.models.hf_export import export
from slidedp_jax.models.hf_load import load_parameters

BUFFER_BYTES = 16 << 20
DESTINATIONS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def write_model_folder(folder: Path, config: ModelConfig) -> None:
    """A bfloat16 folder of the given shapes; matrices repeat one random block, vectors are 1."""
    source = folder.with_name(folder.name + "-config")
    source.mkdir(parents=True, exist_ok=True)
    raw = dataclasses.asdict(config)
    rope = raw.pop("rope_parameters")
    raw |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "bfloat16",
    }
    del raw["layer_windows"]
    (source / "config.json").write_text(json.dumps(raw))
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    shapes = config.parameter_shapes()
    block *= np.float32(config.initializer_range)

    def values(name: str) -> np.ndarray:
        shape = shapes[name]
        return np.ones(shape, np.float32) if len(shape) == 1 else np.resize(block, shape)

    export(folder, source, shapes, values)
    (source / "config.json").unlink()
    source.rmdir()


def drop_from_page_cache(files: list[Path]) -> None:
    """Asks the system to forget the files' cached pages."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_raw(files: list[Path], num_threads: int) -> None:
    """Reads every byte, each thread a stretch of one file at a time."""

    def read_stretch(file: Path, start: int, stop: int) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            while start < stop:
                start += stream.readinto(buffer[: min(BUFFER_BYTES, stop - start)])

    with ThreadPoolExecutor(num_threads) as pool:
        reads = []
        for file in files:
            size = file.stat().st_size
            step = -(-size // num_threads)
            reads += [
                pool.submit(read_stretch, file, start, min(start + step, size))
                for start in range(0, size, step)
            ]
        for read in reads:
            read.result()


def resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(field + ":")[1].split()[0])


def timed(run: Callable[[], None]) -> tuple[float, int]:
    """Seconds, and the highest resident size above the one at the start, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    run()
    return time.perf_counter() - start, resident_bytes("VmHWM") - before


def measure(folder: Path, config: ModelConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per kind of run, cache state and repetition."""
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    shapes = config.parameter_shapes()
    dtype = DESTINATIONS[options.destination]
    destination = {name: np.ones(shape, dtype) for name, shape in shapes.items()}

    def load() -> None:
        def write(name: str, value: np.ndarray) -> None:
            destination[name][...] = value

        load_parameters(folder, shapes, write, num_threads=options.num_threads)

    records = []
    runs = {"raw read": lambda: read_raw(files, options.num_threads), "load": load}
    for cache in ("cold", "warm"):
        for kind, run in runs.items():
            for repetition in range(options.repetitions):
                if cache == "cold":
                    drop_from_page_cache(files)
                elif repetition == 0:
                    read_raw(files, options.num_threads)
                seconds, extra = timed(run)
                records.append(
                    {
                        "kind": kind,
                        "cache": cache,
                        "seconds": seconds,
                        "bytes_per_second": num_bytes / seconds,
                        "peak_extra_bytes": extra,
                    }
                )
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    """Medians over the repetitions."""
    print(f"{'run':10} {'cache':6} {'seconds':>8} {'GB/s':>6} {'peak extra MB':>14}")
    for kind, cache in dict.fromkeys((r["kind"], r["cache"]) for r in records):
        same = [r for r in records if (r["kind"], r["cache"]) == (kind, cache)]
        seconds, rate, extra = (
            float(np.median([r[key] for r in same]))
            for key in ("seconds", "bytes_per_second", "peak_extra_bytes")
        )
        print(f"{kind:10} {cache:6} {seconds:8.2f} {rate / 1e9:6.2f} {extra / 1e6:14.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen3-4b", help="a preset of models.config")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the preset")
    parser.add_argument("--destination", choices=DESTINATIONS, default="float32")
    parser.add_argument("--num-threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to keep the model folder; reused")
    parser.add_argument("--json", type=Path, help="where to write all samples")
    options = parser.parse_args()
    config = named_config(options.config)
    if options.num_layers is not None:
        changes = {"num_hidden_layers": options.num_layers, "layer_windows": ()}
        config = dataclasses.replace(config, **changes)

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "model"
        if not folder.exists():
            seconds, extra = timed(lambda: write_model_folder(folder, config))
            print(f"export: {seconds:.2f} s, peak extra {extra / 1e6:.0f} MB")
        records = measure(folder, config, options)
    largest = 2 * max(int(np.prod(shape)) for shape in config.parameter_shapes().values())
    print(
        f"{options.config}, {config.num_hidden_layers} layers, {config.num_parameters:,} "
        f"parameters in bfloat16 -> {options.destination}, {options.num_threads} threads, "
        f"largest tensor {largest / 1e6:.0f} MB"
    )
    print_table(records)
    if options.json:
        report = {
            "config": dataclasses.asdict(config),
            "num_threads": options.num_threads,
            "destination": options.destination,
            "cpu_count": os.cpu_count(),
            "machine": platform.platform(),
            "largest_tensor_bytes": largest,
            "samples": records,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
