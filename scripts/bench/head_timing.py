"""Section of `bench_layer.py`: head and loss against their products, packing, the embedding."""

from __future__ import annotations

from typing import Any

import layer_variants
from device_timing import Bench
from layer_timing import chunk_layout, product, vocabulary_matrix


def time_head(bench: Bench) -> None:
    """Head and loss against their three products, the embedding, packing of a chunk."""
    import numpy as np

    config, tokens = bench.config, bench.args.tokens
    embed, head = bench.params(bench.model.embed), bench.params(bench.model.head)
    batch, x = bench.batch(tokens), bench.hidden(tokens)
    tied = embed if bench.model.tied else None
    table = vocabulary_matrix(tied if tied is not None else head, config.vocab_size)
    flops = 6.0 * tokens * table.size
    scale = bench.put(np.float32(1e-4))
    for chunk in (4096, 2048, 8192, 16384):
        if chunk <= max(tokens, 4096):
            program = bench.programs_for(min(chunk, tokens))[1].head_backward(False)
            arguments = (head, tied, x, batch, scale, None)
            name = f"head + loss, chunks of {chunk}"
            bench.attempt(name, _timed, name, program, arguments, flops, chunk == 4096)
    part = min(8192, tokens)
    rows = x.reshape(-1, x.shape[-1])[:part]
    d_logits = bench.normal((part, table.shape[0]), 0.01)
    products = [
        bench.time(f"head product {name}", program, pair, flops=flops / 3 * part / tokens)
        for name, pair, program in (
            ("x W^T", (rows, table), product(1, 1)),
            ("dy W", (d_logits, table), product(1, 0)),
            ("dy^T x", (d_logits, rows), product(0, 0)),
        )
    ]
    bench.note("the head's three products alone, ms", sum(products) * tokens / part)
    del d_logits
    bench.attempt("log-sum-exp", _time_log_sum_exp, table.shape[0])
    bench.attempt("pack", _time_packing)
    if bench.model.tied:
        sums = bench.put(np.zeros((1, *table.shape), np.float32))
        bench.time("embed: forward", bench.programs.embed, (embed, batch))
        bench.time(
            "embed: backward",
            bench.programs.embed_backward,
            (None, batch, x, {"weight": sums}),
            chain=(3, 0),
        )


def _timed(bench: Bench, name: str, program: Any, arguments: Any, flops: float, dump: bool) -> None:
    bench.time(name, program, arguments, flops=flops, dump=dump)


def _time_log_sum_exp(bench: Bench, vocab: int) -> None:
    """The loss's reduction over one chunk of logits, in two readings of memory and in one."""
    import jax
    import jax.numpy as jnp

    logits = bench.normal((min(4096, bench.args.tokens), vocab), dtype=jnp.float32)
    programs = [
        jax.jit(lambda x: jax.nn.logsumexp(x, axis=-1)),
        jax.jit(layer_variants.one_pass_log_sum_exp),
    ]
    for name, program in zip(("two readings", "one reading"), programs, strict=True):
        bench.time(f"log-sum-exp of 4096 tokens, {name}", program, (logits,))
    two, one = (program(logits) for program in programs)
    bench.note("log-sum-exp, largest difference", float(jnp.abs(two - one).max()))


def _time_packing(bench: Bench) -> None:
    import jax

    layout = chunk_layout(bench.model.layers[0])
    (part,) = layout.parts
    pieces = tuple(bench.normal((part.piece_size,), 0.02) for _ in range(part.num_pieces))
    gradients = (jax.tree.map(lambda leaf: leaf[None], bench.params(bench.model.layers[0])),)
    jax.block_until_ready(bench.programs.wire.unpack(layout, ((pieces,),)))
    jax.block_until_ready(bench.programs.wire.pack(layout, gradients))
    unpack = bench.programs._unpack[layout.signature]
    pack = bench.programs._pack[layout.signature]
    bench.time("unpack of a layer", unpack, (((pieces,),),))
    bench.time("pack of a layer", pack, (gradients,))
