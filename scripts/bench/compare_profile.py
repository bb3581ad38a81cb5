"""Steps of `bench_plans.py` or `bench_step.py` beside what preset and profile predict of them.

    python scripts/bench/compare_profile.py PROFILE.json RESULTS.json ... --out docs/benchmarks/NAME

Every point's own strategy is costed anew with the rates of the preset of the profile's device and
with those of the profile, so no device is needed. Prints a table, and median and worst of either;
writes them to OUT.json.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record

from slidedp_jax.models.config import ModelConfig, named_config
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.machine_profile import read_profile
from slidedp_jax.planner.presets import preset_of_kind
from slidedp_jax.planner.step_time import step_time
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile")
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    profile = read_profile(args.profile)
    preset = preset_of_kind(profile.machine.device_kind)
    if preset is None:
        sys.exit(f"{profile.machine.device_kind} has no preset to compare with")
    machines = {"preset": preset.with_devices(profile.machine.num_devices)}
    machines["profile"] = profile.hardware
    errors: dict[str, list[float]] = {name: [] for name in machines}
    record = bench_record.record(("jax",), points=[], summary={})
    record["measured_on"] = profile.identity()["machine"]
    print(f"{'point':24s} {'measured s':>10}  {'preset':>8} {'off':>7}  {'profile':>8} {'off':>7}")
    for file, name, job, strategy, seconds in points(args.results):
        cells, row = [], {"point": name, "file": file, "job": job, "measured_s": seconds}
        for machine, hardware in machines.items():
            predicted = predicted_s(job, strategy, hardware)
            errors[machine].append(predicted / seconds - 1)
            cells.append(f"{predicted:8.3f} {errors[machine][-1]:+7.1%}")
            row |= {f"{machine}_s": predicted, f"{machine}_off": errors[machine][-1]}
        record["points"].append(row)
        print(f"{name:24s} {seconds:10.3f}  {'  '.join(cells)}")
    for machine, values in errors.items():
        worst = max(values, key=abs)
        median = statistics.median(map(abs, values))
        bias = statistics.median(values)
        print(f"{machine}: median {median:.1%}, bias {bias:+.1%}, worst {worst:+.1%}")
        record["summary"][machine] = {"median_off": median, "bias": bias, "worst": worst}
    bench_record.save(args.out, record)


def points(
    paths: list[pathlib.Path],
) -> Iterator[tuple[str, str, dict[str, Any], Strategy, float]]:
    """File, name, job, strategy and median step of every result."""
    for path in paths:
        for result in json.loads(path.read_text())["results"]:
            strategy = Strategy.recorded(result["strategy"])
            job = result.get("job") or {
                "model": result["model"],
                "layers": None,
                "rows": result["tokens"] // result.get("seq", 4096),
                "seq": result.get("seq", 4096),
                "documents": None,
            }
            name = result.get("point") or f"{job['model']} {result['tokens']}"
            yield path.name, name, job, strategy, statistics.median(result["full_s"])


def predicted_s(job: dict[str, Any], strategy: Strategy, hardware: HardwareProfile) -> float:
    """Seconds of a step of the job."""
    documents = None
    if job["documents"] is not None:
        documents = (job["seq"] // job["documents"],) * job["documents"]
    batch = BatchShape(
        num_rows=job["rows"],
        seq_length=job["seq"],
        document_lengths=documents,
        documents_per_row=job["documents"],
    )
    workload = Workload.from_config(config_of(job["model"], job["layers"]))
    return step_time(workload, batch, strategy, hardware).step_s


def config_of(model: str, layers: int | None) -> ModelConfig:
    """A named model, or its first layers."""
    config = named_config(model)
    if layers is None:
        return config
    return replace(
        config,
        num_hidden_layers=layers,
        layer_windows=config.layer_windows[:layers],
        sparse_layers=config.sparse_layers[:layers],
    )


if __name__ == "__main__":
    main()
