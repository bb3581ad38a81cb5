"""Tiny inputs of the training command, and ways to run it and to look at what it left."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

from slidedp_jax.data import Examples, ExamplesBuilder
from slidedp_jax.train import main

ROOT = pathlib.Path(__file__).parents[2]
DEMO = runpy.run_path(str(ROOT / "scripts" / "make" / "make_demo_folder.py"))
VOCAB_SIZE = 272
"""Of the model; the tokenizer has 259, so no row ever holds the last thirteen ids."""


def write_model(folder: pathlib.Path, *, experts: int = 0) -> pathlib.Path:
    """A three-layer untied Qwen3 with a byte tokenizer and a ChatML template; or an OLMoE."""
    folder.mkdir(parents=True)
    DEMO["write_tokenizer"](folder, [], 259)
    config = DEMO["model_config"](VOCAB_SIZE) | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "max_window_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    if experts:
        config = DEMO["with_experts"](config, experts)
    tensors = DEMO["initial_weights"](config, 0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_rows(path: pathlib.Path, number: int = 48) -> pathlib.Path:
    """Short conversations of unequal length."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"row-{i:02d}"},
                {"role": "assistant", "content": "ab " * (i % 5) + f"{i * 7}"},
            ]
        }
        for i in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A model folder and a file of rows."""

    model: pathlib.Path
    rows: pathlib.Path

    def command(self, out: pathlib.Path, **settings) -> list[str]:
        """Words after `python -m slidedp_jax.train`."""
        fields = {
            "model_name_or_path": self.model,
            "train_file": self.rows,
            "output_dir": out,
            "platform": "cpu",
            "dtype": "float32",
            "attention": "chunked",
            "num_devices": 8,
            "num_host_devices": 8,
            "max_seq_length": 64,
            "per_device_train_batch_size": 3,
            "max_steps": 12,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "layers_per_chunk": 1,
            "rows_per_microbatch": 3,
            "export": False,
        }
        words = []
        for name, value in (fields | settings).items():
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words

    def environment(self) -> dict[str, str]:
        """Of a process that runs the command."""
        return dict(os.environ)

    def start(self, out: pathlib.Path, **settings) -> subprocess.Popen:
        """The command, running."""
        return subprocess.Popen(
            [sys.executable, "-m", "slidedp_jax.train", *self.command(out, **settings)],
            cwd=ROOT,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, out: pathlib.Path, **settings) -> subprocess.CompletedProcess:
        """The command, finished."""
        process = self.start(out, **settings)
        stdout, stderr = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def train(self, out: pathlib.Path, **settings) -> None:
        """The command in this process, on its eight devices; it must succeed."""
        assert main(self.command(out, **settings)) == 0


def metrics(out: pathlib.Path) -> list[dict]:
    """The steps of metrics.jsonl."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def losses(out: pathlib.Path) -> list[float]:
    """Of steps 1, 2, ... without gap or repetition."""
    records = metrics(out)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def checkpoints(out: pathlib.Path) -> list[int]:
    """Steps whose checkpoint folders exist, whole or not; nothing else may be there."""
    return sorted(int(path.name.removeprefix("step_")) for path in (out / "checkpoints").iterdir())


def state(out: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """`name/master`, `name/state_0` (mu) and `name/state_1` (nu) of a checkpoint."""
    folder = out / "checkpoints" / f"step_{step:08d}"
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    arrays = {}
    for item in folder.iterdir():
        if item.is_dir():
            tree = checkpointer.restore(item.absolute())
            arrays |= {
                f"{name}/{kind}": np.asarray(value)
                for name, values in tree.items()
                for kind, value in values.items()
            }
    assert {key.rsplit("/")[-1] for key in arrays} == {"master", "state_0", "state_1"}
    return arrays


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names whose arrays differ in any bit."""
    assert one.keys() == other.keys()
    return sorted(name for name in one if one[name].tobytes() != other[name].tobytes())


def wait_for(path: pathlib.Path, process: subprocess.Popen) -> None:
    """Until a path exists; the process must live."""
    deadline = time.monotonic() + 600
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(process: subprocess.Popen, number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal and wait: exit code, stdout, stderr."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout, stderr


def tree_of(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def made_up_rows(count: int) -> Examples:
    """Examples of a few tokens each, for a `BatchSource`."""
    builder = ExamplesBuilder()
    for row in range(count):
        ids = np.full(3 + row % 5, row, np.int32)
        builder.append(ids, np.arange(len(ids)) > 0, row)
    return builder.finish([count])
