"""Check a mixture of experts on the devices at hand: streamed steps against plain optax in memory.

    python scripts/check/check_experts.py                     # on the GPUs, a minute
    python scripts/check/check_experts.py --platform cpu --num-devices 2 --tokens 64
                                             --forms portable   # here

A small model with dense layers among sparse ones and a shared expert, its router losses on. In
float32 three streamed steps (chunks kept, recomputed and resident) must be those of `jax.grad` of
the whole loss and optax on one device; in bf16, with each realisation of experts' products that can
run here, losses must be near those and two runs the same bits. Prints a line per run, ends with 1
where one differs.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

import slidedp_jax
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.product_forms import FORMS, obstacles
from slidedp_jax.planner.strategy import Strategy

STEPS, ROWS, RATE = 3, 8, 1e-3
EXACT, NEAR = 1e-5, 3e-2
"""Relative differences of losses in float32, where sums have other orders, and in bf16."""


def main() -> None:
    args = parse()
    setup = slidedp_jax.configure(platform=args.platform, num_devices=args.num_devices)
    devices = setup.devices()[0]
    config, batches = small_mixture(), random_batches(args.tokens)
    losses, values = plainly(config, batches)
    print(f"plain optax, float32: losses {text(losses)}", flush=True)
    failed = False
    for layers, kept, resident in ((1, 0, 0), (2, 1, 0), (1, 1, 3)):
        strategy = strategy_for(len(devices), layers, kept, resident, "float32")
        got, trained = streamed(config, batches, strategy, "portable")
        apart = max(relative(one, other) for one, other in zip(got, losses, strict=True))
        moved = max(np.abs(trained[name] - values[name]).max() for name in values)
        # Adam divides a rounding residue by itself, so weights are held against the rate.
        wrong = apart > EXACT or moved > 0.05 * RATE
        failed |= wrong
        what = f"float32, {layers} layers per chunk, {kept} kept, {resident} resident"
        print(f"{what}: losses {apart:.1e}, weights {moved / RATE:.1e} rates apart{mark(wrong)}")
    for form in args.forms:
        failed |= of_form(config, batches, form, losses, devices)
    sys.exit(1 if failed else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--num-devices", type=int)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    return parser.parse_args()


def of_form(
    config: ModelConfig,
    batches: list[dict[str, np.ndarray]],
    form: Any,
    losses: list[float],
    devices: Any,
) -> bool:
    """One realisation in bf16, twice; whether it was wrong."""
    from slidedp_jax.models.attention import device_target

    if found := obstacles(form, device_target(devices[0]), "bfloat16"):
        print(f"bfloat16, {form}: not here ({'; '.join(found)})")
        return False
    strategy = strategy_for(len(devices), 1, 1, 0, "bfloat16")
    (got, one), (_, other) = (streamed(config, batches, strategy, form) for _ in range(2))
    apart = max(relative(a, b) for a, b in zip(got, losses, strict=True))
    same = all(one[name].tobytes() == other[name].tobytes() for name in one)
    wrong = apart > NEAR or not same
    print(
        f"bfloat16, {form}: losses {apart:.1e} apart, two runs "
        f"{'the same bits' if same else 'differ'}{mark(wrong)}",
        flush=True,
    )
    return wrong


def small_mixture() -> ModelConfig:
    """Sizes that kernels for GPUs take: multiples of 128, heads of 64."""
    return ModelConfig(
        model_type="qwen2_moe",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
        norm_topk_prob=True,
        sparse_layers=(True, False, True, True),
        router_aux_loss_coef=0.05,
    )


def strategy_for(num_devices: int, layers: int, kept: int, resident: int, dtype: Any) -> Strategy:
    return Strategy(
        layers_per_chunk=layers,
        rows_per_microbatch=max(1, ROWS // num_devices // 2),
        num_microbatches=2,
        kept_chunks=kept,
        resident_chunks=resident,
        compute_dtype=dtype,
        num_host_devices=num_devices,
    )


def random_batches(tokens: int) -> list[dict[str, np.ndarray]]:
    """Two documents a row and some padding."""
    rng = np.random.default_rng(0)
    segments = np.repeat([[1] * (tokens // 2) + [2] * (tokens // 2 - 3) + [0] * 3], ROWS, axis=0)
    return [
        {
            "input_ids": (ids := rng.integers(0, 1024, (ROWS, tokens)).astype(np.int32)),
            "labels": ids,
            "segment_ids": segments.astype(np.int32),
        }
        for _ in range(STEPS)
    ]


def starting_values(model: Any) -> dict[str, np.ndarray]:
    """As of a model that is trained from nothing, with routers that tell tokens apart."""
    import jax

    return {
        name: model.initial_value(name, leaf.shape, 0)
        * np.float32(4 if name.endswith("mlp.gate.weight") else 1)
        for stage in model.stages()
        for name, leaf in zip(stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True)
    }


def streamed(
    config: ModelConfig, batches: list[dict[str, np.ndarray]], strategy: Strategy, form: str
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of the steps, and the weights after them."""
    import optax

    from slidedp_jax.models.decoder import build

    model = build(config, attention="chunked", expert_products=form)
    values = starting_values(model)
    with slidedp_jax.Trainer(
        model,
        optax.adamw(RATE, eps=1e-5),
        strategy=strategy,
        parameters=values,
        documents_per_row=2,
    ) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
        return losses, trainer.parameters()


def plainly(
    config: ModelConfig, batches: list[dict[str, np.ndarray]]
) -> tuple[list[float], Mapping[str, np.ndarray]]:
    """The same in memory: the model's functions over all rows at once, and optax with its clip."""
    import jax
    import jax.numpy as jnp
    import optax

    from slidedp_jax.models.batch_arrays import IGNORED, document_positions, targets_of
    from slidedp_jax.models.decoder import build
    from slidedp_jax.models.streamed import LayerOutput

    model = build(config, attention="chunked", expert_products="portable")

    def loss(values: Any, batch: Any) -> Any:
        def tree(stage: Any) -> Any:
            names = iter(stage.parameter_names())
            return jax.tree.map(lambda _: values[next(names)], stage.shapes)

        x, sums = model.embed_fn(tree(model.embed), batch), []
        for stage, fn in zip(model.layers, model.layer_fns, strict=True):
            output = fn(tree(stage), x, batch)
            if isinstance(output, LayerOutput):
                x, _, own = output
                sums.append(own)
            else:
                x = output
        of_tokens = model.head_loss_fn(tree(model.head), None, x, batch)
        assert model.loss_of_sums is not None
        count = jnp.sum(batch["targets"] != IGNORED)
        return of_tokens / count + model.loss_of_sums(tuple(sums))[0]

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, eps=1e-5))

    @jax.jit
    def step(values: Any, state: Any, batch: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            value, gradients = jax.value_and_grad(loss)(values, batch)
        updates, state = optimizer.update(gradients, state, values)
        return optax.apply_updates(values, updates), state, value

    values: Any = {name: jnp.asarray(value) for name, value in starting_values(model).items()}
    state, losses = optimizer.init(values), []
    for batch in batches:
        segments = batch["segment_ids"]
        arrays = {
            "input_ids": batch["input_ids"],
            "segment_ids": segments,
            "targets": targets_of(batch["labels"], segments, shifted=True),
            "positions": document_positions(segments.shape, segments).astype(np.int32),
        }
        values, state, value = step(values, state, arrays)
        losses.append(float(value))
    return losses, {name: np.asarray(value) for name, value in values.items()}


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def text(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def mark(wrong: bool) -> str:
    return "  <- WRONG" if wrong else ""


if __name__ == "__main__":
    main()
