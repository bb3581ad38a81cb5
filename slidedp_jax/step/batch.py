"""From a user's batch to the arrays that the model's functions read.

A batch is a mapping of NumPy arrays [R, T] for R rows of one step (all devices and microbatches):
`input_ids` and `labels` in the Hugging Face convention (labels aligned with the inputs, -100 where
nothing is supervised; position t predicts label t + 1 unless the model says otherwise), optionally
`segment_ids` (0 padding, documents 1, 2, ...; needed where a row holds several documents, or
padding before its first) and `positions`. `row_ids`, a sequence of any length, are the numbers of
the source rows in it, which errors name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from slidedp_jax.errors import UserError
from slidedp_jax.models.batch_arrays import (
    IGNORED,
    document_offsets,
    document_positions,
    targets_of,
)

_INTEGERS = ("input_ids", "labels", "segment_ids", "positions")


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """Arrays of one step, split into microbatches.

    Attributes:
      microbatches: per microbatch, the arrays of `models.streamed.Batch` for all devices,
        [G * rows_per_microbatch, T], rows of one device together.
      num_supervised: supervised target tokens of the step.
      num_tokens: tokens that are not padding, as far as `segment_ids` tell.
      row_ids: numbers of the source rows, as given.
    """

    microbatches: tuple[dict[str, np.ndarray], ...]
    num_supervised: int
    num_tokens: int
    row_ids: tuple[int, ...] = ()


def prepare(
    batch: Mapping[str, np.ndarray],
    *,
    vocab_size: int,
    num_devices: int,
    rows_per_microbatch: int,
    most_microbatches: int | None = None,
    documents_per_row: int = 1,
    seed_and_step: tuple[int, int] | None = None,
    token_arrays: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    shifted: bool = True,
) -> PreparedBatch:
    """Validate, shift labels, fill up with rows of zero weight and split into microbatches.

    Rows are dealt in order: microbatch m of device g holds consecutive rows. When the number of
    rows is not a multiple of `num_devices * rows_per_microbatch`, padding rows without supervised
    tokens fill up; they change neither the loss nor the gradients. More microbatches than
    `most_microbatches` are refused, since a step keeps activations of all of them.
    `documents_per_row` is the least number of documents for which offsets have room; the largest of
    a run keeps their shape, and so the compiled programs, the same from step to step. With
    `seed_and_step` the rows carry `row_seeds` (see `models.streamed.Batch`). `token_arrays` names
    further arrays [R, T, ...], by dtype and shape per token, that are handed on as they are.
    Without `shifted`, labels are targets already: position t predicts label t.

    Raises:
      UserError: missing or unknown arrays, shapes that disagree, ids that are no integers or beyond
        the vocabulary, no supervision, too many rows.
    """
    token_arrays = token_arrays or {}
    batch = _as_arrays(batch, token_arrays)
    input_ids, labels = _checked(batch, vocab_size, token_arrays)
    if most_microbatches is not None:
        _check_rows(len(input_ids), num_devices, rows_per_microbatch, most_microbatches)
    segment_ids = batch.get("segment_ids")
    targets = targets_of(labels, segment_ids, shifted=shifted)
    num_supervised = int((targets != IGNORED).sum())
    if num_supervised == 0:
        why = " after the shift by one (all labels are -100, or only first tokens are labelled)"
        raise UserError(
            f"the batch of {input_ids.shape[0]} rows has no supervised token{why * shifted}; drop "
            "such rows or check the labels"
        )
    arrays = {"input_ids": input_ids, "targets": targets}
    positions = batch.get("positions")
    if positions is None:
        positions = document_positions(input_ids.shape, segment_ids)
    arrays["positions"] = positions
    num_tokens = input_ids.size
    if segment_ids is not None:
        arrays["segment_ids"] = segment_ids
        num_tokens = int((segment_ids != 0).sum())
    arrays = {name: np.ascontiguousarray(a, np.int32) for name, a in arrays.items()}
    for name, spec in token_arrays.items():
        arrays[name] = np.ascontiguousarray(batch[name], spec.dtype)
    arrays = _fill_rows(arrays, num_devices * rows_per_microbatch)
    if segment_ids is not None:
        starts, lengths = document_offsets(arrays["segment_ids"], documents_per_row)
        arrays |= {"document_starts": starts, "document_lengths": lengths}
    if seed_and_step is not None:
        arrays["row_seeds"] = row_seeds(*seed_and_step, len(arrays["input_ids"]))
    return PreparedBatch(
        microbatches=_split(arrays, num_devices * rows_per_microbatch),
        num_supervised=num_supervised,
        num_tokens=num_tokens,
        row_ids=tuple(int(number) for number in np.ravel(batch.get("row_ids", ()))),
    )


def row_seeds(seed: int, step: int, num_rows: int) -> np.ndarray:
    """What a step's random numbers depend on, uint32 [R, 3]: seed, step, place of the row."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}; a model that draws random numbers needs 0 to 2**32 - 1")
    place = np.arange(num_rows)
    return np.stack([np.full(num_rows, seed), np.full(num_rows, step), place], 1).astype(np.uint32)


def _as_arrays(batch: Mapping[str, Any], token_arrays: Iterable[str]) -> dict[str, np.ndarray]:
    """The batch's entries, lists included, as arrays; integers where they count something."""
    unknown = sorted(batch.keys() - {*_INTEGERS, "row_ids", *token_arrays})
    if unknown:
        raise UserError(
            f"the batch has {unknown}, which nothing reads; allowed: {[*_INTEGERS, 'row_ids']}"
            f"{f' and {list(token_arrays)}' if token_arrays else ''}. What an attention_mask says "
            "belongs into segment_ids: 0 for padding, 1, 2, ... for documents"
        )
    arrays = {}
    for name, values in batch.items():
        if values is None:
            continue
        try:
            arrays[name] = np.asarray(values)
        except ValueError as error:
            raise UserError(
                f"the rows of {name} have different lengths; pad them (segment_ids 0, labels "
                f"{IGNORED}) or pack them"
            ) from error
        if name in _INTEGERS and not np.issubdtype(arrays[name].dtype, np.integer):
            raise UserError(f"{name} is of dtype {arrays[name].dtype}; it must hold integers")
    return arrays


def _checked(
    batch: Mapping[str, np.ndarray],
    vocab_size: int,
    token_arrays: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[np.ndarray, np.ndarray]:
    missing = [name for name in ("input_ids", "labels", *token_arrays) if name not in batch]
    if missing:
        raise UserError(f"the batch lacks {missing}; it has {sorted(batch)}")
    input_ids, labels = np.asarray(batch["input_ids"]), np.asarray(batch["labels"])
    if input_ids.ndim != 2 or input_ids.size == 0:
        raise UserError(f"input_ids must be [rows, tokens] and not empty, got {input_ids.shape}")
    trailing = {name: tuple(spec.shape) for name, spec in token_arrays.items()}
    for name, shape in {"labels": (), "segment_ids": (), "positions": (), **trailing}.items():
        if batch.get(name) is not None and np.shape(batch[name]) != (*input_ids.shape, *shape):
            raise UserError(
                f"{name} has shape {np.shape(batch[name])}, input_ids {input_ids.shape}; "
                f"they must agree{f', with {shape} for each token' if shape else ''}"
            )
    for name, array, allowed in (("input_ids", input_ids, ()), ("labels", labels, (IGNORED,))):
        bad = (array < 0) | (array >= vocab_size)
        for value in allowed:
            bad &= array != value
        if bad.any():
            row, position = map(int, np.argwhere(bad)[0])
            raise UserError(
                f"{name}[{row}, {position}] is {int(array[row, position])}, but the vocabulary has "
                f"{vocab_size} ids; the tokenizer does not belong to this model"
            )
    return input_ids, labels


def _check_rows(rows: int, num_devices: int, rows_per_microbatch: int, most: int) -> None:
    at_once = num_devices * rows_per_microbatch
    if rows > most * at_once:
        raise UserError(
            f"the batch of {rows} rows makes {-(-rows // at_once)} microbatches of "
            f"{rows_per_microbatch} rows on {num_devices} devices, but the strategy was planned "
            f"for {most}: plan with rows_per_step={rows}, which counts the memory that they take, "
            f"or train on at most {most * at_once} rows per step"
        )


def _fill_rows(arrays: dict[str, np.ndarray], multiple: int) -> dict[str, np.ndarray]:
    rows = next(iter(arrays.values())).shape[0]
    missing = -rows % multiple
    if not missing:
        return arrays
    fill = dict.fromkeys(arrays, 0) | {"targets": IGNORED}
    return {
        name: np.concatenate([array, np.full((missing, *array.shape[1:]), fill[name], array.dtype)])
        for name, array in arrays.items()
    }


def _split(arrays: dict[str, np.ndarray], rows: int) -> tuple[dict[str, np.ndarray], ...]:
    total = next(iter(arrays.values())).shape[0]
    return tuple(
        {name: array[start : start + rows] for name, array in arrays.items()}
        for start in range(0, total, rows)
    )
