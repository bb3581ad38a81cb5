"""Runs on a CUDA device: errors of cuDNN attention against the float32 reference, row by row.

Prints one JSON object, case -> list over out, d_q, d_k, d_v of lists over rows of relative errors.
A process of its own, because the test processes are set up for the CPU.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import plain_model

from slidedp_jax.models.attention import attend, device_target, resolve_attention, row_layout
from slidedp_jax.models.batch_arrays import document_offsets

NUM_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 8, 2, 64

PACKED = [
    [(0, 100), (100, 1), (101, 60), (161, 95)],  # full row
    [(0, 200), (200, 30)],  # padding on the right
    [(90, 166)],  # padding on the left
    [],  # nothing but padding
    [(3, 7), (20, 50), (70, 70), (200, 40)],  # gaps
]

CASES = {
    "whole": (None, None),
    "whole-window": (None, 40),
    "packed": (PACKED, None),
    "packed-window": (PACKED, 40),
    "one-document": ([[(0, 256)], [(0, 100)], [(56, 200)]], None),
}


def segments_of(rows):
    segment_ids = np.zeros((len(rows), NUM_TOKENS), np.int32)
    for row, documents in enumerate(rows):
        for number, (start, length) in enumerate(documents, start=1):
            segment_ids[row, start : start + length] = number
    return segment_ids


def batch_of(rows):
    if rows is None:
        return {}
    segment_ids = segments_of(rows)
    starts, lengths = document_offsets(segment_ids)
    arrays = {
        "segment_ids": segment_ids,
        "document_starts": starts,
        "document_lengths": lengths,
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def value_and_gradients(function, arrays):
    q, k, v, d_out = arrays

    def run(q, k, v, d_out):
        out, pull_back = jax.vjp(function, q, k, v)
        return out, *pull_back(d_out)

    return jax.jit(run)(q, k, v, d_out)


def row_errors(got, expected):
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    return [
        float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6))
        for a, b in zip(got, expected, strict=True)
    ]


def errors_of(rows, window):
    rng = np.random.default_rng(0)
    shapes = [
        (len(rows or [0, 0]), NUM_TOKENS, count, HEAD_DIM)
        for count in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    batch = batch_of(rows)
    choice = resolve_attention(
        "cudnn",
        target=device_target(jax.devices()[0]),
        dtype=jnp.bfloat16,
        head_dim=HEAD_DIM,
        rows=row_layout(batch),
    )
    ours = value_and_gradients(
        lambda q, k, v: attend(q, k, v, batch, window=window, implementation=choice.name), arrays
    )
    with jax.default_matmul_precision("highest"):
        plain = value_and_gradients(
            lambda q, k, v: plain_model.attention(q, k, v, batch.get("segment_ids"), window),
            [array.astype(jnp.float32) for array in arrays],
        )
    return [row_errors(a, b) for a, b in zip(ours, plain, strict=True)]


def main():
    report = {}
    for name, (rows, window) in CASES.items():
        try:
            report[name] = errors_of(rows, window)
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(report))


if __name__ == "__main__":
    main()
