"""Trains google-tunix's Qwen3, as its authors wrote it, on the text of Python's own help topics.

    python scripts/train_tunix_qwen3.py                                   # tiny, on any machine
    python scripts/train_tunix_qwen3.py --shape 0.6b --tokens 1024 --rows 32 --compare --json F
    python scripts/train_tunix_qwen3.py --shape 1.7b --remat block --tokens 1024 --rows 32 --compare

Needs google-tunix: `pip install --no-deps -r scripts/tunix_requirements.txt`.
Tokens are the bytes of the text. With --compare the same process also times, on the same rows and
the same number of tokens, this project's own decoder of the same shape and plain JAX with optax on
the same tunix module with everything on the device (fp32 masters, bf16 compute). What that loop
recomputes is tunix's own `remat_config` if --remat gives one, else each whole layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench import bench_record
from flax import nnx

import slidedp_jax
from slidedp_jax.adapter.workload import measured_workload
from slidedp_jax.models import decoder
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.loss import cross_entropy_sum
from slidedp_jax.models.rope_parameters import RopeParameters
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.this_machine import plan_for

warnings.filterwarnings("ignore", category=DeprecationWarning)  # tunix's own

LEARNING_RATE = 1e-4
LOSS_CHUNK = 2048
TINY = {
    "num_layers": 2,
    "vocab_size": 512,
    "embed_dim": 64,
    "hidden_dim": 128,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 1_000_000,
    "norm_eps": 1e-6,
    "use_tied_embedding": True,
}


def main() -> None:
    args = _arguments()
    slidedp_jax.configure(num_devices=args.devices)
    from tunix.models.qwen3 import model as qwen3

    shapes = {
        "tiny": lambda: qwen3.ModelConfig(**TINY),
        "0.6b": qwen3.ModelConfig.qwen3_0p6b,
        "1.7b": qwen3.ModelConfig.qwen3_1p7b,
    }
    config = shapes[args.shape]()
    config.dtype = jnp.bfloat16
    config.remat_config = getattr(qwen3.RematConfig, args.remat.upper())
    report = bench_record.record(
        ("jax", "flax", "optax", "google-tunix"),
        shape=args.shape,
        rows=args.rows,
        tokens_per_row=args.tokens,
        remat=args.remat,
        device=jax.devices()[0].device_kind,
    )
    with jax.default_device(jax.devices("cpu")[0]):
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    runs: dict[str, Callable[[], dict[str, Any]]] = {"adapted": lambda: _adapted(model, args)}
    if args.compare:  # the resident run first: it starts from the same weights
        runs = {"resident": lambda: _resident(model, args), **runs}
        runs["own_decoder"] = lambda: _own_decoder(config, args)
    for name, run in runs.items():
        report[name] = run()
        print(f"{name}: {report[name]['tokens_per_s']:,.0f} tokens/s", flush=True)
        bench_record.save(args.json, report)


def adapt(model: Any) -> slidedp_jax.Adapted:
    """Tunix's Qwen3 as stages: its own embedder, layers and final norm."""

    def layer(module: Any, x: jax.Array, batch: Any) -> Any:
        causal = jnp.tril(jnp.ones((1, x.shape[1], x.shape[1]), bool))
        return module(x, batch["positions"], None, causal)[1]

    return slidedp_jax.adapt(
        model,
        layers="layers",
        embed=lambda module, batch: module.embedder.encode(batch["input_ids"]),
        layer=layer,
        head_loss=lambda module, x, batch: _loss(module, x, batch["targets"]),
        vocab_size=model.config.vocab_size,
    )


def _loss(module: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum of the supervised tokens' losses, never holding all logits."""
    x = module.final_norm(x)
    output = module.embedder.input_embedding[...].astype(x.dtype)
    flat, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    return cross_entropy_sum(flat, output, wanted, chunk_tokens=LOSS_CHUNK)


def _adapted(model: nnx.Module, args: argparse.Namespace) -> dict[str, Any]:
    adapted = adapt(model)
    workload = measured_workload(adapted.model, tokens_per_row=args.tokens, name="tunix Qwen3")
    result, parameters = _streamed(adapted.model, workload, args)
    adapted.write_back(parameters)
    return result


def _own_decoder(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    own = ModelConfig(
        model_type="qwen3",
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters=RopeParameters(rope_theta=float(config.rope_theta)),
        qk_norm=True,
        tie_word_embeddings=True,
    )
    return _streamed(decoder.build(own), own, args, Choices(loss_chunk_tokens=LOSS_CHUNK))[0]


def _streamed(
    model: Any, planned: Any, args: argparse.Namespace, choices: Choices | None = None
) -> tuple[dict[str, Any], Any]:
    plan = plan_for(
        planned,
        rows_per_step=args.rows,
        tokens_per_row=args.tokens,
        max_grad_norm=None,
        device_memory_budget_gib=args.device_memory_gib,
        choices=choices,
    )
    optimizer = optax.adamw(LEARNING_RATE)
    with slidedp_jax.Trainer(
        model, optimizer, strategy=plan.strategy, max_grad_norm=None
    ) as trainer:
        seconds, losses = [], []
        for rows in _steps(args):
            start = time.perf_counter()
            metrics = trainer.step({"input_ids": rows, "labels": rows})
            losses.append(metrics.loss)
            seconds.append(time.perf_counter() - start)
        planned = {"strategy": str(plan.strategy), "planned_step_s": plan.chosen.time.step_s}
        return _result(seconds, losses, args) | planned, trainer.parameters()


def _resident(model: nnx.Module, args: argparse.Namespace) -> dict[str, Any]:
    """Plain JAX: the whole training state on the first device, one jitted step."""
    graph, state = nnx.split(model)
    state = jax.device_put(nnx.to_pure_dict(state), jax.devices()[0], may_alias=False)
    optimizer = optax.adamw(LEARNING_RATE)
    positions = jnp.arange(args.tokens)[None]
    causal = jnp.tril(jnp.ones((1, args.tokens, args.tokens), bool))

    def loss_sum(masters: Any, rows: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
        module: Any = nnx.merge(graph, weights)
        x = module.embedder.encode(rows)
        for index in range(len(module.layers)):
            layer_graph, layer_state = nnx.split(module.layers[index])

            def run(layer_state: Any, x: jax.Array, graph: Any = layer_graph) -> Any:
                at = jnp.broadcast_to(positions, x.shape[:2])
                return nnx.merge(graph, layer_state)(x, at, None, causal)[1]

            x = (run if args.remat != "none" else jax.checkpoint(run))(layer_state, x)
        targets = jnp.pad(rows[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        return _loss(module, x, targets)

    def step(masters: Any, moments: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array]:
        supervised = rows.shape[0] * rows.shape[1] * (rows.shape[2] - 1)

        def add(carry: Any, part: jax.Array) -> tuple[Any, None]:
            total, sums = carry
            value, gradients = jax.value_and_grad(loss_sum)(masters, part)
            return (total + value, jax.tree.map(jnp.add, sums, gradients)), None

        zeros = jax.tree.map(jnp.zeros_like, masters)
        (total, sums), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), rows)
        gradients = jax.tree.map(lambda leaf: leaf / supervised, sums)
        updates, moments = optimizer.update(gradients, moments, masters)
        return optax.apply_updates(masters, updates), moments, total / supervised

    jitted = jax.jit(step, donate_argnums=(0, 1))
    masters, moments = state, jax.jit(optimizer.init)(state)
    seconds, losses = [], []
    for rows in _steps(args):
        start = time.perf_counter()
        parts = rows.reshape(-1, args.resident_rows, args.tokens)
        masters, moments, loss = jitted(masters, moments, parts)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return _result(seconds, losses, args)


def _steps(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Rows [rows, tokens] of consecutive bytes for each step, from the start again at the end."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    size = args.rows * args.tokens
    for step in range(args.steps):
        index = np.arange(step * size, (step + 1) * size) % len(text)
        yield text[index].reshape(args.rows, args.tokens).astype(np.int32)


def _result(seconds: list[float], losses: list[float], args: argparse.Namespace) -> dict[str, Any]:
    """Median after the steps that compile; a step ends when its loss is known."""
    warm = seconds[args.warmup :]
    return {
        "tokens_per_s": args.rows * args.tokens / statistics.median(warm),
        "step_s": seconds,
        "losses": losses,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("tiny", "0.6b", "1.7b"), default="tiny")
    parser.add_argument(
        "--remat", choices=("none", "block", "decoder"), default="none", help="tunix's own setting"
    )
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are not timed")
    parser.add_argument("--devices", type=int, help="compute devices; all by default")
    parser.add_argument("--device_memory_gib", type=float, help="budget of each device")
    parser.add_argument("--compare", action="store_true", help="also the other two ways to train")
    parser.add_argument("--resident_rows", type=int, default=8, help="rows of its microbatches")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup {args.warmup} leaves none of {args.steps} steps to be timed")
    if args.compare and args.rows % args.resident_rows:
        parser.error(f"--rows {args.rows} is no multiple of --resident_rows {args.resident_rows}")
    return args


if __name__ == "__main__":
    main()
