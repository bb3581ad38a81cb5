"""Chunks whose intermediate results stay on the device: the same training without recomputation."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import small_config, strategy, train, trainer

from slidedp_jax.models import decoder
from slidedp_jax.models.attention import attend
from slidedp_jax.step.kept_programs import EVERYTHING, ONLY_ATTENTION, KeptPrograms
from slidedp_jax.step.layer_functions import ChunkKind

OPTIMIZER = optax.adamw(1e-3, eps=1e-5, weight_decay=0.1)
LAYERS, ROWS = 4, 8


def batches(config):
    return [random_batch(config, ROWS, 12, packed=True, seed=i) for i in range(3)]


@functools.cache
def run(*, tied=False, num_devices=1, frozen=(), policy="deferred", **changes):
    config = small_config(tied=tied, layers=LAYERS)
    return train(
        config,
        OPTIMIZER,
        strategy(rows_per_step=ROWS, num_devices=num_devices, update_policy=policy, **changes),
        batches(config),
        parameters=initial_parameters(config),
        num_devices=num_devices,
        frozen=frozen,
        max_grad_norm=None if policy == "eager" else 0.7,
    )


@pytest.mark.parametrize(
    "case",
    [
        {"tied": True, "num_devices": 3, "num_host_devices": 6, "rows_per_microbatch": 1},
        pytest.param(
            {"layers_per_chunk": 3, "policy": "eager", "prefetch_depth": 2},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"frozen": ("model.embed_tokens.*", "model.layers.[01].*"), "num_devices": 2},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"frozen": ("*_proj.weight",)}, marks=pytest.mark.thorough),
        {"attention_chunks": 2},
        pytest.param(
            {"attention_chunks": LAYERS, "layers_per_chunk": 3, "num_devices": 2, "tied": True},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=lambda case: "_".join(map(str, case)),
)
def test_keeping_results_trains_the_same(case):
    """Only the order in which XLA fuses element-wise programs may differ: a few last bits."""
    recomputed = run(**{**case, "attention_chunks": 0})
    for kept_chunks in (1, LAYERS) if "tied" in case else (LAYERS + 3,):
        kept = run(kept_chunks=kept_chunks, **case)
        np.testing.assert_allclose(kept.losses, recomputed.losses, rtol=1e-6)
        np.testing.assert_allclose(kept.norms, recomputed.norms, rtol=1e-5)
        for name, values in recomputed.parameters.items():
            np.testing.assert_allclose(kept.parameters[name], values, atol=2e-5, err_msg=name)


def test_kept_chunks_are_uploaded_once_per_step():
    config = small_config(layers=LAYERS)
    fetched = {}
    for kept_chunks in (0, 2):
        plan = strategy(rows_per_step=ROWS, kept_chunks=kept_chunks)
        with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
            it.step(batches(config)[0])
            fetched[kept_chunks] = it.weights.bytes_fetched
            layer = 2 * it.store.layouts[1].padded_size * 2  # both halves
    # The last layer chunk stays on the device in any case.
    assert fetched[0] - fetched[2] == layer


def test_a_kept_chunk_holds_the_products_in_the_compute_dtype_and_no_weight_twice():
    config = dataclasses.replace(small_config(layers=1), hidden_size=40, intermediate_size=104)
    x, batch, trees = layer_inputs(config)
    _, kept = jax.eval_shape(lambda *args: programs(config)._forward(*args), trees, x, batch)
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    # q, k, v, what was attended to, the output projection, gate and up; the down projection's
    # result nobody needs.
    widths = [queries, queries, keys, keys, config.hidden_size, *[config.intermediate_size] * 2]
    tokens = x.shape[0] * x.shape[1]
    wide = [leaf for leaf in kept if leaf.size >= tokens * min(widths)]
    assert sorted(leaf.size for leaf in wide) == sorted(tokens * width for width in widths)
    assert {leaf.dtype for leaf in wide} == {jnp.dtype(jnp.bfloat16)}
    narrow = sum(leaf.size for leaf in kept) - sum(leaf.size for leaf in wide)
    assert narrow < x.shape[0] * x.shape[1] * 8


def test_backward_of_a_kept_chunk_repeats_no_product_with_weights():
    config = small_config(layers=1)
    x, batch, trees = layer_inputs(config)
    layer = decoder.build(config).layer_fns[0]
    kept_programs = programs(config)

    def keeping(trees, x, batch, dy):
        _, kept = kept_programs._forward(trees, x, batch)
        return kept_programs._backward(trees, x, kept, dy, batch, None)

    def recomputing(trees, x, batch, dy):
        return jax.vjp(lambda t, h: layer(t[0], h, batch), trees, x)[1](dy)

    def count(function):
        # A product with a weight has a matrix of the layer among its operands.
        jaxpr = jax.make_jaxpr(function)(trees, x, batch, x)
        shapes = {leaf.shape for leaf in jax.tree.leaves(trees) if leaf.ndim == 2}
        return sum(
            any(variable.aval.shape in shapes for variable in (*eqn.invars, *eqn.outvars))
            for eqn in equations(jaxpr.jaxpr)
            if eqn.primitive.name == "dot_general"
        )

    # Seven products forward, twice as many backward.
    assert count(keeping) == count(recomputing) == 21


def stand_in(name):
    """Attention as one primitive of that name, with a gradient of its own, which only traces."""
    primitive = jax.extend.core.Primitive(name)
    primitive.def_abstract_eval(lambda q, k, v: q.update())

    @jax.custom_vjp
    def attend(q, k, v):
        return primitive.bind(q, k, v)

    def forward(q, k, v):
        out = primitive.bind(q, k, v)
        return out, (q, k, v, out)

    attend.defvjp(forward, lambda kept, dy: tuple(part * kept[3] * dy for part in kept[:3]))
    return attend


def packed_cudnn(q, k, v):
    rows, tokens = q.shape[:2]
    batch = {
        "segment_ids": jnp.ones((rows, tokens), jnp.int32),
        "document_starts": jnp.tile(jnp.array([0, tokens], jnp.int32), (rows, 1)),
        "document_lengths": jnp.full((rows, 1), tokens, jnp.int32),
    }
    return attend(q, k, v, batch, window=None, implementation="cudnn")


def whole_cudnn(q, k, v):
    return attend(q, k, v, {}, window=None, implementation="cudnn")


def test_a_chunk_that_keeps_attention_repeats_all_but_that():
    """The portable attention is one loop forward and one backward."""
    x, batch, trees = layer_inputs(small_config(layers=1))

    def loops(keeps):
        kept_programs = programs(small_config(layers=1), keeps)

        def both_ways(trees, x, batch):
            _, kept = kept_programs._forward(trees, x, batch)
            return kept, kept_programs._backward(trees, x, kept, x, batch, None)

        jaxpr, (kept, _) = jax.make_jaxpr(both_ways, return_shape=True)(trees, x, batch)
        names = [equation.primitive.name for equation in equations(jaxpr.jaxpr)]
        return names.count("scan"), sum(leaf.size for leaf in kept)

    config = small_config(layers=1)
    tokens = x.shape[0] * x.shape[1]
    heads = config.num_attention_heads
    (again, constants), (once, elements) = loops(frozenset()), loops(ONLY_ATTENTION)
    assert (again, once) == (3, 2)
    assert constants < tokens  # a few numbers
    assert 0 <= elements - tokens * heads * (config.head_dim + 1) < tokens


@pytest.mark.parametrize("keeps", [EVERYTHING, ONLY_ATTENTION], ids=["everything", "attention"])
@pytest.mark.parametrize(
    ("attention", "times"),
    [
        (stand_in("dot_product_attention_fwd_of_some_kind"), 1),
        (stand_in("attention"), 2),  # so that this test would notice
        (packed_cudnn, 1),
        (whole_cudnn, 1),
    ],
    ids=["stand_in", "of_another_name", "packed_cudnn", "whole_cudnn"],
)
def test_fused_attention_runs_once_in_a_kept_chunk(attention, times, keeps, traced_cudnn):
    def layer(weights, x, batch):
        q, k, v = ((x @ weight).reshape(*x.shape[:2], 4, 64) for weight in weights[:3])
        return x + attention(q, k, v).reshape(x.shape) @ weights[3]

    kind = ChunkKind(layer_fns=(layer,), widen=False, keeps=keeps)
    kept_programs = KeptPrograms(lambda *_, **__: None, kind)

    def both_ways(trees, x, dy):
        _, kept = kept_programs._forward(trees, x, {})
        return kept_programs._backward(trees, x, kept, dy, {}, None)

    weight = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 64, 256), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(both_ways)(((weight,) * 4,), x, x).jaxpr
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    assert sum("attention" in name and "bwd" not in name for name in names) == times


def equations(jaxpr):
    """All equations, those of inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def programs(config, keeps=EVERYTHING):
    layer = decoder.build(config).layer_fns[0]
    kind = ChunkKind(layer_fns=(layer,), widen=False, keeps=keeps)
    return KeptPrograms(lambda *_, **__: None, kind)


def layer_inputs(config):
    """x [2, 12, D], batch and one layer's tree, bf16."""
    x = jnp.ones((2, 12, config.hidden_size), jnp.bfloat16)
    batch = {"positions": jnp.tile(jnp.arange(12, dtype=jnp.int32), (2, 1))}
    shapes = decoder.build(config).layers[0].shapes
    trees = (jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.bfloat16), shapes),)
    return x, batch, trees


def test_programs_of_kept_chunks_are_shared_by_chunks_of_one_structure(monkeypatch):
    made = []
    original = KeptPrograms.__init__
    monkeypatch.setattr(
        KeptPrograms, "__init__", lambda self, *args: (made.append(args), original(self, *args))[1]
    )
    config = small_config(layers=LAYERS)
    with trainer(config, OPTIMIZER, strategy(kept_chunks=LAYERS)) as it:
        it.step(batches(config)[0])
    # The lowest chunk of an untied model passes its dx on to the embedding like the others.
    assert len(made) == 1
