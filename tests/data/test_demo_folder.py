"""The demo folder: complete, the same each time, and a model that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slidedp_jax.data import IGNORED, ExampleSettings, load_examples, load_tokenizer, preview

SCRIPT = Path(__file__).parents[2] / "scripts" / "make" / "make_demo_folder.py"


def make(out):
    return subprocess.run([sys.executable, SCRIPT, out], capture_output=True, text=True)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    done = make(out)
    assert done.returncode == 0, done.stderr
    return out


def test_rows_are_many_real_and_apart(demo):
    settings = ExampleSettings(max_seq_length=512)
    tokenizer = load_tokenizer(demo / "model")
    train, report = load_examples([demo / "train.jsonl"], tokenizer, settings, vocab_size=2048)
    held_out, _ = load_examples([demo / "eval.jsonl"], tokenizer, settings, vocab_size=2048)
    assert report.num_tokens > 100_000 and report.rows_dropped == 0 and report.truncated < 10
    assert len(train) > 400 and len(held_out) > 30
    texts = [set((demo / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "eval")]
    assert not texts[0] & texts[1]
    assert "⟦" in preview(train, tokenizer) and "statement" in preview(train, tokenizer)
    assert all((labels == IGNORED).any() for _, labels in held_out)


def test_weights_fit_the_configuration(demo):
    config = json.loads((demo / "model" / "config.json").read_text())
    weights = load_file(demo / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 128)
    vocabulary = load_tokenizer(demo / "model").backend.get_vocab(with_added_tokens=True)
    assert max(vocabulary.values()) + 1 == config["vocab_size"] == 2048
    assert "lm_head.weight" not in weights
    assert all(array.dtype == np.float32 for array in weights.values())


@pytest.mark.thorough
def test_the_same_each_time_and_never_over_other_files(demo, tmp_path):
    assert make(tmp_path / "again").returncode == 0
    for path in demo.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(demo)).read_bytes()
    refused = make(demo)
    assert refused.returncode != 0 and "is not empty" in refused.stderr


@pytest.mark.thorough
@pytest.mark.parity
def test_transformers_loads_all_of_it(demo):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        demo / "model", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = transformers.AutoTokenizer.from_pretrained(demo / "model")
    ours = load_tokenizer(demo / "model")
    row = json.loads((demo / "train.jsonl").read_text().splitlines()[0])
    ids = theirs.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert ids == ours.encode_chat(row["messages"])
    with torch.no_grad():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert abs(float(loss) - np.log(2048)) < 0.3  # random weights know nothing
