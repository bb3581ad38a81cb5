"""Time every exact causal attention that JAX offers here, side by side.

    python scripts/bench/bench_attention.py --out docs/benchmarks/NAME

Ours (`models.attention`), `jax.nn.dot_product_attention`, the Pallas kernels that come with JAX,
and Tokamax where it is installed; grouped queries, bf16, one document per row. Each is compared
with the portable kernel in float32. What cannot run here says why. Writes OUT.json after each.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record

import slidedp_jax

Attention = Callable[[Any, Any, Any], Any]
"""q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--budget-s", type=float, default=240, help="start nothing after this")
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json")
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    args = parse()
    slidedp_jax.configure(num_devices=1)
    arrays = random_arrays(args)
    expected = reference(arrays)
    record = bench_record.record(shape=vars(args) | {"out": None}, results=[])
    for name, attention in variants(args).items():
        result: dict[str, Any] = {"name": name}
        if time.perf_counter() - start > args.budget_s:
            result["error"] = "out of time"
        else:
            try:
                result |= measure(attention, arrays, expected, args.repeats)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        record["results"].append(result)
        bench_record.save(args.out, record)
        print(line(args, result), flush=True)


def random_arrays(args: argparse.Namespace) -> list[Any]:
    """The output's gradient, q, k and v, in bf16."""
    import jax
    import jax.numpy as jnp

    heads = (args.heads, args.heads, args.kv_heads, args.kv_heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    return [
        jax.random.normal(key, (args.rows, args.seq, count, args.head_dim), jnp.bfloat16)
        for key, count in zip(keys, heads, strict=True)
    ]


def variants(args: argparse.Namespace) -> dict[str, Attention]:
    """By name; imports that fail are left to the call, so that the table says why."""
    import jax
    import jax.numpy as jnp

    def ours(implementation: str) -> Attention:
        from slidedp_jax.models.attention import attend

        return lambda q, k, v: attend(q, k, v, {}, window=None, implementation=implementation)

    def of_jax_nn(implementation: Literal["xla", "cudnn"]) -> Attention:
        return lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )

    def tokamax(implementation: str) -> Attention:
        def run(q: Any, k: Any, v: Any) -> Any:
            import tokamax

            return tokamax.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )

        return run

    def pallas_triton(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention

        k, v = (jnp.repeat(array, args.heads // args.kv_heads, axis=2) for array in (k, v))
        return attention.mha(q, k, v, None, sm_scale=args.head_dim**-0.5, causal=True)

    def pallas_mosaic(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
        blocks: Any = dict.fromkeys(names, 64)
        config = attention_mgpu.TuningConfig(
            block_q=64, block_kv=128, max_concurrent_steps=2, causal=True, **blocks
        )
        # It does not scale the scores; its scratch memory is float16 whatever it is given.
        q, k, v = (array.astype(jnp.float16) for array in (q * args.head_dim**-0.5, k, v))
        return attention_mgpu.attention(q, k, v, config).astype(jnp.bfloat16)

    return {
        "ours, cudnn": ours("cudnn"),
        "jax.nn, cudnn": of_jax_nn("cudnn"),
        "tokamax, mosaic": tokamax("mosaic"),
        "tokamax, triton": tokamax("triton"),
        "tokamax, cudnn": tokamax("cudnn"),
        "pallas, mosaic, fp16": pallas_mosaic,
        "pallas, triton": pallas_triton,
        "tokamax, xla_chunked": tokamax("xla_chunked"),
        "ours, chunked": ours("chunked"),
        "jax.nn, xla": of_jax_nn("xla"),
    }


def both(attention: Attention) -> Callable[..., Any]:
    """(dy, q, k, v) -> (out, dq, dk, dv)."""
    import jax

    def run(dy: Any, *qkv: Any) -> Any:
        out, pullback = jax.vjp(attention, *qkv)
        return out, *pullback(dy)

    return run


def reference(arrays: list[Any]) -> list[Any]:
    """The first row through the portable kernel in float32."""
    import jax
    import jax.numpy as jnp

    from slidedp_jax.models.attention import attend

    wide = [array[:1].astype(jnp.float32) for array in arrays]
    with jax.default_matmul_precision("highest"):
        program = jax.jit(
            both(lambda q, k, v: attend(q, k, v, {}, window=None, implementation="chunked"))
        )
        results: list[Any] = program(*wide)
    return results


def measure(
    attention: Attention, arrays: list[Any], expected: list[Any], repeats: int
) -> dict[str, Any]:
    """Milliseconds of forward and of forward and backward, and relative errors of the first row."""
    import jax
    import jax.numpy as jnp

    forward, whole = jax.jit(attention), jax.jit(both(attention))
    errors = {
        name: float(jnp.linalg.norm(got[:1].astype(jnp.float32) - want) / jnp.linalg.norm(want))
        for name, got, want in zip(("out", "dq", "dk", "dv"), whole(*arrays), expected, strict=True)
    }
    return {
        "errors": errors,
        "forward_ms": timed(lambda: forward(*arrays[1:]), repeats),
        "forward_backward_ms": timed(lambda: whole(*arrays), repeats),
    }


def timed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of single runs after two that warm up."""
    import jax

    samples = []
    for number in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        if number >= 2:
            samples.append((time.perf_counter() - start) * 1e3)
    return samples


def line(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """A row: medians, and TFLOP/s over visible pairs (forward 4, both 14 N H per pair)."""
    if "error" in result:
        return f"{result['name']:24}{result['error']}"
    pairs = args.rows * args.seq * (args.seq + 1) / 2 * args.heads * args.head_dim
    forward, whole = (
        statistics.median(result[name]) for name in ("forward_ms", "forward_backward_ms")
    )
    worst = max(result["errors"].values())
    return (
        f"{result['name']:24}forward {forward:8.2f} ms {4e-9 * pairs / forward:6.0f} TFLOP/s   "
        f"both {whole:8.2f} ms {14e-9 * pairs / whole:6.0f} TFLOP/s   largest error {worst:.4f}"
    )


if __name__ == "__main__":
    main()
