"""What the sections of `bench_layer.py` share: a layer's FLOPs and timing, pieces of the model."""

from __future__ import annotations

import math
from typing import Any

from device_timing import Bench, format_row


def matrix_parameters(config: Any) -> int:
    return sum(math.prod(shape) for shape in config.layer_shapes().values() if len(shape) == 2)


def visible_pairs(lengths: Any) -> int:
    """Pairs of a query and a key that it sees, for documents of the given lengths."""
    return sum(int(length) * (int(length) + 1) // 2 for length in lengths)


def layer_flops(config: Any, tokens: int, pairs: int) -> tuple[float, float]:
    """FLOPs of (forward, backward with recompute) of one layer."""
    product = 2.0 * matrix_parameters(config) * tokens
    attention = 4.0 * config.num_attention_heads * config.head_dim * pairs
    return product + attention, 3 * product + 3.5 * attention


def time_layer(
    bench: Bench,
    name: str,
    forward: Any,
    backward: Any,
    trees: Any,
    x: Any,
    dy: Any,
    batch: Any,
    *,
    lengths: list[int] | None = None,
    dump: bool = False,
    **keywords: Any,
) -> float:
    """Forward and backward of one layer, and the sum as a row of its own."""
    tokens = x.shape[0] * x.shape[1]
    pairs = visible_pairs(lengths if lengths is not None else [x.shape[1]] * x.shape[0])
    flops = layer_flops(bench.config, tokens, pairs)
    keywords["dump"] = dump
    total = 0.0
    total += bench.time(f"{name}: forward", forward, (trees, x, batch), flops=flops[0], **keywords)
    arguments = (trees, x, dy, batch, None)
    total += bench.time(
        f"{name}: backward", backward, arguments, flops=flops[1], chain=(2, 0), **keywords
    )
    row = {"name": f"{name}: sum", "ms": total, "tflops": sum(flops) / total / 1e9}
    row["tflops_products_only"] = 8e-9 * matrix_parameters(bench.config) * tokens / total
    bench.rows.append(row)
    print(format_row(row), flush=True)
    return total


def our_programs(bench: Bench) -> tuple[Any, Any]:
    from slidedp_jax.step.layer_functions import ChunkKind

    backward = bench.programs.backward(ChunkKind(layer_fns=bench.layer_fns, widen=False))
    return bench.programs.forward(bench.layer_fns), backward


def programs_of(bench: Bench, function: Any, *, mapped: bool = True) -> tuple[Any, Any]:
    """Forward and backward of any layer function, compiled as ours are."""
    import jax

    def forward(trees: Any, x: Any, batch: Any) -> Any:
        return function(trees[0], x, batch)

    def backward(trees: Any, x: Any, dy: Any, batch: Any, _: None) -> Any:
        _, pullback = jax.vjp(lambda t, h: forward(t, h, batch), trees, x)
        gradients, dx = pullback(dy)
        return dx, jax.tree.map(lambda leaf: leaf[None], gradients)

    if not mapped:
        return jax.jit(forward), jax.jit(backward, donate_argnums=(2,))
    rows, same = bench.rows_spec, bench.same_spec
    return (
        bench.map(forward, (same, rows, rows), rows),
        bench.map(backward, (same, rows, rows, rows, rows), (rows, rows), donate=(2,)),
    )


def product(left: int, right: int) -> Any:
    import jax
    from jax import lax

    return jax.jit(lambda a, b: lax.dot_general(a, b, (((left,), (right,)), ((), ()))))


def vocabulary_matrix(params: Any, vocab_size: int) -> Any:
    """The [V, D] matrix among some parameters."""
    import jax

    return next(leaf for leaf in jax.tree.leaves(params) if leaf.shape[0] == vocab_size)


def chunk_layout(stage: Any) -> Any:
    from slidedp_jax.state.layout import lay_out

    groups = dict.fromkeys(stage.parameter_names(), 0)
    return lay_out(stage.name or "head", [stage], groups, block_size=4096, num_pieces=15)
