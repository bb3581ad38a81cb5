"""What a run was made from, known by its content, wherever it lies and however that is spelled."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any

from slidedp_jax.data import Tokenizer
from slidedp_jax.errors import UserError
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.wording import counted

ROWS, TOKENIZER = "rows", "tokenizer"
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def fingerprints(inputs: RunInputs) -> dict[str, str | None]:
    """Of the training rows (token ids, labels, boundaries) and of the tokenizer, if there is one.

    The model's configuration is compared by its fields (`checkpoint.record.check_configuration`).
    """
    tokenizer = inputs.pretrained.tokenizer
    return {
        ROWS: inputs.source.state()["data"],
        TOKENIZER: None if tokenizer is None else _of_tokenizer(tokenizer),
    }


def weights_fingerprint(folder: pathlib.Path) -> dict[str, str]:
    """File of weights -> its size, and a checksum of its header and of blocks all over it.

    Other weights differ nearly everywhere, so that some blocks tell without all being read.
    """
    return {path.name: _of_weights(path) for path in sorted(folder.glob("*.safetensors"))}


def _of_weights(path: pathlib.Path) -> str:
    size, blocks = path.stat().st_size, 64
    with path.open("rb") as file:
        found = zlib.crc32(file.read(_HEADER_BYTES))
        for number in range(blocks):
            file.seek(size * number // blocks)
            found = zlib.crc32(file.read(4096), found)
    return f"{size} bytes, checksum {found:08x}"


_HEADER_BYTES = 1 << 20


def differ(before: Mapping[str, Any], inputs: RunInputs) -> bool:
    """Whether rows or tokenizer are others than those that a run was started with."""
    return any(before.get(name, now) != now for name, now in fingerprints(inputs).items())


def check_same(
    before: Mapping[str, Any] | None, inputs: RunInputs, *, other_rows: bool = False
) -> None:
    """Whether a run goes on with what it was started with, as far as that was written down.

    Args:
      before: what `record.read_run` gave of the run.
      inputs: of this start.
      other_rows: they may be others.

    Raises:
      UserError: the rows or the tokenizer are others.
    """
    known = (before or {}).get("fingerprints") or {}
    now, hint = fingerprints(inputs), "; to go on with the new rows: --allow_changed train_file"
    what = {
        ROWS: "the training rows, as token ids and labels"
        f"{counts_before((before or {}).get('data_counts'), inputs)},",
        TOKENIZER: f"the tokenizer in {inputs.pretrained.folder}",
    }
    if other_rows:
        del what[ROWS]
    for name, text in what.items():
        if known.get(name, now[name]) != now[name]:
            verb = "differ from those" if name == ROWS else "differs from that"
            raise UserError(
                f"{text} {verb} that the run was started with. Give the same model folder, files "
                f"and settings, or another output_dir{hint if name == ROWS else ''}"
            )


def counts_before(counts: Mapping[str, Any] | None, inputs: RunInputs) -> str:
    """How many rows and tokens there were and are, in brackets; empty where it is not known."""
    if not counts:
        return ""
    report = inputs.report
    return (
        f" ({counted(counts['rows_in'], 'row')} of {counts['num_tokens']:,} tokens then, "
        f"{counted(report.rows_in, 'row')} of {report.num_tokens:,} now)"
    )


def base_model_name(name_or_path: str) -> str:
    """A model's name without its place on this machine: `Qwen/Qwen3-4B` or a folder's name."""
    path = pathlib.Path(name_or_path).expanduser()
    if not path.is_dir():
        return name_or_path if _HUB_NAME.fullmatch(name_or_path) else path.name
    for part in path.resolve().parts:
        if found := _CACHED.fullmatch(part):
            return f"{found[1]}/{found[2]}"
    return path.resolve().name


def _of_tokenizer(tokenizer: Tokenizer) -> str:
    """Of the vocabulary and the special tokens; not of its file, which versions write otherwise."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    content = [
        sorted(vocabulary.items()),
        tokenizer.eos_id,
        tokenizer.pad_id,
        list(tokenizer.stop_ids),
        list(tokenizer.prefix_ids),
        list(tokenizer.suffix_ids),
    ]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
