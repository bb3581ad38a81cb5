"""A byte-level tokenizer folder, made on the spot, rows, and what is learnt of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from template_texts import CHATML
from tokenizers import decoders, models, pre_tokenizers, processors

from slidedp_jax.data import IGNORED

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


def learnt_text(examples, tokenizer, index):
    """Supervised tokens as text, a bar between runs."""
    ids, learnt = examples.input_ids(index), examples.labels(index) != IGNORED
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learnt)) + 1)
    return "|".join(tokenizer.decode(ids[run]) for run in runs if learnt[run[0]])
