"""Checkpoints under kills, damage, failing and hanging disks: runs go on and end in the same bits.

    python scripts/check/checkpoint_faults.py --folder DIR --out NAME [--kills 40 --flips 50 ...]

Needs no GPU, and half an hour on two CPU cores with the numbers by default, most of it for starts
of Python. A run of a small model, which saves at every step beside the next, is

- killed at random times, and at random system calls of saves, renames, retention and restores, and
  started again until it is done: its weights, optimizer state and losses must be those of a run
  that nobody disturbed, in every bit;
- run with a clock that jumps, and with a disk that hangs while SIGTERM comes: the same.

A trainer in this process restores checkpoints in which a byte was flipped, or whose files were cut:
each must be refused with the file named, or be read as what was saved. It saves while calls fail
with ENOSPC and EIO: the error names the path, nothing is left, and the next save is whole. Over
many saves memory and file descriptors stay as they are. Ends with 1 if anything was otherwise; the
counts are written to NAME.json.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "make"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record
from bench_record import rss_gib
from killed_run import CALLS

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 6
FAILING_CALLS = ("pwrite", "fsync", "ftruncate", "rename", "mkdir", "open")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="new; room for 1 GB")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument(
        "--failures", type=int, default=40, help="of calls, ENOSPC and EIO by turns"
    )
    parser.add_argument("--hangs", type=int, default=3)
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


class Runs:
    """A training command in processes of its own, and what it leaves."""

    def __init__(self, folder: pathlib.Path):
        from make_demo_folder import make_demo_folder

        self.folder = folder
        make_demo_folder(folder / "demo", vocab_size=400)
        rows = (folder / "demo" / "eval.jsonl").read_text().splitlines(keepends=True)
        (folder / "held_out.jsonl").write_text("".join(rows[:4]))

    def _command(self, out: pathlib.Path, fault: str, call: str, number: int) -> list[str]:
        settings = {
            "model_name_or_path": self.folder / "demo" / "model",
            "train_file": self.folder / "demo" / "train.jsonl",
            "validation_file": self.folder / "held_out.jsonl",
            "output_dir": out,
            "max_train_samples": 48,
            "max_seq_length": 64,
            "per_device_train_batch_size": 4,
            "max_steps": STEPS,
            "eval_steps": 2,
            "save_steps": 1,
            "save_total_limit": 2,
            "save_keep_every": 4,
            "learning_rate": 1e-3,
            "num_devices": 1,
            "num_host_devices": 2,
            "platform": "cpu",
            "export": "false",
            "stop_within": 4,
            "compilation_cache": self.folder / "cache",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        script = str(ROOT / "scripts" / "check" / "killed_run.py")
        return [sys.executable, script, fault, call, str(number), *words]

    def start(
        self, out: pathlib.Path, fault: str = "none", call: str = "pwrite", number: int = 0
    ) -> subprocess.Popen[str]:
        """Begin, or go on; `killed_run.py` says what the fault may be."""
        return subprocess.Popen(
            self._command(out, fault, call, number),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, out: pathlib.Path) -> str:
        """Run to the end, undisturbed; what it printed."""
        process = self.start(out)
        said, _ = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"a run in {out} did not go on ({process.returncode}):\n{said}")
        return said

    def result(self, out: pathlib.Path) -> dict[str, Any]:
        """What must be the same however a run came to its end."""
        from slidedp_jax.checkpoint.contents import verify
        from slidedp_jax.checkpoint.record import read_record
        from slidedp_jax.checkpoint.retention import list_steps

        steps = list_steps(out / "checkpoints")
        _, damages = verify(steps[-1])
        record = read_record(steps[-1])
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = {("loss", line["step"]): line["loss"] for line in lines if "loss" in line}
        losses |= {
            ("eval", line["step"]): line["eval_loss"] for line in lines if "eval_loss" in line
        }
        return {
            "kept": [path.name for path in steps],
            "leftovers": [path.name for path in (out / "checkpoints").glob(".*")],
            "damages": [str(damage) for damage in damages],
            "checksums": record["checksums"],
            "shared": record["shared_optimizer_state"],
            "losses": losses,
            "lines": sum("loss" in line for line in lines),
        }


def killed_runs(
    runs: Runs, wanted: dict[str, Any], number: int, chance: random.Random
) -> dict[str, Any]:
    """Kill, start again, until so many kills have hit; every run that ends is compared."""
    counts: dict[str, Any] = {"kills": 0, "at_calls": {}, "runs": 0, "differing": 0, "missed": 0}
    longest_s = 12.0
    while counts["kills"] < number:
        out = runs.folder / f"killed_{counts['runs']}"
        for _ in range(4):
            if counts["kills"] >= number:
                break
            if chance.random() < 0.5:
                process = runs.start(out)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(chance.uniform(2, longest_s))
                process.kill()
                hit, call = process.wait() == -signal.SIGKILL, "any time"
            else:
                call = chance.choice(list(CALLS))
                most = {"pwrite": 400, "fsync": 900, "preadv": 150, "ftruncate": 400}.get(call, 40)
                process = runs.start(out, "kill", call, chance.randrange(most))
                hit = process.wait(timeout=600) == -signal.SIGKILL
            said, _ = process.communicate()
            if not hit and process.returncode:
                raise SystemExit(f"a run in {out} failed ({process.returncode}):\n{said}")
            counts["kills" if hit else "missed"] += 1
            if hit:
                counts["at_calls"][call] = counts["at_calls"].get(call, 0) + 1
        runs.finish(out)
        counts["runs"] += 1
        counts["differing"] += _differs(runs.result(out), wanted, out)
        shutil.rmtree(out)
    return counts


def _differs(found: dict[str, Any], wanted: dict[str, Any], out: pathlib.Path) -> bool:
    names = [name for name in wanted if found[name] != wanted[name]]
    if names:
        print(f"{out}: {', '.join(names)} are not those of an undisturbed run", flush=True)
    return bool(names)


def hanging_disks(
    runs: Runs, wanted: dict[str, Any], number: int, chance: random.Random
) -> dict[str, Any]:
    """A write never ends, SIGTERM comes: the run says so in time and goes on elsewhere."""
    counts = {"hangs": 0, "said_in_time": 0, "differing": 0}
    for _ in range(number):
        out = runs.folder / f"hanging_{counts['hangs']}"
        process = runs.start(out, "hang", "pwrite", chance.randrange(100))
        assert process.stdout is not None
        while (line := process.stdout.readline()) and not line.startswith(f"step {STEPS - 4}/"):
            pass
        process.terminate()
        start = time.perf_counter()
        said, _ = process.communicate(timeout=120)
        counts["hangs"] += 1
        in_time = time.perf_counter() - start < 5 and process.returncode == 128 + signal.SIGTERM
        counts["said_in_time"] += in_time and "within 4 s of SIGTERM" in said
        runs.finish(out)
        counts["differing"] += _differs(runs.result(out), wanted, out)
    return counts


# In this process.


def make_trainer(seed: int = 0) -> Any:
    """A small one after a step."""
    import dataclasses

    import numpy as np
    import optax

    import slidedp_jax
    from slidedp_jax.models import decoder
    from slidedp_jax.models.config import named_config
    from slidedp_jax.planner.strategy import Strategy

    config = dataclasses.replace(named_config("tiny"), vocab_size=4096)
    trainer = slidedp_jax.Trainer(
        decoder.build(config),
        optax.adamw(1e-3),
        strategy=Strategy(
            layers_per_chunk=1,
            rows_per_microbatch=2,
            num_microbatches=1,
            compute_dtype="float32",
            num_host_devices=2,
            block_size=4096,
            loss_chunk_tokens=64,
        ),
        seed=seed,
    )
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 32)).astype(np.int32)
    step = functools.partial(trainer.step, {"input_ids": ids, "labels": ids})
    step()
    return trainer, step


def damaged(
    trainer: Any, checkpoint: pathlib.Path, number: int, chance: random.Random, *, cut: bool
) -> dict[str, Any]:
    """Restore from checkpoints of which a byte is flipped, or a file is cut."""
    from slidedp_jax.errors import UserError

    counts = {"tried": 0, "refused": 0, "file_named": 0, "read_as_saved": 0, "wrong": 0}
    wanted = {name: values.tobytes() for name, values in trainer.parameters().items()}
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    large = [path for path in files if path.stat().st_size > 10_000]
    for _ in range(number):
        path = chance.choice(large if chance.random() < 0.5 else files)
        raw = path.read_bytes()
        bad = bytearray(raw)
        if cut:
            bad = bad[: chance.randrange(len(raw))]
        else:
            bad[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        counts["tried"] += 1
        try:
            trainer.restore(checkpoint)
        except UserError as error:
            counts["refused"] += 1
            named = any(part in str(error) for part in (path.name, path.parent.name))
            counts["file_named"] += named
            if not named:
                print(f"{path} is not named: {error}", flush=True)
        else:
            found = {name: values.tobytes() for name, values in trainer.parameters().items()}
            counts["read_as_saved" if found == wanted else "wrong"] += 1
        path.write_bytes(raw)
    trainer.restore(checkpoint)
    return counts


@contextlib.contextmanager
def failing(call: str, number: int, code: int) -> Iterator[None]:
    """From the `number`-th on, such calls fail; of `open`, those that make a file."""
    owner, name = CALLS.get(call, (os, call))
    real, left = getattr(owner, name), [number]

    def fail(*arguments: Any, **options: Any) -> Any:
        makes = call != "open" or arguments[1] & os.O_CREAT
        left[0] -= bool(makes)
        if makes and left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, real)


def failing_disks(
    trainer: Any, step: Callable[[], Any], folder: pathlib.Path, number: int, chance: random.Random
) -> dict[str, Any]:
    """Saves, waiting and beside steps, while calls fail."""
    from slidedp_jax.checkpoint.contents import verify

    counts = {
        "tried": 0,
        "failed": 0,
        "path_named": 0,
        "not_reached": 0,
        "leftovers": 0,
        "wrong": 0,
    }
    for attempt in range(number):
        call, code = chance.choice(FAILING_CALLS), (errno.ENOSPC, errno.EIO)[attempt % 2]
        most = {"pwrite": 60, "fsync": 150, "ftruncate": 60, "open": 100, "mkdir": 60}.get(call, 1)
        beside, target = chance.random() < 0.5, folder / f"failing_{attempt}"
        counts["tried"] += 1
        step()
        try:
            with failing(call, chance.randrange(most), code):
                if beside:
                    saving = trainer.save_beside(target)
                    step()
                    saving.result()
                else:
                    trainer.save(target)
        except OSError as error:
            counts["failed"] += 1
            counts["path_named"] += "step_" in str(error)
            left = list(target.rglob("*")) if target.exists() else []
            counts["leftovers"] += bool(left)
        else:
            counts["not_reached"] += 1
        path = trainer.save(target)
        counts["wrong"] += bool(verify(path)[1])
        shutil.rmtree(target)
    return counts


def many_saves(
    trainer: Any, step: Callable[[], Any], folder: pathlib.Path, number: int
) -> dict[str, Any]:
    """Memory and descriptors after a fifth of the saves, and after all of them."""
    from slidedp_jax.checkpoint.retention import Retention

    seen = []
    for save in range(number):
        step()
        trainer.save_beside(folder / "many").result()
        Retention(last=2).apply(folder / "many")
        if save + 1 in (max(1, number // 5), number):
            threads = len(os.listdir("/proc/self/task"))
            seen.append((rss_gib(), len(os.listdir("/proc/self/fd")), threads))
    (rss, descriptors, threads), last = seen[0], seen[-1]
    return {
        "saves": number,
        "rss_growth_mib": round((last[0] - rss) * 1024, 1),
        "descriptor_growth": last[1] - descriptors,
        "thread_growth": last[2] - threads,
    }


def main() -> int:
    args = parse()
    chance = random.Random(args.seed)
    args.folder.mkdir(parents=True)
    record = bench_record.record(("jax", "orbax-checkpoint"), seed=args.seed)

    def note(name: str, counts: dict[str, Any]) -> None:
        record[name] = counts
        print(name, json.dumps(counts), flush=True)
        bench_record.save(args.out, record)

    import slidedp_jax

    slidedp_jax.configure(platform="cpu", num_devices=1, num_host_devices=2)
    trainer, step = make_trainer()
    checkpoint = trainer.save(args.folder / "one")
    note("flipped_bytes", damaged(trainer, checkpoint, args.flips, chance, cut=False))
    note("cut_files", damaged(trainer, checkpoint, args.cuts, chance, cut=True))
    note("failing_calls", failing_disks(trainer, step, args.folder, args.failures, chance))
    note("many_saves", many_saves(trainer, step, args.folder, args.saves))
    trainer.close()
    runs = Runs(args.folder)
    runs.finish(args.folder / "undisturbed")
    wanted = runs.result(args.folder / "undisturbed")
    process = runs.start(args.folder / "clock", "clock")
    process.communicate(timeout=600)
    differs = _differs(runs.result(args.folder / "clock"), wanted, args.folder / "clock")
    note("jumping_clock", {"runs": 1, "differing": int(differs)})
    note("hanging_disks", hanging_disks(runs, wanted, args.hangs, chance))
    note("killed", killed_runs(runs, wanted, args.kills, chance))
    return _judge(record)


def _judge(record: dict[str, Any]) -> int:
    """1 if anything was otherwise than it must be."""
    must_be_zero = [
        record[name][count]
        for name, count in (
            ("flipped_bytes", "wrong"),
            ("cut_files", "wrong"),
            ("failing_calls", "leftovers"),
            ("failing_calls", "wrong"),
            ("many_saves", "descriptor_growth"),
            ("jumping_clock", "differing"),
            ("hanging_disks", "differing"),
            ("killed", "differing"),
        )
    ]
    damages = [record["flipped_bytes"], record["cut_files"]]
    good = (
        not any(must_be_zero)
        and all(counts["file_named"] == counts["refused"] for counts in damages)
        and record["failing_calls"]["path_named"] == record["failing_calls"]["failed"]
        and record["hanging_disks"]["said_in_time"] == record["hanging_disks"]["hangs"]
        and record["many_saves"]["rss_growth_mib"] < 64
    )
    print("as it must be" if good else "NOT as it must be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
