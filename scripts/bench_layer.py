"""Time one decoder layer, its parts and variants of it, and the head, on one device.

    python scripts/bench_layer.py --out docs/benchmarks/NAME

Our programs run exactly as in training (`slidedp_jax.compute`). Every section is timed on its own
and may fail on its own; sections that no longer fit into --budget-s are named and skipped. Writes
OUT.json with the raw samples, and the kernels of the programs to OUT_hlo.txt.

FLOPs: a product of P parameters with T tokens is 2PT; forward 2, backward 4, backward with
recompute 6. Attention counts only visible pairs: forward 4 N H per pair, backward 2.5 times that.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import layer_variants
from device_timing import Bench, format_row

import slidedp_jax

SECTIONS = ["layer", "pieces", "small", "head", "plain_step", "prototype", "packed"]
SECTIONS += ["variants", "options"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape (tiny on a CPU)")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--small-tokens", type=int, default=16384, help="for section `small`")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8, help="depth of the plain step")
    parser.add_argument("--burst-s", type=float, default=0.4, help="length of one measurement")
    parser.add_argument("--budget-s", type=float, default=150.0, help="start nothing after this")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    args = parse()
    slidedp_jax.configure(num_devices=1)
    bench = Bench(args, start)
    for name in args.sections:
        print(f"== {name} ({bench.elapsed_s():.0f} s)", flush=True)
        bench.attempt(name, globals()[f"section_{name}"])
        bench.save()
    bench.finish()


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
    return bench.programs.forward(bench.layer_fns), bench.programs.backward(bench.layer_fns, False)


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


def section_layer(bench: Bench) -> None:
    """Our layer at the large token count, on random and on constant data."""
    tokens = bench.args.tokens
    trees = (bench.params(bench.model.layers[0]),)
    batch = bench.batch(tokens)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)
    time_layer(bench, "ours", *our_programs(bench), trees, x, dy, batch, dump=True)
    x, dy = x * 0 + 0.5, dy * 0 + 0.5
    time_layer(bench, "ours, constant inputs", *our_programs(bench), trees, x, dy, batch)


def section_small(bench: Bench) -> None:
    """Our layer at the small token count."""
    tokens = bench.args.small_tokens
    trees = (bench.params(bench.model.layers[0]),)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)
    batch = bench.batch(tokens)
    time_layer(bench, f"ours, {tokens} tokens", *our_programs(bench), trees, x, dy, batch)


def section_pieces(bench: Bench) -> None:
    """The layer's matrix products alone (the floor), attention alone, elementwise parts alone."""
    import jax

    config, tokens = bench.config, bench.args.tokens
    shapes = [s for s in config.layer_shapes().values() if len(s) == 2]
    total, seen = 0.0, {}
    for out, num_in in shapes:
        if (out, num_in) not in seen:
            x, dy = bench.normal((tokens, num_in)), bench.normal((tokens, out))
            weight = bench.normal((out, num_in), 0.02)
            flops = 2.0 * tokens * out * num_in
            seen[out, num_in] = [
                bench.time(f"product {kind} [{out}, {num_in}]", program, pair, flops=flops)
                for kind, pair, program in (
                    ("x W^T", (x, weight), _product(1, 1)),
                    ("dy W", (dy, weight), _product(1, 0)),
                    ("dy^T x", (dy, x), _product(0, 0)),
                )
            ]
        forward, by_input, by_weight = seen[out, num_in]
        total += 2 * forward + by_input + by_weight
    bench.note("products of one layer alone, forward + backward with recompute, ms", total)
    bench.attempt("attention alone", _time_attention)
    x, dy = bench.hidden(tokens), bench.hidden(tokens)
    _time_elementwise(bench, "norm of x", _norm_of(config), (x, bench.normal((x.shape[-1],))), dy)
    gate, up = (bench.normal((*x.shape[:2], config.intermediate_size)) for _ in range(2))
    swiglu = jax.jit(lambda gate, up: jax.nn.silu(gate) * up)
    _time_elementwise(bench, "silu(gate) * up", swiglu, (gate, up), gate)
    del gate, up
    q = bench.normal((*x.shape[:2], config.num_attention_heads, config.head_dim))
    batch = bench.batch(tokens)
    norm = _norm_of(config)

    def norm_and_rotate(q: Any, weight: Any) -> Any:
        from models.rope import rotary_tables, rotate

        return rotate(norm(q, weight), *rotary_tables(config, batch["positions"], None))

    weight = bench.normal((config.head_dim,))
    _time_elementwise(bench, "q norm + RoPE", norm_and_rotate, (q, weight), q)


def _product(left: int, right: int) -> Any:
    import jax
    from jax import lax

    return jax.jit(lambda a, b: lax.dot_general(a, b, (((left,), (right,)), ((), ()))))


def _norm_of(config: Any) -> Callable[[Any, Any], Any]:
    from flax import nnx

    from models.layers import RMSNorm

    def norm(x: Any, weight: Any) -> Any:
        module = RMSNorm(weight.shape[0], eps=config.rms_norm_eps)
        module.weight = nnx.Param(weight)
        return module(x)

    return norm


def _time_elementwise(bench: Bench, name: str, function: Any, arguments: Any, dy: Any) -> None:
    import jax

    bench.time(f"{name}: forward", jax.jit(function), arguments)
    backward = jax.jit(lambda dy, *args: jax.vjp(function, *args)[1](dy))
    bench.time(f"{name}: backward with recompute", backward, (dy, *arguments))


def _time_attention(bench: Bench) -> None:
    import jax

    from models.attention import attend

    config, seq = bench.config, bench.args.seq
    rows = max(1, bench.args.tokens // seq)
    q, dy = (bench.normal((rows, seq, config.num_attention_heads, config.head_dim)) for _ in "qd")
    k, v = (bench.normal((rows, seq, config.num_key_value_heads, config.head_dim)) for _ in "kv")

    def attention(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, {}, window=None, implementation=bench.attention)

    pairs = visible_pairs([seq] * rows)
    flops = 4.0 * config.num_attention_heads * config.head_dim * pairs
    bench.time("attention: forward", jax.jit(attention), (q, k, v), flops=flops)
    backward = jax.jit(lambda dy, *qkv: jax.vjp(attention, *qkv)[1](dy))
    name = "attention: backward with recompute"
    bench.time(name, backward, (dy, q, k, v), flops=3.5 * flops)


def section_variants(bench: Bench) -> None:
    """One part exchanged at a time."""
    tokens = bench.args.tokens
    tree = bench.params(bench.model.layers[0])
    batch = bench.batch(tokens)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)

    def one(bench: Bench, name: str, options: dict[str, Any]) -> None:
        params = layer_variants.transposed(tree) if options.get("in_out") else tree
        options = {"attention": bench.attention} | options
        programs = programs_of(bench, layer_variants.layer_fn(bench.config, **options))
        time_layer(bench, f"variant {name}", *programs, (params,), x, dy, batch)

    for name, options in layer_variants.VARIANTS.items():
        bench.attempt(f"variant {name}", one, name, options)

    def without_map(bench: Bench) -> None:
        programs = programs_of(bench, bench.layer_fns[0], mapped=False)
        time_layer(bench, "variant without shard_map", *programs, (tree,), x, dy, batch)

    bench.attempt("without shard_map", without_map)
    time_layer(bench, "ours again (drift)", *our_programs(bench), (tree,), x, dy, batch)


def section_prototype(bench: Bench) -> None:
    """The prototype's layer on random and on constant inputs."""
    shapes = layer_variants.prototype_shapes(bench.config)
    flat = bench.normal((sum(math.prod(shape) for shape in shapes.values()),), 0.02)
    function = layer_variants.prototype_fn(bench.config, attention=bench.attention)
    programs = programs_of(bench, function, mapped=False)
    tokens = bench.args.tokens
    batch = bench.batch(tokens)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)
    time_layer(bench, "prototype, random inputs", *programs, (flat,), x, dy, batch)
    x, dy = x * 0 + 0.5, dy * 0 + 0.5
    time_layer(bench, "prototype, constant inputs", *programs, (flat,), x, dy, batch)


def section_options(bench: Bench) -> None:
    """Our backward under other compiler options."""
    tokens = bench.args.tokens
    trees = (bench.params(bench.model.layers[0]),)
    batch = bench.batch(tokens)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)

    def one(bench: Bench, options: dict[str, Any]) -> None:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        time_layer(bench, text, *our_programs(bench), trees, x, dy, batch, options=options)

    for options in (
        {"xla_gpu_enable_triton_gemm": False},
        {"xla_gpu_enable_cublaslt": False},
        {"xla_gpu_enable_command_buffer": ""},
    ):
        bench.attempt(str(options), one, options)


def section_head(bench: Bench) -> None:
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
            ("x W^T", (rows, table), _product(1, 1)),
            ("dy W", (d_logits, table), _product(1, 0)),
            ("dy^T x", (d_logits, rows), _product(0, 0)),
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


def vocabulary_matrix(params: Any, vocab_size: int) -> Any:
    """The [V, D] matrix among some parameters."""
    import jax

    return next(leaf for leaf in jax.tree.leaves(params) if leaf.shape[0] == vocab_size)


def chunk_layout(stage: Any) -> Any:
    from slidedp_jax.chunk import lay_out

    groups = dict.fromkeys(stage.parameter_names(), 0)
    return lay_out(stage.name or "head", [stage], groups, block_size=16384, num_pieces=12)


def _time_packing(bench: Bench) -> None:
    import jax

    layout = chunk_layout(bench.model.layers[0])
    (part,) = layout.parts
    pieces = tuple(bench.normal((part.piece_size,), 0.02) for _ in range(part.num_pieces))
    gradients = (jax.tree.map(lambda leaf: leaf[None], bench.params(bench.model.layers[0])),)
    jax.block_until_ready(bench.programs.unpack(layout, ((pieces,),)))
    jax.block_until_ready(bench.programs.pack(layout, gradients))
    unpack = bench.programs._unpack[layout.signature]
    pack = bench.programs._pack[layout.signature]
    bench.time("unpack of a layer", unpack, (((pieces,),),))
    bench.time("pack of a layer", pack, (gradients,))


def section_plain_step(bench: Bench) -> None:
    """One jitted value_and_grad over a scan of checkpointed layers against our pipeline."""
    import jax
    import numpy as np

    from slidedp_jax.pipeline import Pipeline
    from slidedp_jax.trace import RecordingTracer
    from slidedp_jax.weight_window import ResidentWeights

    model, depth, tokens = bench.model, bench.args.layers, bench.args.tokens
    batch = bench.batch(tokens)
    trees = [bench.params(model.layers[0]) for _ in range(depth)]
    embed, head = bench.params(model.embed), bench.params(model.head)
    scale = bench.put(np.float32(1.0 / tokens))
    pairs = visible_pairs([bench.args.seq] * (tokens // bench.args.seq))
    projection = vocabulary_matrix(embed, bench.config.vocab_size).size
    flops = depth * sum(layer_flops(bench.config, tokens, pairs)) + 6.0 * tokens * projection

    stages = (model.embed, *([model.layers[0]] * depth), model.head)
    pipeline = Pipeline(
        [chunk_layout(stage) for stage in stages],
        [bench.layer_fns] * depth,
        tied=model.tied,
        programs=bench.programs,
        prefetch_depth=1,
        tracer=RecordingTracer(),
    )
    chunks = {0: (embed,), depth + 1: (head,)} | {n + 1: (t,) for n, t in enumerate(trees)}

    def ours() -> float:
        start = time.perf_counter()
        outputs = pipeline.step(ResidentWeights(chunks), [batch], scale, lambda *_: None)
        jax.block_until_ready((outputs.squares, outputs.losses))
        return (time.perf_counter() - start) * 1e3

    ours()
    samples = [ours() for _ in range(4)]
    ours_ms = statistics.median(samples)
    row = {"name": f"our pipeline, {depth} layers + head, resident", "ms": ours_ms}
    bench.rows.append(row | {"samples_ms": samples, "tflops": flops / ours_ms / 1e9})
    print(format_row(bench.rows[-1]), flush=True)

    stacked = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *trees)
    chunks.clear()
    del trees
    layer = jax.checkpoint(lambda x, params: (bench.layer_fns[0](params, x, batch), None))

    def loss(params: Any) -> Any:
        embed, layers, head = params
        x = model.embed_fn(embed, batch)
        x, _ = jax.lax.scan(layer, x, layers)
        tied = embed if model.tied else None
        return model.head_loss_fn(head, tied, x, batch) / tokens

    params = (embed, stacked, head)
    name = f"plain step, {depth} layers scanned + head"
    plain_ms = bench.time(name, jax.jit(jax.value_and_grad(loss)), (params,), flops=flops)
    bench.note("speed of our pipeline against the plain step", plain_ms / ours_ms)


def section_packed(bench: Bench) -> None:
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

    from models.attention import attend

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


if __name__ == "__main__":
    main()
