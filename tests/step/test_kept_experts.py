"""What stays of a mixture's layers between forward and backward: what the planner counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from slidedp_jax.jax_internals import pullback_parts
from slidedp_jax.models.config import named_config
from slidedp_jax.models.decoder import build
from slidedp_jax.planner.workload import Workload
from slidedp_jax.step.kept_programs import DECISIONS, EVERYTHING, _keeping
from slidedp_jax.step.layer_functions import apply_layers

TOKENS = 4096
CONFIG = dataclasses.replace(
    named_config("tiny-moe"),
    num_experts=16,
    num_experts_per_tok=4,
    shared_expert_intermediate_size=24,
)


def kept_bytes(num_layers, names):
    """Of a chunk's layers in bf16, beside weights, inputs and batch."""
    model = build(CONFIG)
    trees = tuple(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), stage.shapes)
        for stage in model.layers[:num_layers]
    )
    x = jax.ShapeDtypeStruct((1, TOKENS, CONFIG.hidden_size), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    batch = dict.fromkeys(("input_ids", "targets", "positions"), tokens)

    def kept(trees, x, batch):
        fns = model.layer_fns[:num_layers]
        run = jax.checkpoint(lambda t, x: apply_layers(fns, t, x, batch).x, policy=_keeping(names))
        pullback = jax.vjp(run, trees, x)[1]
        _, leaves, places = pullback_parts(pullback, jax.tree.leaves((trees, x, batch)))
        return [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(kept, trees, x, batch))


def planned(attribute, num_layers):
    stages = Workload.from_config(CONFIG).layers[:num_layers]
    return 2 * TOKENS * sum(getattr(stage, attribute) for stage in stages)


def test_choices_and_weights_stay_and_nothing_else():
    """But for a few integers per block of rows."""
    assert kept_bytes(2, DECISIONS) == pytest.approx(planned("decided_elements", 2), rel=0.02)


def test_a_kept_chunk_keeps_rows_of_visits_once():
    """Portable attention keeps a few results more than cuDNN's."""
    decided = planned("decided_elements", 2)
    assert kept_bytes(2, EVERYTHING) - decided == pytest.approx(
        planned("kept_elements", 2), rel=0.12
    )
