"""Timing of jitted programs on one device: bursts, clocks beside them, lists of kernels."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import bench_record
import hlo_kernels


class Clocks:
    """The GPU's clock and power beside the measurements, from nvidia-smi where there is one."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        fields = "clocks.sm,power.draw.instant,temperature.gpu"
        query = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [*query, "-lms", "50"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        lines = self._process.stdout
        assert lines is not None
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                values = [float(value) for value in line.split(",")]
            except ValueError:
                continue
            self._samples.append((time.perf_counter(), values))

    def between(self, start: float, end: float) -> dict[str, float]:
        """Medians of what was seen in an interval."""
        inside = [values for at, values in self._samples if start + 0.05 <= at <= end]
        if not inside:
            return {}
        columns = [statistics.median(list(column)) for column in zip(*inside, strict=True)]
        return dict(zip(("sm_mhz", "watt", "celsius"), columns, strict=True))

    def close(self) -> None:
        """End nvidia-smi."""
        if self._process is not None:
            self._process.terminate()


class Bench:
    """Measurements of one run and what they share: device, model, programs, random arrays."""

    def __init__(self, args: argparse.Namespace, start: float):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from slidedp_jax.models import decoder
        from slidedp_jax.models.config import named_config
        from slidedp_jax.process import current_setup
        from slidedp_jax.step.programs import ComputePrograms
        from slidedp_jax.transfer.device_map import DeviceMap
        from slidedp_jax.transfer.routes import GradientPath, weight_path
        from slidedp_jax.transfer.wire_programs import WirePrograms

        self.args, self._start = args, start
        self.device = current_setup().devices()[0][0]
        self.config = named_config(args.model)
        self.dtype = jnp.dtype(jnp.bfloat16)
        self.attention = "cudnn" if self.device.platform == "gpu" else "chunked"
        self.mesh = Mesh(np.array([self.device]), ("data",))
        self.sharding = NamedSharding(self.mesh, PartitionSpec())
        self.weights = weight_path("replicate", self.mesh)
        self.gradients = GradientPath("reduce_scatter", self.mesh, self.sharding, self.dtype)
        self.rows_spec, self.same_spec = PartitionSpec("data"), PartitionSpec()

        def programs(chunk_tokens: int) -> tuple[Any, Any]:
            model = decoder.build(self.config, attention=self.attention)
            on_devices = DeviceMap(self.mesh, self.dtype)
            wire = WirePrograms(on_devices, self.weights, self.gradients)
            return model, ComputePrograms(model, on_devices, wire, loss_chunk_tokens=chunk_tokens)

        self.programs_for = programs
        self.loss_chunk_tokens = min(4096, args.tokens)
        self.model, self.programs = programs(self.loss_chunk_tokens)
        self.layer_fns = (self.model.layer_fns[0],)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.hlo: list[str] = []
        self.clocks = Clocks()
        self._key = jax.random.key(0)

    def elapsed_s(self) -> float:
        """Seconds since the script began."""
        return time.perf_counter() - self._start

    def attempt(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Run a section or a part of one; what goes wrong is printed and recorded."""
        if self.elapsed_s() > self.args.budget_s:
            print(f"{name}: skipped, no time left", flush=True)
            self.rows.append({"name": name, "error": "skipped, no time left"})
            return
        try:
            function(self, *arguments)
        except Exception as error:
            traceback.print_exc(limit=3)
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            self.rows.append({"name": name, "error": f"{type(error).__name__}: {error}"[:500]})

    def normal(self, shape: tuple[int, ...], scale: float = 1.0, dtype: Any = None) -> Any:
        """Random numbers on the device."""
        import jax

        self._key, key = jax.random.split(self._key)
        draw = jax.jit(
            lambda key: (scale * jax.random.normal(key, shape, "float32")).astype(
                dtype or self.dtype
            ),
            out_shardings=self.sharding,
        )
        return draw(jax.device_put(key, self.sharding))

    def put(self, array: Any) -> Any:
        """The array on the device."""
        import jax

        return jax.device_put(array, self.sharding)

    def params(self, stage: Any) -> Any:
        """Random parameters of a stage: norms about 1, matrices about 0."""
        import jax

        def leaf(leaf: Any) -> Any:
            small = self.normal(leaf.shape, 0.02)
            return 1 + small if len(leaf.shape) == 1 else small

        return jax.tree.map(leaf, stage.shapes)

    def batch(self, tokens: int) -> dict[str, Any]:
        """Whole rows of random tokens."""
        import numpy as np

        rows = max(1, tokens // self.args.seq)
        ids = np.random.default_rng(1).integers(0, self.config.vocab_size, (rows, self.args.seq))
        return self.prepared({"input_ids": ids.astype(np.int32), "labels": ids.astype(np.int32)})

    def prepared(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A user's batch as the programs take it, on the device."""
        from slidedp_jax.step.batch import prepare

        rows = batch["input_ids"].shape[0]
        arrays = prepare(
            batch, vocab_size=self.config.vocab_size, num_devices=1, rows_per_microbatch=rows
        )
        return {name: self.put(array) for name, array in arrays.microbatches[0].items()}

    def hidden(self, tokens: int, scale: float = 1.0) -> Any:
        """A random residual stream."""
        rows = max(1, tokens // self.args.seq)
        return self.normal((rows, self.args.seq, self.config.hidden_size), scale)

    def map(self, function: Any, inputs: Any, outputs: Any, donate: tuple[int, ...] = ()) -> Any:
        """As `ComputePrograms` compiles its functions."""
        import jax

        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate)

    def time(
        self,
        name: str,
        program: Any,
        arguments: tuple[Any, ...],
        *,
        flops: float = 0.0,
        chain: tuple[int, int] | None = None,
        options: dict[str, Any] | None = None,
        dump: bool = False,
    ) -> float:
        """Compile, run back to back for a burst, and record milliseconds per call.

        Args:
          name: of the row in the table.
          program: a jitted function.
          arguments: its arguments.
          flops: of one call.
          chain: (number of a donated argument, number of the output leaf that takes its place).
          options: compiler options.
          dump: keep the list of kernels.
        """
        import jax

        begin = time.perf_counter()
        compiled = program.lower(*arguments).compile(compiler_options=options)
        compile_s = time.perf_counter() - begin
        if dump:
            self._keep_hlo(name, compiled)
        given = list(arguments)

        def call(count: int) -> float:
            if chain:
                given[chain[0]] = jax.tree.map(lambda leaf: leaf + 0, arguments[chain[0]])
            jax.block_until_ready(given)
            start = time.perf_counter()
            for _ in range(count):
                outputs = compiled(*given)
                if chain:
                    structure = jax.tree.structure(given[chain[0]])
                    leaf = jax.tree.leaves(outputs)[chain[1]]
                    given[chain[0]] = jax.tree.unflatten(structure, [leaf])
            jax.block_until_ready(outputs)
            return (time.perf_counter() - start) / count

        call(1)
        count = max(2, min(60, math.ceil(self.args.burst_s / 4 / max(call(1), 1e-5))))
        begin = time.perf_counter()
        samples = [call(count) * 1e3 for _ in range(4)]
        ms = statistics.median(samples)
        row: dict[str, Any] = {"name": name, "ms": ms, "samples_ms": samples}
        row |= self.clocks.between(begin, time.perf_counter())
        row |= {"tflops": flops / ms / 1e9, "compile_s": compile_s, "at_s": self.elapsed_s()}
        self.rows.append(row)
        print(format_row(row), flush=True)
        return ms

    def _keep_hlo(self, name: str, compiled: Any) -> None:
        text = compiled.as_text()
        self.hlo.append(hlo_kernels.report(name, text))
        stats = compiled.memory_analysis()
        if stats is not None:
            self.hlo.append(f"temporaries {stats.temp_size_in_bytes / 2**20:.0f} MiB")
        if self.args.out and len(text) < 600_000:
            plain_name = re.sub(r"\W+", "_", name)
            path = self.args.out.with_name(f"{self.args.out.name}_{plain_name}.hlo.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def note(self, name: str, value: Any) -> None:
        """Record and print something that is no time."""
        self.facts[name] = value
        print(f"-- {name}: {value}", flush=True)

    def finish(self) -> None:
        """Print the table and write everything."""
        self.clocks.close()
        print(table(self.rows))
        print(json.dumps(self.facts, indent=1))
        self.save()

    def save(self) -> None:
        """Write what is known so far."""
        if not self.args.out:
            return
        out = self.args.out
        bench_record.save(out, bench_record.record(facts=self.facts, rows=self.rows))
        out.with_name(out.name + "_hlo.txt").write_text("\n\n".join(self.hlo))


def format_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['name']} | {row['error'][:80]} |  |  |  |  |"
    samples = row.get("samples_ms", [row["ms"]])
    return (
        f"| {row['name']} | {row['ms']:.3f} | {min(samples):.3f} to {max(samples):.3f} | "
        f"{row.get('tflops', 0):.0f} | {row.get('sm_mhz', 0):.0f} | {row.get('watt', 0):.0f} |"
    )


def table(rows: list[dict[str, Any]]) -> str:
    header = "| what | ms | range | TFLOP/s | SM MHz | W |"
    return "\n".join([header, "|" + "---|" * 6, *map(format_row, rows)])
