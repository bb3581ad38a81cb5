"""Section of `bench_layer.py`: a layer on packed rows against whole rows, and exactness."""

from __future__ import annotations

from typing import Any

from device_timing import Bench
from layer_timing import our_programs, time_layer


def time_packed(bench: Bench) -> None:
    """Packed rows against whole rows: speed at equal token counts, and exactness."""
    import numpy as np

    args, config = bench.args, bench.config
    rows, seq = max(1, args.tokens // args.seq), args.seq
    rng = np.random.default_rng(2)
    trees = (bench.params(bench.model.layers[0]),)
    x, dy = bench.hidden(args.tokens), bench.hidden(args.tokens, 0.01)
    whole = np.ones((rows, seq), np.int32)
    equal = np.broadcast_to(np.arange(seq) // max(1, seq // 8) + 1, (rows, seq)).astype(np.int32)
    mixed = np.stack([_mixed_segments(rng, seq) for _ in range(rows)])

    def one(bench: Bench, name: str, segments: Any) -> None:
        ids = rng.integers(0, config.vocab_size, (rows, seq)).astype(np.int32)
        batch = bench.prepared({"input_ids": ids, "labels": ids, "segment_ids": segments})
        lengths = [n for row in segments for n in np.bincount(row)[1:]]
        note = {"documents": len(lengths), "width": batch["document_lengths"].shape[1]}
        bench.note(f"packed {name}", note)
        programs = our_programs(bench)
        time_layer(bench, f"packed {name}", *programs, trees, x, dy, batch, lengths=lengths)

    for name, segments in (("mixed", mixed), ("one document", whole), ("eighths", equal)):
        bench.attempt(f"packed {name}", one, name, segments)
    bench.attempt("packed exactness", _packed_exactness, mixed[:2])
    # The same documents of an eighth as whole rows of their own, which need no isolation.
    cut = (rows * 8, seq // 8)
    ids = rng.integers(0, config.vocab_size, cut).astype(np.int32)
    batch = bench.prepared({"input_ids": ids, "labels": ids})
    x, dy = x.reshape(*cut, -1), dy.reshape(*cut, -1)
    time_layer(bench, "eighths as whole rows", *our_programs(bench), trees, x, dy, batch)


def _mixed_segments(rng: Any, seq: int) -> Any:
    """Documents of log-uniform length from 1/64 of the row on, and a little padding at the end."""
    import numpy as np

    segments, start, number = np.zeros(seq, np.int32), 0, 1
    end = seq - seq // 50
    while start < end:
        length = int(seq * 2.0 ** rng.uniform(-6, -0.5))
        segments[start : min(start + length, end)] = number
        start, number = start + length, number + 1
    return segments


def _packed_exactness(bench: Bench, segments: Any) -> None:
    """Relative errors of the packed kernel against the chunked one in float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from slidedp_jax.models.attention import attend

    config, shape = bench.config, segments.shape
    ids = np.zeros(shape, np.int32)
    batch = bench.prepared({"input_ids": ids, "labels": ids, "segment_ids": segments})
    q, dy = (bench.normal((*shape, config.num_attention_heads, config.head_dim)) for _ in "qd")
    k, v = (bench.normal((*shape, config.num_key_value_heads, config.head_dim)) for _ in "kv")
    dy = jnp.where(batch["segment_ids"][:, :, None, None] > 0, dy, 0)

    def run(implementation: str, dtype: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, batch, window=None, implementation=implementation)

        def both(dy: Any, *qkv: Any) -> Any:
            out, pullback = jax.vjp(attention, *qkv)
            return out, *pullback(dy)

        arrays = [array.astype(dtype) for array in (dy, q, k, v)]
        return [array.astype(jnp.float32) for array in jax.jit(both)(*arrays)]

    with jax.default_matmul_precision("highest"):
        expected = run("chunked", jnp.float32)
    got = run(bench.attention, bench.dtype)
    errors = {
        name: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True)
    }
    bench.note(f"packed {bench.attention}: relative errors against float32", errors)
