"""A port of somebody else's model: its own forward pass trained in memory, and streamed by stages.

Both sides take five steps of AdamW in float32, with a clip that is hit in each, on the same rows,
of which three in ten labels do not count. The reference is the author's whole model under
`jax.value_and_grad` and plain optax; nothing of the model's code is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import slidedp_jax
from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.planner.strategy import Strategy

VOCAB, ROWS, TOKENS, STEPS = 61, 6, 16, 5
RATE, EPS, CLIP = 1e-3, 1e-5, 0.3
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Port:
    """Somebody's model and the glue that it needs.

    Attributes:
      name: of the model.
      model: an NNX module or a pytree.
      parts: what `slidedp_jax.adapt` is given beside the model.
      whole_loss: the mean loss by the author's own forward pass.
      update_tolerance: how far the weights may part, over how far they moved.
      options: more of what `slidedp_jax.adapt` is given.
    """

    name: str
    model: Any
    parts: Mapping[str, Any]
    whole_loss: Callable[[Any, Mapping[str, Any]], jax.Array]
    update_tolerance: float = 2e-3
    options: Mapping[str, Any] = field(default_factory=dict)


def mean_loss(logits: jax.Array, labels: jax.Array, *, shifted: bool = True) -> jax.Array:
    """Mean cross-entropy of what position t predicts: label t + 1, or t."""
    logits = logits.astype(jnp.float32)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counts = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    return jnp.sum(losses * counts) / jnp.sum(counts)


def loss_sum(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum of the supervised tokens' cross-entropy."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), jnp.maximum(targets, 0)
    )
    return jnp.sum(losses * (targets >= 0))


def causal(tokens: int) -> jax.Array:
    """[1, T, T]: whether a token sees another."""
    return jnp.tril(jnp.ones((1, tokens, tokens), bool))


def positions(ids: jax.Array) -> jax.Array:
    """[B, T]: 0, 1, 2, ..."""
    return jnp.tile(jnp.arange(ids.shape[1]), (ids.shape[0], 1))


def moved(model: Any, seed: int = 1) -> Any:
    """The model with noise in all its parameters: many begin at zero, which hides mistakes."""
    rng = np.random.default_rng(seed)

    def move(leaf: Any) -> Any:
        return jnp.asarray(np.asarray(leaf) + 0.05 * rng.standard_normal(leaf.shape), leaf.dtype)

    if not isinstance(model, nnx.Module):
        return jax.tree.map(move, model)
    nnx.update(model, jax.tree.map(move, nnx.state(model, nnx.Param)))
    return model


def compare(port: Port, devices: Sequence[int]) -> bool:
    """Train both ways on each number of devices, print what differs; whether it is little."""
    started = time.perf_counter()
    batches = _batches()
    start, plain_losses, plain = _train_plainly(port, batches)
    adapted = slidedp_jax.adapt(
        port.model, **port.parts, vocab_size=VOCAB, tokens_per_row=TOKENS, **port.options
    )
    agreement = adapted.check(port.whole_loss)
    begin = {
        name: adapted.model.initial_value(name, (), 0)
        for stage in adapted.model.stages()
        for name in stage.parameter_names()
    }
    fine, results = True, []
    for number in devices:
        losses, weights = _train_streamed(adapted, begin, batches, number)
        after = _leaves(adapted.write_back(weights))
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, plain_losses, strict=True))
        update, where = max(
            (_norm(after[name] - plain[name]) / (_norm(plain[name] - start[name]) + 1e-12), name)
            for name in plain.keys() - adapted.unused  # which optax's decay moves
        )
        results.append(f"{number} devices: loss {off:.1e}, update {update:.1e} ({where})")
        fine &= bool(off < 1e-5 and update < port.update_tolerance)
    print(
        f"{'ok  ' if fine else 'DIFF'} {port.name}: layers {len(adapted.model.layers)}, kinds "
        f"{len(set(adapted.model.layer_fns))}, loss {plain_losses[0]:.3f} -> "
        f"{plain_losses[-1]:.3f}; check {agreement.largest_difference:.1e}; {'; '.join(results)}; "
        f"{time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return fine


def _batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    shape = (STEPS, ROWS, TOKENS)
    ids = rng.integers(1, VOCAB, shape, np.int32)
    labels = np.where(rng.random(shape) < 0.3, IGNORED, ids).astype(np.int32)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def _adamw() -> optax.GradientTransformation:
    return optax.adamw(RATE, eps=EPS, weight_decay=0.1)


def _train_plainly(
    port: Port, batches: Sequence[Mapping[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], list[float], dict[str, np.ndarray]]:
    start = _leaves(port.model)
    if isinstance(port.model, nnx.Module):
        graph, params, *others = nnx.split(port.model, nnx.Param, ...)

        def whole(params: Any) -> Any:
            return nnx.merge(graph, params, *jax.tree.map(lambda leaf: leaf, others))

    else:
        params = port.model

        def whole(params: Any) -> Any:
            return params

    def loss(params: Any, batch: Any) -> jax.Array:
        return port.whole_loss(whole(params), batch)

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), _adamw())
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, optax.global_norm(gradients)

    losses = []
    for batch in batches:
        params, state, value, norm = step(params, state, batch)
        losses.append(float(value))
        assert float(norm) > CLIP, f"the clip is not hit: {float(norm)}"
    pure = nnx.to_pure_dict(params) if isinstance(port.model, nnx.Module) else params
    return start, losses, _named(pure)


def _train_streamed(
    adapted: slidedp_jax.Adapted,
    begin: Mapping[str, np.ndarray],
    batches: Sequence[Mapping[str, np.ndarray]],
    devices: int,
) -> tuple[list[float], dict[str, np.ndarray]]:
    strategy = Strategy(
        layers_per_chunk=2,
        rows_per_microbatch=ROWS // devices,
        num_microbatches=1,
        compute_dtype="float32",
        num_host_devices=devices,
        block_size=256,
    )
    with slidedp_jax.Trainer(
        adapted.model,
        _adamw(),
        strategy=strategy,
        parameters=begin,
        max_grad_norm=CLIP,
        num_devices=devices,
    ) as trainer:
        return [trainer.step(batch).loss for batch in batches], trainer.parameters()


def _leaves(model: Any) -> dict[str, np.ndarray]:
    if isinstance(model, nnx.Module):
        model = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return _named(model)


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in named_leaves(tree).items()}


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))
