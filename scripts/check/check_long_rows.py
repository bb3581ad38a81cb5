"""Does every part of a step compute long rows right, where arrays pass 2^31 elements?

    python scripts/check/check_long_rows.py [--only NAME ...] [--shrink N] [--record NAME]

Each case runs what training runs, in bfloat16 unless it says float32, and compares with plain
formulas in float32: all gradients of weights, and of tokens those at the ends of the row, around
element 2^31 and at random places. Attention's references are exact over the whole row, for one
key-value head. Prints one line per case and exits with 1 if one is off. On an H200 all of it takes
about ten minutes. `--shrink N` divides the tokens of all rows, to try the script elsewhere.

Letters: T tokens, D hidden, V vocabulary, F feed-forward, N query heads, K key-value heads, H head
dim, M documents.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import bench_record
import numpy as np

TOLERANCES = {"bfloat16": 1e-2, "float32": 2e-5}
"""Relative error in norm. bfloat16 keeps 8 bits; float32 sums of a million terms lose some."""

QUERIES_AT_ONCE = 1024


def main() -> int:
    """Run the cases, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shrink", type=int, default=1, help="divides the tokens of rows")
    parser.add_argument("--record", type=pathlib.Path, help="writes RECORD.json")
    args = parser.parse_args()

    import slidedp_jax

    slidedp_jax.configure(pinned_limit_gib=24)
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    record = bench_record.record(("jax", "jaxlib"), results=[])
    for name in args.only:
        start = time.perf_counter()
        found = CASES[name](args.shrink)
        dtype = "float32" if "float32" in name else "bfloat16"
        worst = max(found.errors.values(), default=0.0)
        result = {
            "case": name,
            "shapes": found.shapes,
            "elements_over_2^31": found.elements / 2**31,
            "errors": found.errors,
            "right": bool(worst <= TOLERANCES[dtype]),
            "seconds": time.perf_counter() - start,
        }
        record["results"].append(result)
        bench_record.save(args.record, record)
        print(json.dumps(result), flush=True)
        jax.clear_caches()
    return int(not all(result["right"] for result in record["results"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Of one case: what was computed on, elements of its largest array, and relative errors."""

    shapes: str
    elements: int
    errors: dict[str, float]


def embedding(shrink: int) -> Found:
    """The lookup of a row and the gradient of its table."""
    import jax
    import jax.numpy as jnp

    from slidedp_jax.models.layers import _look_up

    tokens, width, vocabulary = 1_048_576 // shrink, 2560, 20_000
    table = draw((vocabulary, width), 0)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, vocabulary, tokens), jnp.int32)
    dy = draw((tokens, width), 2)
    rows, pullback = jax.vjp(lambda table: _look_up(table, ids), table)
    d_table = jax.jit(lambda dy: pullback(dy)[0])(dy)
    places = checked_tokens(tokens, width)
    wanted = [0, 1, vocabulary - 1, int(ids[-1])]
    expected = [
        blockwise(lambda i, d, own=own: jnp.sum(jnp.where((i == own)[:, None], d, 0), 0), ids, dy)
        for own in wanted
    ]
    return Found(
        shapes=f"T {tokens}, D {width}",
        elements=tokens * width,
        errors={
            "rows": error(rows[places], table[ids[places]]),
            "d_table": error(d_table[jnp.asarray(wanted)], jnp.stack(expected)),
        },
    )


def norm(shrink: int, dtype: str = "bfloat16") -> Found:
    """RMSNorm of a row, and its gradients."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from slidedp_jax.models.dense import RMSNorm

    tokens, width = 1_048_576 // shrink // (2 if dtype == "float32" else 1), 4096
    graph, _ = nnx.split(nnx.eval_shape(lambda: RMSNorm(width, eps=1e-6)))
    x, dy = draw((1, tokens, width), 0, dtype), draw((1, tokens, width), 1, dtype)
    weight = 1 + 0.1 * draw((width,), 2, dtype)

    def ours(weight: Any, x: Any) -> Any:
        return nnx.merge(graph, {"weight": weight})(x)

    def plain(weight: Any, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return wide * scale * weight.astype(jnp.float32)

    y, (d_weight, dx) = value_and_pullback(ours, dy, weight, x)
    places = checked_tokens(tokens, width)

    def some(x: Any, dy: Any) -> Any:
        return jax.vjp(plain, weight, x)[1](dy.astype(jnp.float32))[0].astype(jnp.float32)

    expected_y, pullback = jax.vjp(lambda x: plain(weight, x), x[:, places])
    return Found(
        shapes=f"T {tokens}, D {width}",
        elements=tokens * width,
        errors={
            "y": error(y[:, places], expected_y),
            "dx": error(dx[:, places], pullback(dy[:, places].astype(jnp.float32))[0]),
            "d_weight": error(d_weight, blockwise(some, x[0], dy[0])),
        },
    )


def mlp(shrink: int, dtype: str = "bfloat16", block: int = 0) -> Found:
    """The MLP of a row, whole or in blocks of tokens, and its gradients."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from slidedp_jax.models.config import named_config
    from slidedp_jax.models.dense import MLP
    from slidedp_jax.models.token_blocks import in_blocks

    config = named_config("qwen3-4b")
    tokens = 262_144 // shrink
    if dtype == "float32":
        tokens = 229_376 // shrink
    hidden, ffn = config.hidden_size, config.intermediate_size
    graph, state = nnx.split(nnx.eval_shape(lambda: MLP(config, config.intermediate_size)))
    shapes = nnx.to_pure_dict(state)
    params = jax.tree.map(lambda leaf: 0.02 * draw(leaf.shape, leaf.shape[0], dtype), shapes)
    x, dy = draw((1, tokens, hidden), 0, dtype), draw((1, tokens, hidden), 1, dtype)

    def whole(params: Any, x: Any) -> Any:
        return nnx.merge(graph, params)(x)

    def blocks(params: Any, x: Any) -> Any:
        return in_blocks(lambda p, a, _: (whole(p, a[0]),), block // shrink or 1, params, (x,))[0]

    def plain(params: Any, x: Any) -> Any:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        x = x.astype(jnp.float32)
        gate, up = (x @ wide[name]["weight"].T for name in ("gate_proj", "up_proj"))
        return (jax.nn.silu(gate) * up) @ wide["down_proj"]["weight"].T

    y, (d_params, dx) = value_and_pullback(blocks if block else whole, dy, params, x)
    places = checked_tokens(tokens, ffn)
    expected_y, pullback = jax.vjp(lambda x: plain(params, x), x[:, places])

    def some(x: Any, dy: Any) -> Any:
        gradients = jax.vjp(lambda p: plain(p, x), params)[1](dy.astype(jnp.float32))[0]
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)

    expected = blockwise(some, x[0], dy[0])
    errors = {
        "y": error(y[:, places], expected_y),
        "dx": error(dx[:, places], pullback(dy[:, places].astype(jnp.float32))[0]),
    }
    for name, leaf in d_params.items():
        errors[f"d_{name}"] = error(leaf["weight"], expected[name]["weight"])
    return Found(shapes=f"T {tokens}, F {ffn}", elements=tokens * ffn, errors=errors)


def head(shrink: int, slices: int = 0) -> Found:
    """Cross-entropy of a row, in one pass or in two over slices, and its gradients."""
    import jax
    import jax.numpy as jnp

    from slidedp_jax.models.loss import cross_entropy_sum

    tokens, width, vocabulary = 524_288 // shrink, 5120, 16_384
    x, weight = draw((tokens, width), 0), 0.02 * draw((vocabulary, width), 1)
    rng = np.random.default_rng(2)
    targets = jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32).at[::7].set(-100)
    scale = 1 / tokens
    if slices:
        loss, dx, d_weight = in_two_passes(x, weight, targets, scale, slices)
    else:
        loss, (dx, d_weight) = jax.jit(
            jax.value_and_grad(
                lambda x, w: scale * cross_entropy_sum(x, w, targets, chunk_tokens=4096), (0, 1)
            )
        )(x, weight)

    def plain(x: Any, weight: Any, targets: Any) -> Any:
        logits = x.astype(jnp.float32) @ weight.astype(jnp.float32).T
        own = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(own, jnp.where(targets < 0, 0, targets)[:, None], axis=1)
        return -scale * jnp.sum(jnp.where(targets == -100, 0.0, picked[:, 0]))

    def some(x: Any, targets: Any) -> Any:
        value, gradient = jax.value_and_grad(plain, 1)(x, weight.astype(jnp.float32), targets)
        return value, gradient

    expected, expected_d_weight = blockwise(some, x, targets)
    places = checked_tokens(tokens, width)
    wide = x[places].astype(jnp.float32)
    expected_dx = jax.grad(plain)(wide, weight, targets[places])
    return Found(
        shapes=f"T {tokens}, D {width}, V {vocabulary}",
        elements=tokens * width,
        errors={
            "loss": error(loss, expected),
            "dx": error(dx[places], expected_dx),
            "d_weight": error(d_weight, expected_d_weight),
        },
    )


def in_two_passes(x: Any, weight: Any, targets: Any, scale: float, slices: int) -> Any:
    """Loss and gradients as `step/sliced_head.py` has them computed."""
    import jax
    import jax.numpy as jnp

    from slidedp_jax.models import sliced_loss

    size = weight.shape[0] // slices
    options = {
        "vocab_size": weight.shape[0],
        "hidden_fn": lambda x: x,
        "block_tokens": 4096,
    }
    add = jax.jit(functools.partial(sliced_loss.add_to_statistics, **options), donate_argnums=0)
    gradients = jax.jit(
        functools.partial(sliced_loss.slice_gradients, **options), donate_argnums=(0, 1)
    )
    statistics = sliced_loss.no_statistics(x.shape[0])
    for first in range(0, weight.shape[0], size):
        statistics = add(statistics, weight[first : first + size], jnp.int32(first), x, targets)
    loss = -scale * jnp.sum(sliced_loss.log_probabilities(statistics, targets))
    log_sums = sliced_loss.log_sums(statistics)
    coefficients = jnp.where(targets == -100, 0.0, -scale).astype(jnp.float32)
    dx, d_weight = jnp.zeros(x.shape, jnp.float32), []
    for first in range(0, weight.shape[0], size):
        rows = weight[first : first + size]
        d_rows = jnp.zeros(rows.shape, jnp.float32)
        dx, d_rows = gradients(
            dx, d_rows, rows, jnp.int32(first), x, targets, log_sums, coefficients
        )
        d_weight.append(d_rows)
    return loss, dx, jnp.concatenate(d_weight)


def attention(
    shrink: int,
    *,
    tokens: int,
    heads: tuple[int, int, int] = (32, 8, 128),
    window: int | None = None,
    documents: int = 0,
    dtype: str = "bfloat16",
) -> Found:
    """What a layer attends to and its gradients, by the kernel that training takes."""
    import jax
    import jax.numpy as jnp

    from slidedp_jax.models.attention import attend, device_target, resolve_attention, row_layout

    tokens //= shrink
    num_queries, num_keys, width = heads
    window = window and max(4, window // shrink)
    q = draw((1, tokens, num_queries, width), 0, dtype)
    k, v = (draw((1, tokens, num_keys, width), seed, dtype) for seed in (1, 2))
    dy = draw((1, tokens, num_queries, width), 3, dtype)
    starts = np.zeros(1, np.int64)
    batch: dict[str, Any] = {}
    if documents:
        ends = np.linspace(0, tokens - 5, documents + 1).astype(np.int64)[1:]
        starts = np.concatenate([[0], ends[:-1]])
        segments = np.searchsorted(ends, np.arange(tokens), side="right") + 1
        batch = {
            "segment_ids": jnp.asarray(np.where(segments > documents, 0, segments)[None], np.int32),
            "document_starts": jnp.asarray(np.append(starts, ends[-1])[None], jnp.int32),
            "document_lengths": jnp.asarray((ends - starts)[None], jnp.int32),
        }
    choice = resolve_attention(
        "auto",
        target=device_target(jax.devices()[0]),
        dtype=q.dtype,
        head_dim=width,
        rows=row_layout(batch),
    )

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, batch, window=window, implementation=choice.name)

    out, (dq, dk, dv) = value_and_pullback(ours, dy, q, k, v)
    group = num_queries // num_keys
    key_head = num_keys - 1
    mine = slice(key_head * group, (key_head + 1) * group)
    segments = batch.get("segment_ids", jnp.ones((1, tokens), jnp.int32))[0]
    expected = plain_attention(
        q[0, :, mine], k[0, :, key_head], v[0, :, key_head], dy[0, :, mine], segments, window
    )
    del q, k, v, dy
    got = out[0, :, mine], dq[0, :, mine], dk[0, :, key_head], dv[0, :, key_head]
    names = ("out", "dq", "dk", "dv")
    arrays = max(1, documents) if choice.name == "cudnn" else 1  # fp32 arrays by document
    return Found(
        shapes=f"{choice.name}: T {tokens}, N {num_queries}, K {num_keys}, H {width}, "
        f"M {documents}, window {window}",
        elements=tokens * num_queries * width * arrays,
        errors={name: error(*pair) for name, *pair in zip(names, got, expected, strict=True)},
    )


def plain_attention(q: Any, k: Any, v: Any, dy: Any, segments: Any, window: int | None) -> Any:
    """Exact attention of some query heads to one key-value head in float32, queries in blocks.

    Args:
      q: [T, G, H].
      k: [T, H].
      v: [T, H].
      dy: [T, G, H].
      segments: [T], 0 is padding.
      window: tokens that a query sees.

    Returns:
      The output and the gradients of q, k and v, float32.
    """
    import jax
    import jax.numpy as jnp

    tokens, group, width = q.shape
    size = min(QUERIES_AT_ONCE, tokens)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    keys = jnp.arange(tokens)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def block(d_k: Any, d_v: Any, q: Any, dy: Any, places: Any) -> Any:
        near = keys[None] <= places[:, None]
        if window is not None:
            near &= keys[None] > places[:, None] - window
        own = segments[places]
        seen = near & (segments[None] == own[:, None]) & (own > 0)[:, None]
        scores = jnp.where(seen, (q @ k.T) * width**-0.5, -jnp.inf)
        highest = jnp.maximum(scores.max(axis=1, keepdims=True), -1e30)
        weights = jnp.exp(scores - highest)
        weights /= jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
        out = weights @ v
        d_weights = dy @ v.T
        d_scores = weights * (d_weights - jnp.sum(d_weights * weights, axis=1, keepdims=True))
        d_scores *= width**-0.5
        return d_k + d_scores.T @ q, d_v + weights.T @ dy, out, d_scores @ k

    d_k, d_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    outs, d_qs = [], []
    for head in range(group):
        rows: list[tuple[Any, Any]] = []
        for first in range(0, tokens, size):
            places = jnp.arange(first, min(first + size, tokens))
            own, d_own = (array[places, head].astype(jnp.float32) for array in (q, dy))
            d_k, d_v, out, d_q = block(d_k, d_v, own, d_own, places)
            rows.append((out, d_q))
        outs.append(jnp.concatenate([out for out, _ in rows]))
        d_qs.append(jnp.concatenate([d_q for _, d_q in rows]))
    return jnp.stack(outs, axis=1), jnp.stack(d_qs, axis=1), d_k, d_v


def boundary(shrink: int) -> Found:
    """What passes between layers, to page-locked host memory and back: every bit."""
    import jax
    import jax.numpy as jnp

    from slidedp_jax.tracer import Tracer
    from slidedp_jax.transfer.boundary_store import BoundaryStore
    from slidedp_jax.transfer.device_map import DeviceMap

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    tokens, width = 1_048_576 // shrink, 2560
    x = draw((1, tokens, width), 0)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    store = BoundaryStore(
        DeviceMap(mesh, jnp.bfloat16), range(1, 2), slot_bytes=x.nbytes, tracer=Tracer()
    )
    store.put(1, [jax.device_put(x, rows)])
    (back,) = store.take(1)
    differing = int(jnp.sum(back != x))
    return Found(
        shapes=f"T {tokens}, D {width}", elements=x.size, errors={"differing": float(differing)}
    )


def draw(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> Any:
    """Normal numbers, made on the device."""
    import jax

    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return make(jax.random.key(seed), shape, dtype)


def value_and_pullback(function: Callable[..., Any], dy: Any, *arguments: Any) -> Any:
    """The value, and the gradients for a cotangent `dy`, in one program."""
    import jax

    @jax.jit
    def run(dy: Any, *arguments: Any) -> Any:
        y, pullback = jax.vjp(function, *arguments)
        return y, pullback(dy.astype(y.dtype))

    return jax.block_until_ready(run(dy, *arguments))


def blockwise(function: Callable[..., Any], *arrays: Any) -> Any:
    """The sum of `function` over blocks of tokens, arrays [T, ...]."""
    import jax
    import jax.numpy as jnp

    run, total = jax.jit(function), None
    for first in range(0, arrays[0].shape[0], 4096):
        part = run(*(array[first : first + 4096] for array in arrays))
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    return total


def checked_tokens(tokens: int, width: int) -> Any:
    """Tokens at the ends, around element 2^31, and at random."""
    import jax.numpy as jnp

    middle = min(2**31 // width, tokens - 1)
    near = [middle - 1, middle, middle + 1]
    random = np.random.default_rng(0).integers(0, tokens, 64)
    places = [0, 1, tokens - 2, tokens - 1, *near, *random]
    return jnp.asarray(sorted({int(np.clip(place, 0, tokens - 1)) for place in places}))


def error(got: Any, expected: Any) -> float:
    """Relative, in norm."""
    import jax.numpy as jnp

    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    norm = jnp.linalg.norm(expected.reshape(-1))
    return float(jnp.linalg.norm((got - expected).reshape(-1)) / norm)


CASES: dict[str, Callable[[int], Found]] = {
    "embedding": embedding,
    "norm": norm,
    "norm-float32": functools.partial(norm, dtype="float32"),
    "mlp": mlp,
    "mlp-in-blocks": functools.partial(mlp, block=8192),
    "mlp-float32": functools.partial(mlp, dtype="float32", block=8192),
    "head": head,
    "head-in-slices": functools.partial(head, slices=4),
    "boundary": boundary,
    "attention": functools.partial(attention, tokens=524_288),
    "attention-window": functools.partial(attention, tokens=524_288, window=4096),
    "attention-packed": functools.partial(attention, tokens=131_072, documents=5),
    "attention-packed-window": functools.partial(
        attention, tokens=131_072, documents=5, window=4096
    ),
    "attention-float32": functools.partial(
        attention, tokens=131_072, heads=(128, 8, 128), window=4096, dtype="float32"
    ),
}


if __name__ == "__main__":
    sys.exit(main())
