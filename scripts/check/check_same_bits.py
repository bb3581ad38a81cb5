"""Run one training command twice, and once stopped and resumed: the same bits in the end?

    python scripts/check/check_same_bits.py OUT [--num-devices 1] [--record NAME]

Makes a small bfloat16 model with heads of 128 and the demo's rows in OUT, then for whole rows and
for packed ones, each run in a process of its own:

    first     twelve steps, with no cache of compiled programs
    again     the same command, again without a cache, so that the compiler chooses anew
    resumed   the same command stopped after six steps, and then the rest

and compares the checksums of weights and optimizer state in their last checkpoints, and the losses.
Exit status 1 where any differ. `--train ...` hands further flags to the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "make"))

import bench_record
from bench_loading import write_model_folder
from make_demo_folder import make_demo_folder

from slidedp_jax.models.config import named_config

STEPS = 12
VARIANTS: dict[str, list[str]] = {"whole": [], "packed": ["--packing"]}


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="a folder to make")
    parser.add_argument("--num-devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--record", type=pathlib.Path, help="writes RECORD.json")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="further flags")
    args = parser.parse_args()
    model = make_model(args.out, args.layers)
    record = bench_record.record(("jax", "jaxlib"), results=[])
    for variant in args.variants:
        result = compare(args, model, variant)
        record["results"].append(result)
        bench_record.save(args.record, record)
        print(json.dumps(result), flush=True)
    return int(any(result["differing"] for result in record["results"]))


def make_model(out: pathlib.Path, layers: int) -> pathlib.Path:
    """A Qwen3 of 0.6B's widths with few layers and the demo's vocabulary."""
    make_demo_folder(out / "demo")
    model = out / "demo" / "model"
    config = dataclasses.replace(
        named_config("qwen3-0.6b"),
        num_hidden_layers=layers,
        layer_windows=(None,) * layers,
        vocab_size=2048,
    )
    weights = out / "weights"
    write_model_folder(weights, config)
    (model / "model.safetensors").unlink()
    for path in weights.iterdir():
        shutil.move(path, model / path.name)
    weights.rmdir()
    return model


def compare(args: argparse.Namespace, model: pathlib.Path, variant: str) -> dict[str, Any]:
    """Three runs of one variant and what differs between their ends."""
    seconds = {}
    for name, stops in (("first", [STEPS]), ("again", [STEPS]), ("resumed", [STEPS // 2, STEPS])):
        start = time.perf_counter()
        for steps in stops:
            train(args, model, variant, args.out / f"{variant}-{name}", steps)
        seconds[name] = round(time.perf_counter() - start, 1)
    ends = {name: end_of(args.out / f"{variant}-{name}") for name in seconds}
    differing = {
        name: [key for key in ends["first"] if ends["first"][key] != end[key]]
        for name, end in ends.items()
        if end != ends["first"]
    }
    return {
        "variant": variant,
        "seconds": seconds,
        "values": len(ends["first"]),
        "differing": {name: len(keys) for name, keys in differing.items()},
        "such_as": {name: keys[:3] for name, keys in differing.items()},
        "loss": {name: end[f"loss of step {STEPS}"] for name, end in ends.items()},
    }


def train(
    args: argparse.Namespace, model: pathlib.Path, variant: str, out: pathlib.Path, steps: int
) -> None:
    """One run of the command."""
    command = [sys.executable, "-m", "slidedp_jax.train"]
    command += ["--model_name_or_path", str(model), "--output_dir", str(out)]
    command += ["--train_file", str(model.parent / "train.jsonl")]
    command += ["--num_devices", str(args.num_devices), "--max_steps", str(steps)]
    command += ["--max_seq_length", str(args.tokens), "--per_device_train_batch_size", "8"]
    command += ["--learning_rate", "1e-3", "--lr_scheduler_type", "constant"]
    command += ["--compilation_cache", "null", "--export", "false", "--logging_steps", "4"]
    command += [*VARIANTS[variant], *args.train]
    done = subprocess.run(command, text=True, capture_output=True, cwd=bench_record.ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def end_of(out: pathlib.Path) -> dict[str, Any]:
    """Checksum of every array of the last checkpoint, and the loss of every step."""
    record = json.loads((out / "checkpoints" / f"step_{STEPS:08d}/trainer.json").read_text())
    arrays = {
        f"{key} of {name}": value
        for name, of_name in record["checksums"].items()
        for key, value in of_name.items()
    }
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {f"loss of step {step['step']}": step["loss"] for step in steps}
    plan = {"plan": record["extra"]["run"]["strategy"], "kernel form": record["kernel_form"]}
    return plan | losses | arrays


if __name__ == "__main__":
    sys.exit(main())
