"""What the arrays of a batch mean that are made of a user's: targets, positions, offsets.

`models.streamed.Batch` says what a model's functions find in a batch. Letters: R rows, T tokens.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100
"""Label and target where nothing is supervised."""


def shift_labels(labels: np.ndarray, segment_ids: np.ndarray | None) -> np.ndarray:
    """Targets [R, T]: the label of the next position, never across a document's end."""
    targets = np.full(labels.shape, IGNORED, np.int32)
    targets[:, :-1] = labels[:, 1:]
    if segment_ids is not None:
        same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
        targets[:, :-1][~same] = IGNORED
    return targets


def targets_of(labels: np.ndarray, segment_ids: np.ndarray | None, *, shifted: bool) -> np.ndarray:
    """Targets [R, T] of labels [R, T]: those of the next position, or as they are; no padding's."""
    if shifted:
        return shift_labels(labels, segment_ids)
    if segment_ids is None:
        return labels
    return np.where(segment_ids != 0, labels, IGNORED)


def document_offsets(
    segment_ids: np.ndarray, documents_per_row: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Segments as offsets: starts int32 [R, M + 1] and lengths int32 [R, M].

    M is `documents_per_row`, or where a row has more documents, their number rounded up to a power
    of two so that few shapes occur. Documents that are not there have length 0 and start at
    the end of the last one, as does the closing entry of `starts`. Padding before, between or after
    documents belongs to none.
    """
    num_rows, length = segment_ids.shape
    previous = np.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    following = np.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    begins = (segment_ids != 0) & (segment_ids != previous)
    ends = (segment_ids != 0) & (segment_ids != following)
    most = int(begins.sum(axis=1).max(initial=1))
    width = documents_per_row if most <= documents_per_row else 1 << (most - 1).bit_length()
    starts = np.zeros((num_rows, width + 1), np.int32)
    lengths = np.zeros((num_rows, width), np.int32)
    for row in range(num_rows):
        first = np.flatnonzero(begins[row])
        last = np.flatnonzero(ends[row]) + 1
        starts[row, : len(first)] = first
        starts[row, len(first) :] = last[-1] if len(last) else 0
        lengths[row, : len(first)] = last - first
    assert int(lengths.sum()) <= num_rows * length
    return starts, lengths


def document_positions(shape: tuple[int, int], segment_ids: np.ndarray | None) -> np.ndarray:
    """0, 1, 2, ... restarting with each document, int32 of shape [R, T]."""
    index = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    if segment_ids is None:
        return index
    previous = np.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    start = np.where(segment_ids != previous, index, 0)
    return np.where(segment_ids != 0, index - np.maximum.accumulate(start, axis=1), 0)
