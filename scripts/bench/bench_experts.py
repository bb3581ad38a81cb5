"""Time every realisation of experts' products that can run here, each checked against plain ones.

    python scripts/bench/bench_experts.py --models olmoe-1b-7b,qwen3-30b-a3b --out OUT

Per model, array of experts' matrices and product (forward, by the rows, by the weights): rows in
groups of uneven size, as routers make them, padding included in the time and not in the operations.
Results of some experts are compared with products of their own rows in float32. Every realisation
runs in a process of its own, `ragged_dot` under the flag that it needs, so one that ends its
process costs no other. Then the whole block of experts, forward and backward, with one realisation
each. Writes OUT.json after each result; `scripts/make/make_product_table.py` makes the table of it
by which kernels are chosen.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import bench_record

from slidedp_jax.jax_internals import RAGGED_DOT_FUSION
from slidedp_jax.models.config import named_config
from slidedp_jax.models.product_forms import FORMS, PRODUCTS, Forms

CHECKED_EXPERTS = 3
"""Busiest, median and least visited."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="olmoe-1b-7b,qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a microbatch")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--blocks", default="", help="of portable, also; 256,512,1024")
    parser.add_argument("--skew", type=float, default=0.5, help="of the logarithm of group sizes")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds-per-form", type=float, default=200)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--out", type=pathlib.Path, help="writes OUT.json")
    parser.add_argument("--one-form", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.one_form:
        of_one_form(args)
        return
    record = bench_record.record(shape=vars(args) | {"out": None}, results=[])
    for form in args.forms.split(","):
        for result in in_own_process(args, form):
            record["results"].append(result)
            bench_record.save(args.out, record)
            print(line(result), flush=True)


def in_own_process(args: argparse.Namespace, form: str) -> Iterator[dict[str, Any]]:
    """Results of one realisation, those from before its process ended or was ended included."""
    flags = [os.environ.get("XLA_FLAGS", ""), RAGGED_DOT_FUSION if form == "ragged_dot" else ""]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "results.jsonl"
        command = [sys.executable, *sys.argv, "--one-form", form, "--out", str(out)]
        environment = os.environ | {"XLA_FLAGS": " ".join(flags).strip()}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                timeout=args.seconds_per_form,
            )
            end = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            end = ["out of time"]
        if out.exists():
            yield from map(json.loads, out.read_text().splitlines())
        for text in end:
            yield {"form": form, "error": text[:300]}


def of_one_form(args: argparse.Namespace) -> None:
    """All measurements of one realisation, a JSON object per line."""
    import slidedp_jax

    slidedp_jax.configure(platform=args.platform, num_devices=1)
    with args.out.open("a") as stream:
        for result in measurements(args):
            stream.write(json.dumps(result) + "\n")
            stream.flush()


def measurements(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Per model, array and product; then the whole block."""
    from slidedp_jax.models.expert_groups import block_rows

    for model in args.models.split(","):
        config = named_config(model)
        shapes = {
            name: shape
            for name, shape in config.layer_shapes(len(config.layer_kinds) - 1).items()
            if len(shape) == 3
        }
        visits = args.tokens * config.num_experts_per_tok
        blocks = [block_rows(visits, config.num_experts)] if args.one_form == "portable" else [1]
        if args.one_form == "portable" and args.blocks:
            blocks += map(int, args.blocks.split(","))
        for block in dict.fromkeys(blocks):
            head = {"model": model, "form": args.one_form, "block": block, "tokens": args.tokens}
            for name, shape in shapes.items():
                yield from of_array(args, head | {"array": name}, shape, visits, block)
        yield from of_block(args, {"model": model, "form": args.one_form, "tokens": args.tokens})


def of_array(
    args: argparse.Namespace, head: dict[str, Any], shape: tuple[int, ...], visits: int, block: int
) -> Iterator[dict[str, Any]]:
    """The three products with one array of matrices [E, N, K]."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from slidedp_jax.jax_internals import temporary_bytes
    from slidedp_jax.models.expert_groups import num_rows
    from slidedp_jax.models.grouped_products import row_products, weight_gradient

    experts, columns_out, columns_in = shape
    counts = group_sizes(visits, experts, args.skew)
    rows = num_rows(visits, experts, block)
    padded = -(-counts // block) * block
    sizes = padded.copy()
    sizes[-1] += rows - padded.sum()
    starts = np.cumsum(padded) - padded
    is_row = np.zeros(rows, bool)
    for start, count in zip(starts, counts, strict=True):
        is_row[start : start + count] = True
    keys = jax.random.split(jax.random.key(0), 3)
    mask = jnp.asarray(is_row)[:, None]
    x = jax.random.normal(keys[0], (rows, columns_in), jnp.bfloat16) * mask
    dy = jax.random.normal(keys[1], (rows, columns_out), jnp.bfloat16) * mask
    w = jax.random.normal(keys[2], shape, jnp.bfloat16)
    on_device = jnp.asarray(sizes, jnp.int32)
    form, checked = args.one_form, np.argsort(-counts)[[0, experts // 2, -1][:CHECKED_EXPERTS]]

    def own(array: Any, expert: int) -> Any:
        return array[starts[expert] : starts[expert] + counts[expert]].astype(jnp.float32)

    def plain(product: str, expert: int) -> Any:
        matrix = w[expert].astype(jnp.float32)
        if product == "forward":
            return own(x, expert) @ matrix.T
        return (
            own(dy, expert) @ matrix if product == "dgrad" else own(dy, expert).T @ own(x, expert)
        )

    def found(product: str, result: Any, expert: int) -> Any:
        return result[expert].astype(jnp.float32) if product == "wgrad" else own(result, expert)

    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (lambda a, b, s: row_products(form, a, b, s, block, 2), (x, w, on_device)),
        "dgrad": (lambda a, b, s: row_products(form, a, b, s, block, 1), (dy, w, on_device)),
        "wgrad": (lambda a, b, s: weight_gradient(form, a, b, s, block), (x, dy, on_device)),
    }
    for product in PRODUCTS:
        function, arguments = programs[product]
        result = head | {"product": product, "experts": experts, "rows": visits}
        result |= {"columns": [columns_out, columns_in], "padded_rows": rows}
        result["largest_group"] = int(counts.max())
        try:
            program = jax.jit(function)
            y = program(*arguments)
            with jax.default_matmul_precision("highest"):
                result["errors"] = [
                    relative_error(found(product, y, e), plain(product, e)) for e in checked
                ]
            result["ms"] = timed(functools.partial(program, *arguments), args.repeats)
            result["temp_bytes"] = temporary_bytes(program.lower(*arguments).compile())
        except Exception as error:  # a form may fail in any way; the others are still timed
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        yield result


def of_block(args: argparse.Namespace, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Router, sorting and experts of a layer, forward and backward, as a layer runs them."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from slidedp_jax.jax_internals import temporary_bytes
    from slidedp_jax.models.experts import SparseMLP

    config = named_config(head["model"])
    graph, state = nnx.split(nnx.eval_shape(lambda: SparseMLP(config)))
    shapes = nnx.to_pure_dict(state)
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves) + 2)
    params = jax.tree.unflatten(
        structure,
        [
            0.02 * jax.random.normal(key, leaf.shape, jnp.bfloat16)
            for key, leaf in zip(keys, leaves, strict=False)
        ],
    )
    x, dy = (
        jax.random.normal(key, (1, args.tokens, config.hidden_size), jnp.bfloat16)
        for key in keys[-2:]
    )
    forms = Forms(*[args.one_form] * 3)

    def block(params: Any, x: Any) -> Any:
        return nnx.merge(graph, params)(x, lambda **_: forms)[0]

    def both(params: Any, x: Any, dy: Any) -> Any:
        return jax.vjp(block, params, x)[1](dy)

    grouped = 3 * config.num_experts_per_tok * config.moe_intermediate_size * config.hidden_size
    for name, times, function, arguments in (
        ("block forward", 1, block, (params, x)),
        ("block forward and backward", 3, both, (params, x, dy)),
    ):
        result = head | {"product": name, "grouped_flops": 2.0 * times * grouped * args.tokens}
        try:
            program = jax.jit(function)
            jax.block_until_ready(program(*arguments))
            result["ms"] = timed(functools.partial(program, *arguments), args.repeats)
            result["temp_bytes"] = temporary_bytes(program.lower(*arguments).compile())
        except Exception as error:  # a form may fail in any way; the others are still timed
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        yield result


def group_sizes(visits: int, experts: int, skew: float) -> Any:
    """Uneven sizes that add up to the visits."""
    import numpy as np

    rng = np.random.default_rng(0)
    shares = np.exp(skew * rng.standard_normal(experts))
    return rng.multinomial(visits, shares / shares.sum())


def relative_error(found: Any, expected: Any) -> float:
    """Norm of the difference over that of what is expected."""
    import jax.numpy as jnp

    size = float(jnp.linalg.norm(expected))
    return float(jnp.linalg.norm(found - expected)) / size if size else 0.0


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


def tflop_per_s(result: dict[str, Any]) -> float:
    """Operations of the visits, padding not counted, over the median time."""
    flops = result.get("grouped_flops") or 2.0 * result["rows"] * math.prod(result["columns"])
    return float(flops / statistics.median(result["ms"]) / 1e9)


def line(result: dict[str, Any]) -> str:
    """A row of the table."""
    words = (result.get(name) for name in ("model", "form", "block", "array", "product"))
    head = "  ".join(str(word) for word in words if word is not None)
    if "error" in result:
        return f"{head}: {result['error']}"
    worst = f", largest error {max(result['errors']):.4f}" if "errors" in result else ""
    ms = statistics.median(result["ms"])
    return f"{head}: {ms:.2f} ms, {tflop_per_s(result):.0f} TFLOP/s{worst}"


if __name__ == "__main__":
    main()
