"""Time the host update: every form of the kernel against what the machine's memory allows.

    python scripts/bench/bench_host_update.py --out docs/benchmarks/NAME

Runs the kernels that training uses (`UpdateKernels` with AdamW and a weight-decay mask, so two
groups, and a clip that is hit), each set of XLA flags and each number of host devices in a process
of its own. The yardstick is an in-place triad (a = a * s + b) over the same host devices. Every
rate is taken alone and beside copies made by another process: to and from the GPU where there is
one, else from memory to memory. Prints a table and writes OUT.json with the raw samples.

With --weight_rounding it compares the two roundings instead: both updates in one process, in turns,
on the host and, where there is a GPU, on that.

Bytes are counted as the update must move them, per parameter: high 2, low 2, mu 4 and nu 4, read
and written, and a bf16 gradient of 2, read: 26. A variant that moves more shows as a lower rate.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record
import rounding_rates
from running_copies import Exchange, copier, timed
from update_variant import UpdateVariant, pointers

from slidedp_jax import jax_internals
from slidedp_jax.update.kernel_form import KernelForm

TORCH_BYTES = 2 * (4 + 4 + 4) + 4
TRIAD_BYTES = 4 + 4 + 4

DEFAULT_BLOCK = 4096


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs per rate")
    parser.add_argument(
        "--elements-per-device", type=int, default=1 << 23, help="parameters on each host device"
    )
    parser.add_argument("--budget-s", type=float, default=210, help="starts no process after this")
    parser.add_argument("--num-host-devices", type=int, nargs="+", help="default: from the cores")
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=[DEFAULT_BLOCK, 16384],
        help="elements per block, all with the first number of host devices, the first with others",
    )  # fmt: skip
    parser.add_argument("--forms", nargs="+", help="kernel forms; default: all")
    parser.add_argument(
        "--weight_rounding", "--weight-rounding", action="store_true",
        help="compare dither with nearest, in the form that training uses",
    )  # fmt: skip
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--exchange", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.child:
        print(json.dumps(measure(json.loads(args.child), args)))
        return
    start = time.perf_counter()
    record = bench_record.record(transparent_hugepages=huge_pages(), results=[], not_run=[])
    with tempfile.TemporaryDirectory() as folder, copier(pathlib.Path(folder)) as copies:
        record["copies"] = copies
        for job in jobs(args):
            left = args.budget_s - (time.perf_counter() - start)
            if left < 0:
                record["not_run"].append({**job, "reason": "out of time"})
                continue
            results, error = run_child(job, args, pathlib.Path(folder), max(20.0, left))
            record["results"].extend(results)
            if error:
                record["not_run"].append({**job, "reason": error})
            print(f"{time.perf_counter() - start:5.0f} s  {label(job)}: {error or 'done'}")
            sys.stdout.flush()
            bench_record.save(args.out, record)
    print(rounding_rates.table(record) if args.weight_rounding else table(record))


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process measures, the most telling first."""
    cores = len(os.sched_getaffinity(0))
    counts = args.num_host_devices or [max(1, cores - 1), cores, max(1, cores * 3 // 4)]
    counts = list(dict.fromkeys(counts))
    if args.weight_rounding:
        return rounding_rates.jobs(counts[:1] if not args.num_host_devices else counts)
    plan: list[dict[str, Any]] = []
    for position, count in enumerate(counts):
        for fusion in (True, False):
            sizes = args.block_sizes if position == 0 else args.block_sizes[:1]
            plan.append(
                {"what": "update", "host_devices": count, "fusion": fusion, "blocks": sizes}
            )
    if importlib.util.find_spec("torch"):
        plan.insert(2, {"what": "torch", "threads": cores})
    return plan


def label(job: dict[str, Any]) -> str:
    if job["what"] == "roundings":
        return rounding_rates.label(job)
    if job["what"] == "torch":
        return f"torch fused AdamW, {job['threads']} threads"
    return f"{job['host_devices']} host devices, fusion {'on' if job['fusion'] else 'off'}"


def run_child(
    job: dict[str, Any], args: argparse.Namespace, folder: pathlib.Path, timeout_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Results of one process and, when it failed, the end of what it said."""
    cores = len(os.sched_getaffinity(0))
    # configure() asks for more threads than cores on CPU-only machines; here rates are compared.
    environment = {**os.environ, jax_internals.NUM_CPU_THREADS: str(cores)}
    if job.get("where") != "device":
        environment["JAX_PLATFORMS"] = "cpu"
    fusion = jax_internals.BACKEND_OPTIONS + jax_internals.MULTI_OUTPUT_FUSION
    flags = [flag for flag in jax_internals.xla_flags() if "multi_output" not in flag]
    if job.get("fusion"):
        flags.append(fusion)
    environment["XLA_FLAGS"] = " ".join(flags)
    command = [sys.executable, __file__, "--child", json.dumps(job), "--exchange", str(folder)]
    command += ["--repeats", str(args.repeats)]
    command += ["--elements-per-device", str(args.elements_per_device)]
    if args.forms:
        command += ["--forms", *args.forms]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return [], f"still running after {timeout_s:.0f} s"
    finally:
        (folder / "mode").write_text("off")
    if done.returncode:
        return [], (done.stderr.strip() or f"exit status {done.returncode}")[-800:]
    return json.loads(done.stdout.strip().splitlines()[-1]), None


def measure(job: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    exchange = Exchange(args.exchange)
    if job["what"] == "torch":
        return measure_torch(job, args, exchange)
    if job["what"] == "roundings":
        return [rounding_rates.measure(job, args)]
    return measure_updates(job, args, exchange)


def measure_updates(
    job: dict[str, Any], args: argparse.Namespace, exchange: Exchange
) -> list[dict[str, Any]]:
    """The triad and all forms and block sizes with one number of host devices and set of flags."""
    import slidedp_jax

    slidedp_jax.configure(platform="cpu", num_devices=1, num_host_devices=job["host_devices"])
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from slidedp_jax.process import current_setup
    from slidedp_jax.state.host_store import HOST_AXIS

    devices = current_setup().devices()[1]
    mesh = Mesh(np.array(devices), (HOST_AXIS,), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(HOST_AXIS), memory_kind="pinned_host")
    results = [{**job, "form": "triad", **measure_triad(sharding, args, exchange)}]
    for block_size in job["blocks"]:
        for form in args.forms or kernel_forms():
            if form == "whole" and block_size != job["blocks"][0]:
                continue  # it has no blocks
            variant = UpdateVariant(form, block_size, sharding)
            result = {**job, "form": form, "block_size": block_size}
            try:
                result.update(variant.measure(args, exchange))
            except Exception as error:  # one failing form must not lose the others
                result["error"] = f"{type(error).__name__}: {error}"[:400]
            results.append(result)
    return results


def kernel_forms() -> tuple[KernelForm, ...]:
    return get_args(KernelForm)


def measure_triad(sharding: Any, args: argparse.Namespace, exchange: Exchange) -> dict[str, Any]:
    """In-place triad, a = a * s + b, of about as many bytes as the update moves."""
    import jax
    import jax.numpy as jnp

    size = 2 * args.elements_per_device * sharding.mesh.size
    ones = jax.jit(lambda: jnp.ones(size, jnp.float32), out_shardings=sharding)
    state = {"a": ones(), "b": ones()}

    def piece(a: Any, b: Any) -> Any:
        a, b = (jax.device_put(x, jax.memory.Space.Device) for x in (a, b))
        return a * jnp.float32(1.0001) + b

    triad = jax.jit(
        jax.shard_map(
            piece, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec,
            check_vma=False,
        ),
        donate_argnums=(0,),
        out_shardings=sharding,
    )  # fmt: skip

    def step() -> None:
        state["a"] = jax.block_until_ready(triad(state["a"], state["b"]))

    step()
    start = pointers([state["a"]])
    rates = exchange.rates(step, size, TRIAD_BYTES, args.repeats)
    return {**rates, "in_place": pointers([state["a"]]) == start}


def measure_torch(
    job: dict[str, Any], args: argparse.Namespace, exchange: Exchange
) -> list[dict[str, Any]]:
    """fp32 parameters, gradients and moments, no bf16 copy: 28 bytes per parameter."""
    import torch

    torch.set_num_threads(job["threads"])
    size = args.elements_per_device * max(1, job["threads"] * 3 // 4)
    parameter = torch.ones(size)
    parameter.grad = torch.full((size,), 1e-3)
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step() -> None:
        optimizer.step()

    timed(step, 2)
    rates = exchange.rates(step, size, TORCH_BYTES, args.repeats)
    return [{**job, "form": "torch fused AdamW", "torch": torch.__version__, **rates}]


def table(record: dict[str, Any]) -> str:
    """All rates; `of triad` compares bytes per second with the best triad of the run."""
    results = [result for result in record["results"] if "seconds" in result]
    triads = [bandwidth(result) for result in results if result["form"] == "triad"]
    limit = max(triads, default=float("nan"))
    lines = [
        "devices  fusion  form                 block   Gparam/s   GB/s  of triad  in place  "
        "beside copies: Gparam/s (copies GB/s)"
    ]
    for result in results:
        median = statistics.median(result["seconds"])
        besides = []
        for mode in ("up", "both"):
            if beside := result.get(f"beside_{mode}"):
                rate = result["elements"] / statistics.median(beside["seconds"]) / 1e9
                copied = "+".join(f"{moved:.0f}" for moved in beside["copied_gb_per_s"])
                besides.append(f"{mode} {rate:.2f} ({copied})")
        fusion = {True: "on", False: "off", None: "-"}[result.get("fusion")]
        lines.append(
            f"{result.get('host_devices', result.get('threads')):7d}  {fusion:6s}  "
            f"{result['form']:19s}  {result.get('block_size', 0) or '-':>6}  "
            f"{result['elements'] / median / 1e9:8.3f}  {bandwidth(result):6.1f}  "
            f"{bandwidth(result) / limit:8.2f}  {result.get('in_place', '-')!s:8s}  "
            f"{', '.join(besides) or result.get('note', '')}"
        )
    lines.extend(
        f"failed: {result['form']}, block {result.get('block_size')}, {label(result)}: "
        f"{result['error']}"
        for result in record["results"]
        if "error" in result
    )
    lines.extend(f"not run: {label(job)}: {job['reason']}" for job in record["not_run"])
    return "\n".join([*lines, *of_the_table(results)])


def of_the_table(results: list[dict[str, Any]]) -> list[str]:
    """How the form that `update.kernel_form` names compares with the fastest one here."""
    from slidedp_jax.update.kernel_form import kernel_form

    jax_version = importlib.metadata.version("jax")
    named = kernel_form(jax_version)
    wanted = tuple(int(part) for part in jax_version.split(".")[:2]) < (0, 12)  # as `configure`
    rates = {
        result["form"]: result["elements"] / statistics.median(result["seconds"])
        for result in results
        if result.get("fusion") == wanted and result.get("block_size") in (None, DEFAULT_BLOCK)
        and result["form"] in kernel_forms()
    }  # fmt: skip
    if named not in rates:
        return []
    best = max(rates, key=lambda form: rates[form])
    return [
        f"kernel_form.py names {named!r} for JAX {jax_version}: "
        f"{rates[named] / rates[best]:.2f} of the fastest here, {best!r}"
    ]


def bandwidth(result: dict[str, Any]) -> float:
    """GB/s of the median run alone."""
    moved = result["elements"] * result["bytes_per_element"]
    return float(moved / statistics.median(result["seconds"]) / 1e9)


def huge_pages() -> str:
    huge = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return huge.read_text().strip() if huge.exists() else "unknown"


if __name__ == "__main__":
    main()
