"""Trains a model folder with this package and with PyTorch's AdamW on the same rows, and compares.

Both run in float32 on the CPU. The rows are short chats about the language reference that every
Python carries; the loss counts the assistant's tokens. Checked are the loss and the gradient norm
before the first update, the loss of every later step, and that the exported folder loads in
transformers and writes text. Exits with 1 when a limit is passed.

    python scripts/make/make_smollm2_folder.py SMOLLM2
    python scripts/check/check_against_transformers.py SMOLLM2 [--json OUT.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

STEPS, ROWS, TOKENS, LEARNING_RATE, WEIGHT_DECAY = 10, 2, 128, 2e-5, 0.1
FIRST_LOSS_LIMIT, FIRST_NORM_LIMIT, CURVE_LIMIT = 1e-4, 1e-4, 1e-2
PROMPT = "What does the Python manual say about lambda?"
ROOT = Path(__file__).parents[2]


def chats() -> list[list[dict[str, str]]]:
    """As many conversations as the steps need, each longer than a row."""
    long = [(name, text) for name, text in sorted(topics.topics.items()) if len(text) > 900]
    return [
        [
            {"role": "user", "content": f"What does the Python manual say about {name}?"},
            {"role": "assistant", "content": text[:900].strip()},
        ]
        for name, text in long[: STEPS * ROWS]
    ]


def train_here(folder: Path, rows: Path, out: Path) -> list[dict[str, Any]]:
    """Ten steps of the command; its metrics."""
    settings = {
        "model_name_or_path": folder,
        "train_file": rows,
        "output_dir": out,
        "platform": "cpu",
        "num_devices": 1,
        "dtype": "float32",
        "export_dtype": "float32",
        "max_seq_length": TOKENS,
        "per_device_train_batch_size": ROWS,
        "shuffle": "false",
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "save_steps": "null",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "slidedp_jax.train", *words], cwd=ROOT, check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_in_torch(folder: Path) -> tuple[list[float], list[float]]:
    """The same ten steps in PyTorch: losses and gradient norms before clipping."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # transformers hands the padding id to the embedding, which then drops the gradient of that
    # token's row even where it is text, as here the end of a turn is.
    model.get_input_embeddings().padding_idx = None
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others}],
        lr=LEARNING_RATE,
        weight_decay=0.0,
    )
    losses, norms = [], []
    conversations = chats()
    for start in range(0, STEPS * ROWS, ROWS):
        ids, labels = [], []
        for messages in conversations[start : start + ROWS]:
            whole = tokenizer.apply_chat_template(messages, return_dict=False)[:TOKENS]
            prompt = tokenizer.apply_chat_template(
                messages[:1], add_generation_prompt=True, return_dict=False
            )
            assert len(whole) == TOKENS and whole[: len(prompt)] == prompt
            ids.append(whole)
            labels.append([-100] * len(prompt) + whole[len(prompt) :])
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
        print(f"torch step {len(losses)}/{STEPS}  loss {losses[-1]:.4f}", flush=True)
    return losses, norms


def generate_from(export: Path) -> str:
    """A greedy answer of the exported folder in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    odd = {name: list(keys) for name, keys in info.items() if keys}
    if odd:
        sys.exit(f"transformers does not take the export as it is: {odd}")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="model folder with a chat template")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        rows, out = Path(scratch) / "rows.jsonl", Path(scratch) / "run"
        rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats()))
        start = time.perf_counter()
        steps = train_here(args.folder, rows, out)
        here_s = time.perf_counter() - start
        text = generate_from(out / "export")
    start = time.perf_counter()
    losses, norms = train_in_torch(args.folder)
    torch_s = time.perf_counter() - start
    off = [abs(s["loss"] / loss - 1) for s, loss in zip(steps, losses, strict=True)]
    print("step  here      torch     difference   norm here  norm torch")
    for step, loss, norm, difference in zip(steps, losses, norms, off, strict=True):
        print(
            f"{step['step']:>4}  {step['loss']:.6f}  {loss:.6f}  {difference:.1e}      "
            f"{step['grad_norm']:<9.4f}  {norm:.4f}"
        )
    print(f"export in transformers: {PROMPT!r} -> {text!r}")
    norm_off = abs(steps[0]["grad_norm"] / norms[0] - 1)
    passed = (
        off[0] <= FIRST_LOSS_LIMIT
        and norm_off <= FIRST_NORM_LIMIT
        and max(off) <= CURVE_LIMIT
        and bool(text.strip())
    )
    if args.json is not None:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        versions = {
            name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers")
        }
        record = {
            "model": args.folder.name,
            "commit": commit,
            "rows_per_step": ROWS,
            "tokens_per_row": TOKENS,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": 1.0,
            "losses": [step["loss"] for step in steps],
            "losses_torch": losses,
            "grad_norms": [step["grad_norm"] for step in steps],
            "grad_norms_torch": norms,
            "largest_relative_difference": max(off),
            "seconds": {"here": here_s, "torch": torch_s},
            "sample_of_export": text,
            "versions": versions,
            "passed": passed,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print("passed" if passed else f"FAILED: losses differ by {off}, first norm by {norm_off}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
