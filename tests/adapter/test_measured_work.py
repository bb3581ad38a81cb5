"""What is measured of an adapted model, and plans that are made of it."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from plain_steps import token_batches
from toy_nnx import PARTS, VOCAB, WIDTH, Hybrid

import slidedp_jax
from slidedp_jax import Trainer, UserError
from slidedp_jax.adapter.matmul_flops import matmul_flops
from slidedp_jax.adapter.workload import measured_workload
from slidedp_jax.models import decoder
from slidedp_jax.models.config import named_config
from slidedp_jax.models.frozen_names import frozen_names
from slidedp_jax.models.loss import cross_entropy_sum
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.this_machine import plan_for

TOKENS = 16


def test_products_are_counted_in_loops_branches_and_called_programs():
    def product(x, w):
        return jnp.tanh(x @ w)

    def program(x, w):
        x, _ = jax.lax.scan(lambda h, _: (product(h, w), None), x, length=3)
        x = jax.lax.cond(x[0, 0] > 0, lambda h: product(product(h, w), w), lambda h: h, x)
        return jax.checkpoint(jax.jit(product))(x, w)

    traced = jax.make_jaxpr(program)(jnp.ones((5, 4)), jnp.ones((4, 4)))
    assert matmul_flops(traced) == 6 * (2 * 5 * 4 * 4)


def test_convolutions_are_counted():
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    traced = jax.make_jaxpr(convolve)(jnp.ones((2, 10, 3)), jnp.ones((4, 3, 6)))
    assert matmul_flops(traced) == 2 * (2 * 10 * 6) * (4 * 3)


def test_kernels_count_as_they_estimate_themselves():
    from jax.experimental import pallas

    def kernel(estimate):
        def copy(x, out):
            out[...] = x[...]

        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return pallas.pallas_call(copy, out_shape=shape, cost_estimate=estimate)

    estimate = pallas.CostEstimate(flops=123, bytes_accessed=0, transcendentals=0)
    counts = [matmul_flops(jax.make_jaxpr(kernel(e))(jnp.ones((8, 8)))) for e in (estimate, None)]
    assert counts == [123, 0]


def test_a_decoder_is_measured_as_it_is_described():
    """Our own decoder, whose products are known from its description."""
    config = named_config("tiny")
    described = Workload.from_config(config)
    model = decoder.build(config)
    with jax.numpy_rank_promotion("allow"):
        measured = measured_workload(model, tokens_per_row=TOKENS, compute_dtype="float32")
    assert measured.num_parameters == described.num_parameters
    assert len(measured.layers) == len(described.layers)
    assert measured.hidden_size == described.hidden_size
    assert measured.tied == described.tied
    for mine, theirs in zip(measured.layers, described.layers, strict=True):
        assert mine.matmul_parameters == theirs.matmul_parameters
        assert mine.group_parameters == theirs.group_parameters
    assert measured.head.matmul_parameters == described.head.matmul_parameters
    assert measured.own_loss_tokens is None  # a strategy decides


def test_what_is_frozen_is_planned_as_of_a_described_model():
    config = named_config("tiny")
    patterns = ["model.embed_tokens.*", "*mlp*", "model.layers.0.*"]
    kept = frozen_names(config.parameter_shapes(), patterns)
    described = Workload.from_config(config, frozen=kept)
    measure = partial(measured_workload, decoder.build(config), tokens_per_row=TOKENS)
    with jax.numpy_rank_promotion("allow"):
        measured = measure(compute_dtype="float32", frozen=patterns)
        with pytest.raises(UserError, match="no parameter is called 'nothing'"):
            measure(frozen=["nothing"])
    assert measured.num_trained == described.num_trained < described.num_parameters
    assert measured.forward_only_layers == described.forward_only_layers == 1
    for own, known in zip(measured.stages, described.stages, strict=True):
        assert own.frozen_parameters == known.frozen_parameters
        assert own.frozen_matmul_parameters == pytest.approx(known.frozen_matmul_parameters, abs=2)
    with pytest.raises(UserError, match="give the patterns to measured_workload"):
        plan_for(measured, rows_per_step=1, tokens_per_row=TOKENS, frozen=patterns)


def attention_model(num_heads: int, dim: int, vocab_size: int, chunk_tokens, own_loss=None):
    """A plain tree with one layer of dense attention; its loss in chunks, or from all logits."""
    tree = {
        "table": jax.ShapeDtypeStruct((vocab_size, dim), jnp.float32),
        "layers": [{"qkv": jax.ShapeDtypeStruct((dim, 3 * dim), jnp.float32)}],
        "out": jax.ShapeDtypeStruct((vocab_size, dim), jnp.float32),
    }

    def layer(p, x, batch):
        rows, tokens, _ = x.shape
        q, k, v = jnp.split((x @ p["qkv"]).reshape(rows, tokens, num_heads, -1), 3, axis=-1)
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), axis=-1)
        return x + jnp.einsum("bnts,bsnh->btnh", scores, v).reshape(x.shape)

    def head_loss(p, x, batch):
        flat, targets = x.reshape(-1, dim), batch["targets"].reshape(-1)
        if chunk_tokens is not None:
            return cross_entropy_sum(flat, p["out"], targets, chunk_tokens=chunk_tokens)
        logits = (flat @ p["out"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None] % vocab_size, 1)
        return -jnp.sum(picked[:, 0] * (targets >= 0))

    return slidedp_jax.adapt(
        tree,
        layers="layers",
        embed=lambda p, batch: p["table"][batch["input_ids"]],
        layer=layer,
        head_loss=own_loss or head_loss,
        vocab_size=vocab_size,
    ).model


def test_attention_is_told_from_products_with_weights():
    heads, dim = 4, 16
    model = attention_model(heads, dim, 31, None)
    measured = measured_workload(model, tokens_per_row=TOKENS, compute_dtype="float32")
    layer = measured.layers[0]
    assert layer.matmul_parameters == 3 * dim * dim
    executed = 4 * TOKENS**2 * dim
    batch = BatchShape(num_rows=1, seq_length=TOKENS)
    # The planner counts T (T + 1) / 2 pairs, of which the diagonal is beyond T^2 / 2.
    assert layer.attention_flops(batch) == pytest.approx(executed * (TOKENS + 1) / TOKENS)
    # Scores of all heads are kept, so memory per token grows with the row; XLA may reuse a buffer.
    longer = measured_workload(model, tokens_per_row=4 * TOKENS, compute_dtype="float32").layers[0]
    kept = [s.residual_elements + s.backward_workspace_elements for s in (layer, longer)]
    assert kept[1] - kept[0] >= 0.8 * 3 * TOKENS * heads


@pytest.mark.parametrize(
    ("chunk_tokens", "held"), [(None, math.inf), (8, 8), (3 * 8 * TOKENS, 3 * 8 * TOKENS)]
)
def test_what_a_loss_holds_of_the_logits_is_noticed(chunk_tokens, held):
    """All of them, less than a row has, or more."""
    model = attention_model(2, 8, 512, chunk_tokens)
    measured = measured_workload(model, tokens_per_row=8 * TOKENS, compute_dtype="float32")
    assert measured.own_loss_tokens == held
    assert measured.head.matmul_parameters == 512 * 8


def test_logits_that_are_kept_for_the_gradient_are_held():
    """However small the products are that they come from."""

    def head_loss(p, x, batch):
        def add(total, chunk):
            hidden, targets = chunk
            logits = jax.nn.log_softmax(hidden @ p["out"].T)
            picked = jnp.take_along_axis(logits, targets[:, None] % 512, 1)[:, 0]
            return total - jnp.sum(picked * (targets >= 0)), None

        chunks = x.reshape(-1, 8, 8), batch["targets"].reshape(-1, 8)
        return jax.lax.scan(add, jnp.zeros(()), chunks)[0]

    model = attention_model(2, 8, 512, None, head_loss)
    measured = measured_workload(model, tokens_per_row=8 * TOKENS, compute_dtype="float32")
    assert measured.own_loss_tokens == math.inf


def test_plans_say_what_the_models_own_loss_does_and_take_no_other_wish():
    model = attention_model(2, 8, 512, 8)
    workload = measured_workload(model, tokens_per_row=TOKENS, compute_dtype="float32")
    plan_of = partial(plan_for, workload, rows_per_step=8, tokens_per_row=TOKENS)
    found = plan_of()
    assert {one.strategy.loss_chunk_tokens for one in (found.chosen, *found.runners_up)} == {8}
    with pytest.raises(UserError, match=r"loss_chunk_tokens is 4, but .*adapted model itself"):
        plan_of(choices=Choices(loss_chunk_tokens=4))


def test_layers_of_two_kinds_are_measured_apart_and_planned():
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(0)), **PARTS)
    workload = measured_workload(adapted.model, tokens_per_row=TOKENS, compute_dtype="float32")
    mixer, gate = workload.layers[:2]
    assert workload.layers == (mixer, gate, mixer, gate)
    assert mixer.matmul_parameters == WIDTH * WIDTH
    assert gate.matmul_parameters == 3 * WIDTH * WIDTH
    plan = plan_for(
        workload,
        rows_per_step=8,
        tokens_per_row=TOKENS,
        compute_dtype="float32",
        choices=Choices(num_host_devices=8),
    )
    assert plan.chosen.memory.host["optimizer_state"] >= 8 * workload.num_parameters
    elsewhere = plan_for(workload, rows_per_step=8, tokens_per_row=TOKENS, hardware="rtx4090")
    assert "1 x rtx4090: " in repr(elsewhere)
    with Trainer(
        adapted.model, optax.adamw(1e-3), strategy=plan.strategy, kernel_form="whole"
    ) as trainer:
        metrics = trainer.step(token_batches(VOCAB, 8, TOKENS, 1)[0])
    assert 0 < metrics.loss < 20


def test_hidden_states_wider_than_the_compute_dtype_are_measured_so():
    """A residual stream in float32 takes twice the room of one in bfloat16."""
    config = named_config("tiny")
    model = decoder.build(config)
    layers = tuple(
        lambda params, x, batch, fn=fn: fn(params, x.astype(jnp.bfloat16), batch).astype(
            jnp.float32
        )
        for fn in model.layer_fns
    )
    wide = dataclasses.replace(model, layer_fns=layers)
    widths = [
        measured_workload(one, tokens_per_row=TOKENS, compute_dtype="bfloat16").hidden_size
        for one in (model, wide)
    ]
    assert widths == [config.hidden_size, 2 * config.hidden_size]
