"""Adapted layers with losses of their own, and what is refused of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_layers
from flax import nnx
from streamed_steps import train as train_with_adamw
from toy_layers import (
    CHOSEN,
    SHAPES,
    VOCAB,
    ErringHost,
    assert_equal,
    best,
    initial_parameters,
    plan,
    train,
    train_plainly,
)
from toy_nnx import PARTS, WIDTH, Hybrid

import slidedp_jax
from slidedp_jax import UserError
from slidedp_jax.adapter.workload import measured_workload
from slidedp_jax.models.named_results import decided
from slidedp_jax.models.streamed import LayerOutput

KINDS = ("aux", "plain", "router")


def aux_layer(params, x, batch):
    return toy_layers.aux_layer(params, x, batch["targets"] >= 0)


def router(choose):
    def layer(params, x, batch):
        return toy_layers.router_layer(params, x, batch["targets"] >= 0, choose)

    return layer


def adapt(kinds, choose, **changes):
    """The toys as a plain tree and functions over it."""
    values = initial_parameters(kinds)
    tree = {
        "table": values["embed.table"],
        "layers": [
            {name: values[f"layers.{n}.{name}"] for name in SHAPES[kind]}
            for n, kind in enumerate(kinds)
        ],
        **{name: values[name] for name in ("scale", "out")},
    }
    fns = {
        "plain": lambda p, x, batch: toy_layers.dense(p["w"], x),
        "aux": aux_layer,
        "router": router(choose),
    }
    parts = {
        "layers": "layers",
        "embed": lambda p, batch: p["table"][batch["input_ids"]],
        "layer": [fns[kind] for kind in kinds],
        "head_loss": lambda p, x, batch: toy_layers.head_loss(p, x, batch["targets"]),
        "vocab_size": VOCAB,
    }
    return slidedp_jax.adapt(tree, **(parts | changes)).model


@pytest.mark.parametrize(
    ("devices", "micro", "kept", "layers"),
    [(3, 1, 0, 2), pytest.param(1, 2, 2, 1, marks=pytest.mark.thorough)],
)
def test_steps_are_those_of_plain_optax(devices, micro, kept, layers):
    host = ErringHost()
    model = adapt(KINDS, lambda scores: decided(host(scores)), check_loss=False)
    assert not host.asked_again
    steps, trained = train(model, plan(devices, micro, kept, layers), devices)

    def named(values):
        return {name.replace("embed.table", "table"): value for name, value in values.items()}

    plain_steps, plain = train_plainly(KINDS)
    plain_steps = [(loss, aux, named(gradients)) for loss, aux, gradients in plain_steps]
    assert_equal((steps, trained), (plain_steps, named(plain)))
    assert host.asked_again == 0


def test_the_work_of_a_router_has_its_choices():
    model = adapt(("aux", "router"), lambda scores: decided(best(scores)))
    for dtype, elements in (("float32", 1), ("bfloat16", 2)):
        workload = measured_workload(model, tokens_per_row=8, compute_dtype=dtype)
        assert [layer.decided_elements for layer in workload.layers] == [0, elements * CHOSEN]


@pytest.mark.thorough
def test_an_nnx_layer_that_draws_sums_its_loss_over_rows():
    def layer(block, x, batch):
        y = block(x)
        square = jnp.sum(jnp.square(y - x), axis=-1, dtype=jnp.float32)
        return y, 0.1 * jnp.sum(square * (batch["targets"] >= 0))

    parts = PARTS | {"layer": layer}
    model = slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=0.3), **parts, dropout=True).model
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape), model.layers[0].shapes)
    x = jnp.asarray(rng.standard_normal((2, 5, WIDTH)), jnp.float32)
    batch = {"targets": jnp.ones((2, 5), jnp.int32)}
    batch["row_seeds"] = jnp.asarray([[7, 1, 0], [7, 1, 1]], jnp.uint32)

    @jax.jit
    def run(x, batch):
        with jax.numpy_rank_promotion("allow"):
            return model.layer_fns[0](params, x, batch)

    both = run(x, batch)
    rows = [run(x[n : n + 1], {k: v[n : n + 1] for k, v in batch.items()}) for n in range(2)]
    assert isinstance(both, LayerOutput)
    assert both.aux.shape == ()
    np.testing.assert_allclose(both.aux, rows[0].aux + rows[1].aux, rtol=1e-6)
    np.testing.assert_allclose(both.x, jnp.concatenate([row.x for row in rows]), rtol=1e-6)
    # And on any number of devices.
    batches = [{"input_ids": a, "labels": a} for a in rng.integers(0, 41, (2, 6, 7), np.int32)]
    losses = [
        train_with_adamw(
            slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=0.3), **parts, dropout=True),
            batches,
            devices=devices,
        )[0]
        for devices in (1, 3)
    ]
    np.testing.assert_allclose(*losses, rtol=2e-6)


def changed(change):
    """The toy's layer with its loss replaced."""

    def layer(params, x, batch):
        y, aux = aux_layer(params, x, batch)
        return y, change(aux, x, batch)

    return layer


MEANS = {
    "over_rows": lambda aux, x, batch: aux / x.shape[0],
    "over_supervised_tokens": lambda aux, x, batch: (
        aux / jnp.maximum(jnp.sum(batch["targets"] >= 0), 1)
    ),
    "of_everything": lambda aux, x, batch: 0 * aux + jnp.mean(jnp.square(x)),
    "of_a_product_of_means": lambda aux, x, batch: 0 * aux + jnp.sum(jnp.mean(x, axis=(0, 1)) ** 2),
}


@pytest.mark.parametrize("mean", MEANS)
def test_means_are_no_sums_over_rows(mean):
    with pytest.raises(UserError, match=r"layer at layers.0 is no sum over rows.*no mean"):
        adapt(("aux",), best, layer=changed(MEANS[mean]))


def test_rows_that_fill_up_must_not_count():
    def everything(aux, x, batch):
        return jnp.sum(jnp.square(x))

    with pytest.raises(UserError, match=r"layer at layers.0 is 5.*fills up.*targets'\] >= 0"):
        adapt(("plain",), best, layer=changed_plain(everything))

    def packed(aux, x, batch):
        return jnp.sum(jnp.square(x) * (batch["segment_ids"] > 0)[..., None])

    adapt(("plain",), best, layer=changed_plain(packed), packed=True)


def changed_plain(loss):
    return lambda params, x, batch: (toy_layers.dense(params["w"], x), loss(None, x, batch))


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda x: (x, jnp.sum(x, dtype=jnp.bfloat16)), "auxiliary loss of layer at .*bfloat16"),
        (lambda x: (x, jnp.sum(x, axis=(1, 2))), r"returned \('float32.*one float32 number"),
        (lambda x: (x, None), r"returned \('float32.*None\).*return x"),
        (lambda x: (jnp.sum(x), x), "return x"),
        (lambda x: (x, jnp.sum(x), jnp.sum(x)), "Only a layer may return two"),
        (lambda x: {"x": x, "aux": jnp.sum(x)}, "must return one array"),
        (lambda x: [x, jnp.sum(x)], "must return one array"),
    ],
    ids=["bf16", "vector", "none", "the_wrong_way_round", "three", "dict", "list"],
)
def test_other_results_are_refused(result, match):
    with pytest.raises(UserError, match=match):
        adapt(("plain",), best, layer=lambda p, x, batch: result(toy_layers.dense(p["w"], x)))


def test_an_embedding_has_no_loss_of_its_own():
    with pytest.raises(UserError, match="embed returned"):
        adapt(("plain",), best, embed=lambda p, batch: (p["table"][batch["input_ids"]], 0.0))
