"""Measure this machine, then see what the profile predicts of steps, all in one run.

    python scripts/bench/bench_profile.py --out docs/benchmarks/NAME
    python scripts/bench/bench_profile.py --points cpu-smollm2 cpu-smollm2-eager --out NAME

Runs `slidedp measure` and then `bench_plans.py` with its profile, each point in a process of its
own. Without a GPU the points for CPUs are taken. Nothing else should run meanwhile: on a host that
others use, samples differ by more than the forecast should. Writes OUT_profile.json and OUT.json.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

import bench_plans
import bench_record

ROOT = pathlib.Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", nargs="+", choices=bench_plans.POINTS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    small = [name for name in bench_plans.SMALL if name != "tiny"]
    usual = [name for name in bench_plans.POINTS if name not in bench_plans.SMALL]
    points = args.points or (usual if bench_record.gpus() else small)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    profile = args.out.with_name(f"{args.out.name.removesuffix('.json')}_profile.json")
    profile = profile.absolute()
    run("-m", "slidedp_jax.cli", "measure", "--out", str(profile))
    words = ["--points", *points, "--steps", str(args.steps), "--hardware-profile", str(profile)]
    script = pathlib.Path(__file__).with_name("bench_plans.py")
    run(str(script), *words, "--out", str(args.out.absolute()))


def run(*words: str) -> None:
    """A Python process in the checkout; ends this one if it fails."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
