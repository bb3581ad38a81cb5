"""Fixtures that write a tokenizer folder and row files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_tokenizer

from slidedp_jax.data import ExampleSettings, load_examples, load_tokenizer


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


@pytest.fixture
def load(tokenizer_folder, write_rows):
    """Write rows and load them; keywords are settings."""

    def load(rows, *, folder=tokenizer_folder, name="rows.jsonl", vocab_size=None, **settings):
        settings = ExampleSettings(**{"max_seq_length": 512} | settings)
        path = write_rows(rows, name)
        return load_examples([path], load_tokenizer(folder), settings, vocab_size=vocab_size)

    return load
