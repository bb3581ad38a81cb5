"""Plain versions of what `models` computes in pieces, and parameters to run whole models with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.decoder import build
from slidedp_jax.models.streamed import Batch, LayerOutput, Stage, StreamedModel


def built(config: ModelConfig, *, loss_chunk_tokens: int) -> StreamedModel:
    """A decoder whose loss holds the logits of so many tokens at once."""
    model = build(config)
    return dataclasses.replace(model, head_loss_fn=model.head_loss(loss_chunk_tokens))


def quick_jit(function):
    """`jax.jit` without the CPU backend's optimiser: tests compile longer than they run."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def attention(q, k, v, segment_ids=None, window=None):
    """Causal attention with the full score matrix; padding queries give 0."""
    num_tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(q.shape[3])
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
    visible = (distance >= 0) & (distance < (window or num_tokens))
    visible = jnp.asarray(visible)[None, None]
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        visible = visible & (same & (segment_ids > 0)[:, :, None])[:, None]
    scores = jnp.where(visible, scores, -np.inf)
    highest = jnp.maximum(scores.max(axis=-1, keepdims=True), -1e30)
    weights = jnp.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bnqk,bknh->bqnh", weights, v)


def cross_entropy_sum(x, weight, targets):
    """The loss from all logits at once, float32."""
    logits = x.astype(jnp.float32) @ weight.astype(jnp.float32).T
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    supervised = targets != -100
    of_target = jnp.take_along_axis(
        log_probabilities, jnp.where(supervised, targets, 0)[:, None], axis=1
    )[:, 0]
    return -jnp.where(supervised, of_target, 0.0).sum()


def stage_arrays(stage: Stage, values: dict[str, np.ndarray], dtype=jnp.float32):
    """The stage's parameter tree out of a flat name -> array dictionary."""
    treedef = jax.tree.structure(stage.shapes)
    return jax.tree.unflatten(
        treedef, [jnp.asarray(values[name], dtype) for name in stage.parameter_names()]
    )


def model_arrays(model: StreamedModel, values: dict[str, np.ndarray], dtype=jnp.float32):
    """Parameter trees of all stages: embed, list of layers, head."""
    return {
        "embed": stage_arrays(model.embed, values, dtype),
        "layers": [stage_arrays(stage, values, dtype) for stage in model.layers],
        "head": stage_arrays(model.head, values, dtype),
    }


def flat_names(model: StreamedModel, trees) -> dict[str, np.ndarray]:
    """The inverse of `model_arrays`: full name -> array."""
    stages = zip(model.stages(), [trees["embed"], *trees["layers"], trees["head"]], strict=True)
    return {
        name: np.asarray(leaf)
        for stage, tree in stages
        for name, leaf in zip(stage.parameter_names(), jax.tree.leaves(tree), strict=True)
    }


def random_values(model: StreamedModel, seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter random, norms around 1 and biases away from 0 as well."""
    rng = np.random.default_rng(seed)
    values = {}
    for stage in model.stages():
        leaves = jax.tree.leaves(stage.shapes)
        for name, leaf in zip(stage.parameter_names(), leaves, strict=True):
            if name.endswith("norm.weight"):
                value = 1.0 + 0.2 * rng.standard_normal(leaf.shape)
            elif name.endswith(".bias"):
                value = 0.5 * rng.standard_normal(leaf.shape)
            else:
                value = 0.1 * rng.standard_normal(leaf.shape)
            values[name] = value.astype(np.float32)
    return values


def hidden_states(model: StreamedModel, trees, batch: Batch):
    """The residual stream after the last layer."""
    return hidden_states_and_sums(model, trees, batch)[0]


def hidden_states_and_sums(model: StreamedModel, trees, batch: Batch):
    """The residual stream after the last layer, and what layers give for a loss over the step."""
    x, sums = model.embed_fn(trees["embed"], batch), []
    for layer_fn, params in zip(model.layer_fns, trees["layers"], strict=True):
        output = layer_fn(params, x, batch)
        x = output.x if isinstance(output, LayerOutput) else output
        if isinstance(output, LayerOutput):
            sums.append(output.sums)
    return x, tuple(sums)


def logits(model: StreamedModel, trees, batch: Batch):
    """float32 [B, T, V]."""
    embed = trees["embed"] if model.tied else None
    return model.head_logits_fn(trees["head"], embed, hidden_states(model, trees, batch))


def loss(model: StreamedModel, trees, batch: Batch):
    """Sum over the supervised tokens."""
    embed = trees["embed"] if model.tied else None
    return model.head_loss_fn(trees["head"], embed, hidden_states(model, trees, batch), batch)


def rows_batch(rows, targets=None) -> dict[str, jax.Array]:
    """Whole rows of equal length; each token predicts the next unless `targets` are given."""
    ids = np.asarray(rows, np.int32)
    if targets is None:
        last = np.full((ids.shape[0], 1), -100, np.int32)
        targets = np.concatenate([ids[:, 1:], last], axis=1)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return {
        "input_ids": jnp.asarray(ids),
        "targets": jnp.asarray(targets, jnp.int32),
        "positions": jnp.asarray(positions),
    }
