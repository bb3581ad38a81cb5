"""Numbers on which a model is tried out: rows, and weights that hide no mistake."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from slidedp_jax.adapter.source import Source
from slidedp_jax.errors import UserError
from slidedp_jax.models.batch_arrays import (
    IGNORED,
    document_offsets,
    document_positions,
    targets_of,
)

SUPERVISED = 0.7
"""Share of made-up labels that count."""

MOVED = 0.1
"""Size of what is added to a weight, over the root mean square of its parameter."""


def random_rows(
    num_rows: int,
    tokens: int,
    *,
    vocab_size: int,
    packed: bool,
    token_arrays: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
) -> dict[str, np.ndarray]:
    """A batch as the trainer takes it, [R, T]: random tokens, of which some labels do not count.

    Packed rows hold two documents and padding. Floats of `token_arrays` lie between 0 and 1,
    integers are 1.
    """
    rng = np.random.default_rng(seed)
    shape = (num_rows, tokens)
    ids = rng.integers(min(1, vocab_size - 1), vocab_size, shape, np.int32)
    labels = np.where(rng.random(shape) < SUPERVISED, ids, IGNORED)
    batch: dict[str, np.ndarray] = {"input_ids": ids, "labels": labels}
    if packed:
        segments = np.minimum(np.arange(tokens) * 5 // max(2 * tokens, 5) + 1, 3) % 3
        batch["segment_ids"] = np.tile(segments.astype(np.int32), (num_rows, 1))
    for name, spec in token_arrays.items():
        values = rng.uniform(0.1, 1, (*shape, *spec.shape))
        ones = np.ones_like(values)
        batch[name] = (values if np.issubdtype(spec.dtype, np.floating) else ones).astype(
            spec.dtype
        )
    return batch


def as_functions_see_it(
    batch: Mapping[str, Any], token_arrays: Mapping[str, jax.ShapeDtypeStruct], *, shifted: bool
) -> dict[str, np.ndarray]:
    """A user's batch with what `models.streamed.Batch` makes of it, and its labels.

    Raises:
      UserError: `input_ids` or `labels` are missing, or nothing is supervised.
    """
    missing = {"input_ids", "labels", *token_arrays} - batch.keys()
    if missing:
        raise UserError(f"the batch to check with lacks {sorted(missing)}; it has {sorted(batch)}")
    arrays = {name: np.asarray(values) for name, values in batch.items() if values is not None}
    segments = arrays.get("segment_ids")
    ids, labels = arrays["input_ids"], arrays["labels"]
    if ids.ndim != 2 or labels.shape != ids.shape:
        raise UserError(f"input_ids {ids.shape} and labels {labels.shape} must be [rows, tokens]")
    whole = {
        "input_ids": ids,
        "labels": labels,
        "targets": targets_of(labels, segments, shifted=shifted),
        "positions": document_positions((len(ids), ids.shape[1]), segments),
    }
    if segments is not None:
        starts, lengths = document_offsets(segments)
        whole |= {"document_starts": starts, "document_lengths": lengths}
    whole |= {name: array for name, array in arrays.items() if name not in whole}
    if not (whole["targets"] != IGNORED).any():
        raise UserError("the batch to check with has no supervised token")
    return {
        name: array.astype(token_arrays[name].dtype if name in token_arrays else np.int32)
        for name, array in whole.items()
    }


def moved_weights(source: Source, name: str, seed: int) -> np.ndarray:
    """The user's value of a parameter with a little noise, float32; of a shape alone, noise.

    Weights that begin at 0 or 1 would hide that something is left out.
    """
    shape, value = source.shapes[name].shape, source.value(name)
    start: Any
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(
        shape, np.float32
    )
    if isinstance(value, jax.ShapeDtypeStruct):
        fan_in = math.prod(shape[-2:-1])
        start, size = (0.0, 1 / math.sqrt(fan_in)) if len(shape) > 1 else (1.0, MOVED)
    else:
        start = np.asarray(value).astype(np.float32)
        size = MOVED * (float(np.sqrt(np.mean(np.square(start), dtype=np.float64))) or 1.0)
    moved: np.ndarray = start + np.float32(size) * noise
    return moved
