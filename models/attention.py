"""Which attention kernel runs, and why.

Two implementations of causal grouped-query attention: `chunked` (any backend and dtype) and `cudnn`
(bfloat16 or float16 on NVIDIA GPUs). Rows packed from several documents use cuDNN's ragged layout
where this version of JAX has it. Asking for a kernel that cannot run is an error; `auto` says in
words what it chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.jax_internals import cuda_capability, packed_cudnn_attention
from slidedp_jax.models.chunked_attention import chunked_attention
from slidedp_jax.models.compute_target import ComputeTarget

RowLayout = Literal["whole", "documents", "segments"]
"""What a batch says of its rows: one document each (`whole`), documents given as offsets beside
segment ids (`documents`), or segment ids alone (`segments`)."""

IMPLEMENTATIONS = ("auto", "chunked", "cudnn")


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The kernel that runs (`chunked` or `cudnn`) and the reason, for the log."""

    name: str
    reason: str


def device_target(device: jax.Device) -> ComputeTarget:
    """Describes a device; JAX itself calls both CUDA and ROCm devices `gpu`."""
    kind = device.device_kind
    if device.platform != "gpu":
        return ComputeTarget(platform=device.platform, device_kind=kind)
    capability = cuda_capability(device)
    platform = "rocm" if capability is None else "cuda"
    return ComputeTarget(platform=platform, compute_capability=capability, device_kind=kind)


def row_layout(batch: Mapping[str, Any]) -> RowLayout:
    """Reads the layout off the keys of a batch (see `models.streamed.Batch`)."""
    if "segment_ids" not in batch:
        return "whole"
    return "documents" if "document_starts" in batch else "segments"


def resolve_attention(
    requested: str,
    *,
    target: ComputeTarget,
    dtype: Any,
    head_dim: int,
    rows: RowLayout,
) -> AttentionChoice:
    """Decides which kernel serves a model; static, so it can be logged before anything runs.

    Args:
      requested: `auto`, `chunked` or `cudnn`.
      target: where the program will run.
      dtype: compute dtype.
      head_dim: size of a head.
      rows: what the batches say of their rows.

    Raises:
      ValueError: `cudnn` was asked for and cannot run; the message lists every obstacle. Or the
        name is unknown.
    """
    if requested not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention is {requested!r}; supported: {', '.join(map(repr, IMPLEMENTATIONS))}."
        )
    if requested == "chunked":
        return AttentionChoice(name="chunked", reason="asked for")
    obstacles = _cudnn_obstacles(target=target, dtype=dtype, head_dim=head_dim, rows=rows)
    if not obstacles:
        reason = f"{np.dtype(dtype).name} on {target.platform}, head_dim {head_dim}, {rows} rows"
        return AttentionChoice(name="cudnn", reason=reason)
    if requested == "cudnn":
        raise ValueError(
            f"attention 'cudnn' cannot run: {'; '.join(obstacles)}. Use 'auto' or 'chunked'."
        )
    return AttentionChoice(name="chunked", reason=f"cuDNN cannot run: {'; '.join(obstacles)}")


def _cudnn_obstacles(
    *, target: ComputeTarget, dtype: Any, head_dim: int, rows: RowLayout
) -> list[str]:
    capability = target.compute_capability or 0.0
    largest_head = 256 if capability >= 9.0 else 128
    obstacles = []
    if target.platform != "cuda":
        obstacles.append(f"the platform is {target.platform}, cuDNN needs cuda")
    if np.dtype(dtype) not in (np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        obstacles.append(f"the dtype is {np.dtype(dtype).name}, cuDNN takes bfloat16 and float16")
    if head_dim % 8 or head_dim > largest_head:
        obstacles.append(
            f"head_dim is {head_dim}, cuDNN takes multiples of 8 up to {largest_head} here"
        )
    if rows == "segments":
        obstacles.append(
            "the batch has segment_ids without document_starts and document_lengths, which is "
            "how cuDNN is told of documents"
        )
    if rows == "documents":
        if target.platform == "cuda" and capability < 9.0:
            obstacles.append(
                f"packed rows need compute capability 9.0 or newer, this device has {capability}"
            )
        missing = packed_cudnn_attention()
        if isinstance(missing, str):
            obstacles.append(missing)
    return obstacles


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: Mapping[str, jax.Array],
    *,
    window: int | None,
    implementation: str,
) -> jax.Array:
    """Causal attention of every token within its document.

    Args:
      q: [B, T, N, H].
      k: [B, T, K, H].
      v: [B, T, K, H].
      batch: see `models.streamed.Batch`.
      window: a query sees itself and the `window - 1` tokens before it; None sees all before it.
      implementation: `chunked` or `cudnn`, as `resolve_attention` decided.

    Returns:
      [B, T, N, H] in the dtype of `q`; 0 at padding.
    """
    if implementation == "chunked":
        return chunked_attention(q, k, v, batch.get("segment_ids"), window=window)
    assert implementation == "cudnn", implementation
    if row_layout(batch) == "documents":
        return _packed_cudnn(q, k, v, batch, window=window)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def _packed_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: Mapping[str, jax.Array],
    *,
    window: int | None,
) -> jax.Array:
    """Packed rows through cuDNN, documents given as offsets: no mask, no work across documents.

    The softmax statistics that cuDNN keeps for the backward pass are float32 [B * M, N, T], with M
    the largest number of documents in a row.
    """
    call = packed_cudnn_attention()
    assert not isinstance(call, str), call
    starts, lengths = cudnn_documents(batch["document_starts"], batch["document_lengths"])
    # cuDNN leaves results and gradients outside the documents unwritten. Selecting on the way in
    # as well drops what it leaves in the gradients of padding.
    is_token = (batch["segment_ids"] > 0)[:, :, None, None]
    q, k, v = (jnp.where(is_token, x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    out = call(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=q.shape[3] ** -0.5,
        sliding_window_length=window,
    )
    return jnp.where(is_token, out, jnp.zeros((), out.dtype))


def cudnn_documents(starts: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Offsets as cuDNN's ragged layout wants them.

    JAX joins the rows' lists by dropping negative entries, so an offset may be there only where a
    length is: a row's end marker would shift every later row by one document.

    Args:
      starts: int32 [B, M + 1], first token of each document within its row; what follows the last
        document is ignored.
      lengths: int32 [B, M], tokens of each document, 0 or less where there is none.

    Returns:
      starts int32 [B, max(M, 2) + 1] and lengths int32 [B, max(M, 2)], -1 where there is none.
    """
    num_documents = lengths.shape[1]
    exists = lengths > 0
    starts = jnp.where(exists, starts[:, :num_documents], -1)
    lengths = jnp.where(exists, lengths, -1)
    # With a single column the call would take the offsets for absent.
    missing = max(2 - num_documents, 0)
    starts = jnp.pad(starts, [(0, 0), (0, missing + 1)], constant_values=-1)
    lengths = jnp.pad(lengths, [(0, 0), (0, missing)], constant_values=-1)
    return starts.astype(jnp.int32), lengths.astype(jnp.int32)
