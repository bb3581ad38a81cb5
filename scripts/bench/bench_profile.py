"""Measure this machine, then see what the profile predicts of steps, all in one run.

    python scripts/bench/bench_profile.py --out docs/benchmarks/NAME
    python scripts/bench/bench_profile.py --points cpu-smollm2 cpu-smollm2-eager --out NAME

Runs `slidedp measure`, `bench_plans.py` with its profile, each point in a process of its own, and
`slidedp measure` once more. Without a GPU the points for CPUs are taken, which takes about six
minutes on two cores. Every point is then costed by both profiles: how far those are apart is what
the machine itself changes by. Nothing else should run meanwhile; what other processes took of the
processors is recorded beside each point. Writes OUT_profile.json, OUT_profile_after.json and
OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_plans
import bench_record
import compare_profile

from slidedp_jax.planner.machine_profile import read_profile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", nargs="+", choices=bench_plans.POINTS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    small = [name for name in bench_plans.SMALL if name not in ("tiny", "cpu-smollm2-whole")]
    usual = [name for name in bench_plans.POINTS if name not in bench_plans.SMALL]
    points = args.points or (usual if bench_record.gpus() else small)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    base = args.out.absolute().with_name(args.out.name.removesuffix(".json"))
    profiles = [base.with_name(base.name + end) for end in ("_profile.json", "_profile_after.json")]
    run("-m", "slidedp_jax.cli", "measure", "--out", str(profiles[0]))
    words = ["--points", *points, "--steps", str(args.steps), "--hardware-profile"]
    script = pathlib.Path(__file__).with_name("bench_plans.py")
    run(str(script), *words, str(profiles[0]), "--out", str(base))
    run("-m", "slidedp_jax.cli", "measure", "--out", str(profiles[1]))
    compare(base.with_name(base.name + ".json"), profiles)


def compare(results: pathlib.Path, profiles: list[pathlib.Path]) -> None:
    """Print what either profile predicts of each point, and add it to the file of results."""
    record = json.loads(results.read_text())
    machines = [read_profile(path).hardware for path in profiles]
    by_name = {result["point"]: result for result in record["results"]}
    compared, cores = {}, len(os.sched_getaffinity(0))
    print(f"{'point':22s} step s (spread)        others    before       after        mean")
    for _, name, job, strategy, seconds in compare_profile.points([results]):
        found = by_name[name]
        both = [compare_profile.predicted_s(job, strategy, hardware) for hardware in machines]
        offs = [one / seconds - 1 for one in (*both, statistics.mean(both))]
        share = found["others_cpu_s"] / (cores * statistics.mean(found["full_s"]))
        compared[name] = {
            "step_s": seconds,
            "predicted_before_s": both[0],
            "predicted_after_s": both[1],
            "off_before": offs[0],
            "off_after": offs[1],
            "off_mean": offs[2],
            "others_share_of_cores": share,
        }
        spread = f"({min(found['full_s']):.3f}..{max(found['full_s']):.3f})"
        print(
            f"{name:22s} {seconds:6.3f} {spread:16s} {share:6.0%} {both[0]:7.3f} {offs[0]:+6.1%}"
            f" {both[1]:7.3f} {offs[1]:+6.1%} {offs[2]:+6.1%}"
        )
    values = [one["off_mean"] for one in compared.values()]
    if values:
        worst = max(values, key=abs)
        print(f"mean of both: median {statistics.median(map(abs, values)):.1%}, worst {worst:+.1%}")
    record["command"] = bench_record.command()
    record["compared"] = compared
    bench_record.save(results, record)


def run(*words: str) -> None:
    """A Python process in the checkout; ends this one if it fails."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
