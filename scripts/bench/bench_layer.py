"""Time one decoder layer, its parts and variants of it, and the head, on one device.

    python scripts/bench/bench_layer.py --out docs/benchmarks/NAME

Our programs run exactly as in training (`slidedp_jax.step.programs`). Every section is timed on its
own and may fail on its own; sections that no longer fit into --budget-s are named and skipped.
Writes OUT.json with the raw samples, and the kernels of the programs to OUT_hlo.txt.

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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import layer_variants
from device_timing import Bench, format_row
from head_timing import time_head
from layer_timing import (
    chunk_layout,
    layer_flops,
    our_programs,
    product,
    programs_of,
    time_layer,
    visible_pairs,
    vocabulary_matrix,
)
from packed_timing import time_packed

import slidedp_jax


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="named shape (tiny on a CPU)")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--small-tokens", type=int, default=16384, help="for section `small`")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8, help="depth of the plain step")
    parser.add_argument("--burst-s", type=float, default=0.4, help="length of one measurement")
    parser.add_argument("--budget-s", type=float, default=150.0, help="start nothing after this")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    args = parse()
    slidedp_jax.configure(num_devices=1)
    bench = Bench(args, start)
    for name in args.sections:
        print(f"== {name} ({bench.elapsed_s():.0f} s)", flush=True)
        bench.attempt(name, SECTIONS[name])
        bench.save()
    bench.finish()


def time_our_layer(bench: Bench) -> None:
    """Our layer at the large token count, on random and on constant data."""
    tokens = bench.args.tokens
    trees = (bench.params(bench.model.layers[0]),)
    batch = bench.batch(tokens)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)
    time_layer(bench, "ours", *our_programs(bench), trees, x, dy, batch, dump=True)
    x, dy = x * 0 + 0.5, dy * 0 + 0.5
    time_layer(bench, "ours, constant inputs", *our_programs(bench), trees, x, dy, batch)


def time_few_tokens(bench: Bench) -> None:
    """Our layer at the small token count."""
    tokens = bench.args.small_tokens
    trees = (bench.params(bench.model.layers[0]),)
    x, dy = bench.hidden(tokens), bench.hidden(tokens, 0.01)
    batch = bench.batch(tokens)
    time_layer(bench, f"ours, {tokens} tokens", *our_programs(bench), trees, x, dy, batch)


def time_pieces(bench: Bench) -> None:
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
                    ("x W^T", (x, weight), product(1, 1)),
                    ("dy W", (dy, weight), product(1, 0)),
                    ("dy^T x", (dy, x), product(0, 0)),
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
        from slidedp_jax.models.rope import rotary_tables, rotate

        return rotate(norm(q, weight), *rotary_tables(config, batch["positions"], None))

    weight = bench.normal((config.head_dim,))
    _time_elementwise(bench, "q norm + RoPE", norm_and_rotate, (q, weight), q)


def _norm_of(config: Any) -> Callable[[Any, Any], Any]:
    from flax import nnx

    from slidedp_jax.models.dense import RMSNorm

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

    from slidedp_jax.models.attention import attend

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


def time_variants(bench: Bench) -> None:
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


def time_prototype(bench: Bench) -> None:
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


def time_options(bench: Bench) -> None:
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


def time_plain_step(bench: Bench) -> None:
    """One jitted value_and_grad over a scan of checkpointed layers against our pipeline."""
    import jax
    import numpy as np

    from slidedp_jax.step.pipeline import Pipeline
    from slidedp_jax.tracer import StepTracer
    from slidedp_jax.transfer.boundary_store import BoundaryStore
    from slidedp_jax.transfer.device_map import DeviceMap
    from slidedp_jax.transfer.weight_window import ResidentWeights

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
        boundaries=BoundaryStore(
            DeviceMap(bench.mesh, bench.dtype),
            range(0),
            slot_bytes=0,
            tracer=StepTracer(keep=True),
        ),
        prefetch_depth=1,
        make_room=lambda: None,  # nothing leaves
        tracer=StepTracer(keep=True),
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
        return model.head_loss(bench.loss_chunk_tokens)(head, tied, x, batch) / tokens

    params = (embed, stacked, head)
    name = f"plain step, {depth} layers scanned + head"
    plain_ms = bench.time(name, jax.jit(jax.value_and_grad(loss)), (params,), flops=flops)
    bench.note("speed of our pipeline against the plain step", plain_ms / ours_ms)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "layer": time_our_layer,
    "pieces": time_pieces,
    "small": time_few_tokens,
    "head": time_head,
    "plain_step": time_plain_step,
    "prototype": time_prototype,
    "packed": time_packed,
    "variants": time_variants,
    "options": time_options,
}
"""In the order in which they run."""


if __name__ == "__main__":
    main()
