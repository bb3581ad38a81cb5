"""Held-out loss while SmolLM2-135M learns real chat rows, here and in PyTorch, with one plot.

    pip install chatterbot-corpus
    python scripts/bench/bench_held_out_curve.py --out docs/benchmarks/NAME

The rows are the English conversations of the `chatterbot-corpus` package (BSD licence); one of
eight is held out. The command trains on them, and PyTorch with transformers' model, tokenizer and
template and its own AdamW does so on the same rows in the same batches, each step's loss the mean
over its supervised tokens, clip 1.0, cosine after a warm-up. Held-out loss is measured in both at
the start and every few steps. Writes OUT.json and OUT.svg; exits with 1 where the last held-out
losses differ by more than a percent or the numbers of supervised tokens differ at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "make"))

import bench_record
import loss_plot
import yaml

Chat = list[dict[str, str]]

HELD_OUT_EVERY = 8
WHOLE_CONVERSATIONS = ("conversations", "computers")
"""Files whose turns follow each other; elsewhere later entries are other answers."""
LIMIT = 0.01
"""Of the relative difference of the last held-out losses."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json and OUT.svg")
    parser.add_argument("--model", type=pathlib.Path, help="model folder; default: SmolLM2-135M")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=4, help="per step")
    parser.add_argument("--tokens", type=int, default=192, help="longest row")
    parser.add_argument("--held-out-rows", type=int, default=32)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="cpu")
    return parser.parse_args()


def chats() -> list[Chat]:
    """All conversations in an order of their own."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the rows are in the package chatterbot-corpus: pip install chatterbot-corpus")
    folder = pathlib.Path(spec.submodule_search_locations[0]) / "data" / "english"
    found = []
    for path in sorted(folder.glob("*.yml")):
        for turns in yaml.safe_load(path.read_text())["conversations"]:
            turns = [str(turn) for turn in turns]
            turns = turns[: len(turns) // 2 * 2 if path.stem in WHOLE_CONVERSATIONS else 2]
            if len(turns) >= 2 and all(turn.strip() for turn in turns):
                roles = ("user", "assistant")
                pairs = enumerate(turns)
                found.append([{"role": roles[n % 2], "content": text} for n, text in pairs])
    random.Random(0).shuffle(found)
    return found


def train_here(
    args: argparse.Namespace, folder: pathlib.Path, files: Sequence[pathlib.Path], dtype: str
) -> list[dict[str, Any]]:
    """The command's records of steps and evaluations."""
    with tempfile.TemporaryDirectory() as out:
        settings = {
            "model_name_or_path": folder,
            "train_file": files[0],
            "validation_file": files[1],
            "output_dir": out,
            "platform": args.platform,
            "num_devices": 1,
            "dtype": dtype,
            "max_seq_length": args.tokens,
            "per_device_train_batch_size": args.rows,
            "shuffle": "false",
            "max_steps": args.steps,
            "learning_rate": args.rate,
            "warmup_steps": args.warmup,
            "eval_steps": args.eval_every,
            "eval_at_start": "true",
            "save_steps": "null",
            "save_at_end": "false",
            "export": "false",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "slidedp_jax.train", *words], check=True)
        text = (pathlib.Path(out) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


class Torch:
    """The same training in PyTorch, in float32."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.args, self.torch = args, torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # transformers hands the padding id to the embedding, which then drops the gradient of that
        # token's row even where it is text, as here the end of a turn is.
        self.model.get_input_embeddings().padding_idx = None
        self.model.eval()  # no dropout
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def example(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Ids and labels: the assistant's words and the token that ends its turn."""
        render = self.tokenizer.apply_chat_template
        ids: list[int] = render(chat, return_dict=False)
        labels = [-100] * len(ids)
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = render(chat[:number], add_generation_prompt=True, return_dict=False)
            assert ids[: len(before)] == before
            last = ids.index(self.end, len(before))
            labels[len(before) : last + 1] = ids[len(before) : last + 1]
        return ids[: self.args.tokens], labels[: self.args.tokens]

    def loss(self, examples: Sequence[tuple[list[int], list[int]]]) -> tuple[Any, int]:
        """Sum over the supervised tokens, and their number."""
        torch = self.torch
        longest = max(len(ids) for ids, _ in examples)
        ids = torch.zeros(len(examples), longest, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for row, (own, wanted) in enumerate(examples):
            ids[row, : len(own)] = torch.tensor(own)
            labels[row, : len(own)] = torch.tensor(wanted)
            mask[row, : len(own)] = 1
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        targets = labels[:, 1:].reshape(-1)
        total = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets, reduction="sum"
        )
        return total, int((targets != -100).sum())

    def held_out(self, examples: Sequence[tuple[list[int], list[int]]]) -> tuple[float, int]:
        """Mean over all supervised tokens, and their number."""
        total, count = 0.0, 0
        with self.torch.no_grad():
            for start in range(0, len(examples), self.args.rows):
                own, number = self.loss(examples[start : start + self.args.rows])
                total, count = total + own.item(), count + number
        return total / count, count

    def train(self, rows: Sequence[Chat], held_out: Sequence[Chat]) -> list[dict[str, Any]]:
        """Records as those of the command."""
        args, torch = self.args, self.torch
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others}], lr=args.rate, weight_decay=0.0
        )
        examples = [self.example(chat) for chat in rows]
        wanted = [self.example(chat) for chat in held_out]
        records: list[dict[str, Any]] = []

        def evaluate(step: int) -> None:
            loss, count = self.held_out(wanted)
            records.append({"step": step, "eval_loss": loss, "eval_supervised_tokens": count})
            print(f"torch step {step}: held-out loss {loss:.4f}", flush=True)

        evaluate(0)
        for step in range(1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = args.rate * self.share(step - 1)
            total, count = self.loss(examples[(step - 1) * args.rows : step * args.rows])
            optimizer.zero_grad()
            (total / count).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
            optimizer.step()
            records.append(
                {
                    "step": step,
                    "loss": total.item() / count,
                    "grad_norm": norm,
                    "num_supervised_tokens": count,
                }
            )
            if step % args.eval_every == 0 or step == args.steps:
                evaluate(step)
        return records

    def share(self, done: int) -> float:
        """Of the peak rate after so many updates."""
        warmup, steps = int(self.args.warmup), int(self.args.steps)
        if done < warmup:
            return done / max(1, warmup)
        return 0.5 * (1 + math.cos(math.pi * (done - warmup) / max(1, steps - warmup)))


def curve(records: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def supervised(records: Sequence[dict[str, Any]]) -> list[int]:
    names = ("num_supervised_tokens", "eval_supervised_tokens")
    return [record[name] for record in records for name in names if name in record]


def draw(out: pathlib.Path, runs: dict[str, Any]) -> None:
    panels = [
        loss_plot.Panel(title=title, lines={name: curve(run, key) for name, run in runs.items()})
        for title, key in (("held-out loss", "eval_loss"), ("training loss", "loss"))
    ]
    text = loss_plot.svg(panels, x_label="step", y_label="loss")
    out.with_name(out.name.removesuffix(".json") + ".svg").write_text(text)


def main() -> int:
    args = parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    every = chats()
    held_out = every[::HELD_OUT_EVERY][: args.held_out_rows]
    rows = [chat for number, chat in enumerate(every) if number % HELD_OUT_EVERY]
    if len(rows) < args.steps * args.rows:
        sys.exit(f"there are {len(rows)} rows, and {args.steps} steps take {args.rows} each")
    rows = rows[: args.steps * args.rows]
    runs: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = pathlib.Path(scratch)
        if args.model is None:
            from make_smollm2_folder import make_folder

            args.model = make_folder(work / "SmolLM2-135M-Instruct")
        files = [work / "rows.jsonl", work / "held_out.jsonl"]
        for path, some in zip(files, (rows, held_out), strict=True):
            path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in some))
        for dtype in args.dtype:
            start = time.perf_counter()
            runs[f"here, {dtype}"] = train_here(args, args.model, files, dtype)
            seconds[f"here, {dtype}"] = time.perf_counter() - start
        start = time.perf_counter()
        runs["PyTorch, float32"] = Torch(args, args.model).train(rows, held_out)
        seconds["PyTorch, float32"] = time.perf_counter() - start
    reference = runs["PyTorch, float32"]
    last = {name: curve(run, "eval_loss")[-1][1] for name, run in runs.items()}
    apart = {name: abs(loss / last["PyTorch, float32"] - 1) for name, loss in last.items()}
    same = all(supervised(run) == supervised(reference) for run in runs.values())
    passed = same and max(apart.values()) <= LIMIT
    print(f"step  {'  '.join(f'{name:>16}' for name in runs)}   (held-out loss)")
    for number, (step, _) in enumerate(curve(reference, "eval_loss")):
        losses = [curve(run, "eval_loss")[number][1] for run in runs.values()]
        print(f"{step:>4}  {'  '.join(f'{loss:>16.4f}' for loss in losses)}")
    print(f"last held-out losses apart: {apart}; same supervised tokens: {same}")
    if args.out is not None:
        packages = ("jax", "torch", "transformers", "chatterbot-corpus")
        facts = {
            "model": args.model.name,
            "steps": args.steps,
            "rows_per_step": args.rows,
            "longest_row": args.tokens,
            "held_out_rows": len(held_out),
            "peak_rate": args.rate,
            "warmup_steps": args.warmup,
        }
        keep = ("step", "loss", "grad_norm", "eval_loss", *("num_supervised_tokens",))
        short = {
            name: [{key: record[key] for key in keep if key in record} for record in run]
            for name, run in runs.items()
        }
        record = bench_record.record(
            packages,
            settings=facts,
            results=short,
            seconds=seconds,
            last_held_out=last,
            relative_difference=apart,
            same_supervised_tokens=same,
            passed=passed,
        )
        bench_record.save(args.out, record)
        draw(args.out, runs)
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
