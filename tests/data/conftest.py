"""A small byte-level tokenizer folder and row files, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from template_texts import CHATML
from tokenizers import decoders, models, pre_tokenizers, processors

from slidedp_jax.data import IGNORED, ExampleSettings, load_examples, load_tokenizer

ENDOFTEXT, IM_START, IM_END, BOS = 256, 257, 258, 259
"""Ids of the special tokens; `<|bos|>` exists only where a folder was made with `bos=True`."""


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = CHATML,
    eos: str = "<|im_end|>",
    pad: str | None = "<|endoftext|>",
    bos: bool = False,
    merges: Iterable[tuple[str, str]] = (),
    config: dict[str, Any] | None = None,
) -> Path:
    """Write `tokenizer.json` (256 bytes, specials, then merges) and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + (["<|bos|>"] if bos else [])
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, *specials])}
    merges = list(merges)
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in specials])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    settings |= {"pad_token": pad} if pad else {}
    settings |= {"bos_token": "<|bos|>"} if bos else {}
    settings |= {"chat_template": chat_template} if chat_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
    return folder


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """Folder of the byte-level tokenizer with a ChatML template, eos `<|im_end|>`, no bos."""
    return write_tokenizer(tmp_path / "model")


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines and return the path."""

    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
        return path

    return write


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Conversations with the row's number in the text and lengths spread tenfold."""
    rows = []
    for i in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if i % 3 == 0 else []
        for turn in range(1 + i % 2):
            messages.append({"role": "user", "content": f"row-{i:04d} question {turn}"})
            messages.append({"role": "assistant", "content": f"é {turn} " + "word " * (i % 10)})
        rows.append({"messages": messages})
    return rows


@pytest.fixture
def load(tokenizer_folder, write_rows):
    """Write rows and load them; keywords are settings."""

    def load(rows, *, folder=tokenizer_folder, name="rows.jsonl", vocab_size=None, **settings):
        settings = ExampleSettings(**{"max_seq_length": 512} | settings)
        path = write_rows(rows, name)
        return load_examples([path], load_tokenizer(folder), settings, vocab_size=vocab_size)

    return load


def learnt_text(examples, tokenizer, index):
    """Supervised tokens as text, a bar between runs."""
    ids, learnt = examples.input_ids(index), examples.labels(index) != IGNORED
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learnt)) + 1)
    return "|".join(tokenizer.decode(ids[run]) for run in runs if learnt[run[0]])
