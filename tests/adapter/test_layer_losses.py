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
    EXPERTS,
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
        square = jnp.square(y - x).astype(jnp.float32) * (batch["targets"] >= 0)[..., None]
        return y, 0.1 * jnp.sum(square), {"squares": jnp.sum(square, axis=(0, 1))}

    parts = PARTS | {"layer": layer}
    parts["loss_of_sums"] = lambda layers: sum(jnp.sum(s["squares"]) ** 2 for s in layers) / 1e4
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
    np.testing.assert_allclose(
        both.sums["squares"], rows[0].sums["squares"] + rows[1].sums["squares"], rtol=1e-6
    )
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


COEFFICIENT = 0.7


def balance_sums(params, x, batch, counts=None):
    """Visits and mean scores of the experts, over the tokens that count."""
    counts = (batch["targets"] >= 0) if counts is None else counts
    scores = jax.nn.softmax(x @ params["gate"], axis=-1).astype(jnp.float32)
    visits = jax.nn.one_hot(best(scores), EXPERTS).sum(axis=2) * counts[..., None]
    return {
        "scores": jnp.sum(scores * counts[..., None], axis=(0, 1)),
        "visits": jax.lax.stop_gradient(jnp.sum(visits, axis=(0, 1))),
        "tokens": jnp.sum(counts, dtype=jnp.float32),
    }


def balance(layers):
    """The usual one of each layer; no sum over tokens."""
    losses = [jnp.sum(s["scores"] * s["visits"]) / s["tokens"] ** 2 for s in layers]
    loss = COEFFICIENT * EXPERTS * sum(losses)
    return loss, {"balance": loss}


def balanced_router(params, x, batch):
    y, aux = toy_layers.router_layer(
        params, x, batch["targets"] >= 0, lambda scores: decided(best(scores))
    )
    return y, aux, balance_sums(params, x, batch)


def plain_balanced_losses(kinds, params, input_ids, labels):
    """`toy_layers.plain_losses` and the balance of its routers over all rows at once."""
    loss, aux = toy_layers.plain_losses(kinds, params, input_ids, labels)
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    x, sums = params["embed.table"][input_ids], []
    for n, kind in enumerate(kinds):
        layer = {name: params[f"layers.{n}.{name}"] for name in SHAPES[kind]}
        if kind == "router":
            sums.append(balance_sums(layer, x, {"targets": targets}))
            x = toy_layers.router_layer(layer, x, targets >= 0, best)[0]
        else:
            x = toy_layers.dense(layer["w"], x)
    return loss + balance(sums)[0], aux


@pytest.mark.parametrize(
    ("devices", "micro", "kept", "layers"),
    [(3, 2, 1, 1), pytest.param(1, 2, 0, 3, marks=pytest.mark.thorough)],
)
def test_a_balance_over_the_whole_step_is_that_of_plain_optax(devices, micro, kept, layers):
    kinds = ("router", "plain", "router")
    fns = {"plain": lambda p, x, batch: toy_layers.dense(p["w"], x), "router": balanced_router}
    model = adapt(kinds, best, layer=[fns[kind] for kind in kinds], loss_of_sums=balance)
    steps, _ = train(model, plan(devices, micro, kept, layers), devices)
    params = {name: jnp.asarray(value) for name, value in initial_parameters(kinds).items()}
    compute = jax.jit(
        jax.value_and_grad(
            lambda p, batch: plain_balanced_losses(kinds, p, batch["input_ids"], batch["labels"])[0]
        )
    )
    for (loss, _, lost), batch in zip(steps, toy_layers.batches(), strict=True):
        expected, gradients = compute(params, batch)
        np.testing.assert_allclose(loss, expected, rtol=2e-6)
        for name, gradient in gradients.items():
            own = lost[name.replace("embed.table", "table")]
            np.testing.assert_allclose(own, toy_layers.RATE * gradient, atol=1e-6, err_msg=name)
        params = {n: params[n] - toy_layers.RATE * gradient for n, gradient in gradients.items()}


def test_the_check_against_the_models_own_pass_knows_of_it():
    kinds = ("router",)

    def whole_loss(tree, batch):
        params = {f"layers.0.{name}": value for name, value in tree["layers"][0].items()}
        params |= {"embed.table": tree["table"], "scale": tree["scale"], "out": tree["out"]}
        return plain_balanced_losses(kinds, params, batch["input_ids"], batch["labels"])[0]

    parts = {"layer": balanced_router, "whole_loss": whole_loss}
    adapt(kinds, best, **parts, loss_of_sums=balance)
    with pytest.raises(UserError, match=r"They part in head_loss or loss_of_sums"):
        adapt(kinds, best, **parts, loss_of_sums=lambda layers: 2 * balance(layers)[0])


@pytest.mark.parametrize(
    ("sums", "match"),
    [
        (lambda s, x, b: {"mean": jnp.mean(x)}, r"'mean' of the layer at layers.0 is no sum"),
        (lambda s, x, b: {"all": jnp.sum(x**2)}, "'all' of the layer at layers.0 is not 0"),
        (lambda s, x, b: {"half": jnp.sum(x, dtype=jnp.bfloat16)}, "sums of layer at .*bfloat16"),
    ],
)
def test_sums_that_are_none_are_refused(sums, match):
    def layer(params, x, batch):
        return toy_layers.dense(params["w"], x), None, sums(None, x, batch)

    def loss(layers):
        return jnp.float32(0)

    with pytest.raises(UserError, match=match):
        adapt(("plain",), best, layer=layer, loss_of_sums=loss)


def test_sums_and_what_they_are_for_come_together():
    with pytest.raises(UserError, match="give loss_of_sums, or return"):
        adapt(("router",), best, layer=balanced_router)
    with pytest.raises(UserError, match="no layer returns"):
        adapt(("plain",), best, loss_of_sums=balance)


def test_an_embedding_has_no_loss_of_its_own():
    with pytest.raises(UserError, match="embed returned"):
        adapt(("plain",), best, embed=lambda p, batch: (p["table"][batch["input_ids"]], 0.0))
