"""Layers that call themselves through nnx.remat, nnx.jit and loops, which change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_layers
from flax import nnx
from plain_steps import next_token_loss, token_batches
from plain_steps import train as train_plainly
from streamed_steps import adamw, assert_equal_training, train
from toy_layers import ErringHost, plan
from toy_nnx import PARTS, VOCAB, WIDTH, Hybrid

import slidedp_jax
from slidedp_jax import UserError
from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.models.named_results import decided


def base(block, x):
    return block(x)


LIFTED = {
    "remat": lambda block, x: nnx.remat(base)(block, x),
    "jit": lambda block, x: nnx.jit(base)(block, x),
    "jit of remat": lambda block, x: nnx.jit(nnx.remat(base))(block, x),
    "scan": lambda block, x: nnx.scan(
        base, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=1
    )(block, x),
    "cond": lambda block, x: nnx.cond(jnp.sum(x) > 1e9, lambda _, x: x, base, block, x),
}


def parts(lifted):
    return PARTS | {"layer": lambda block, x, batch: LIFTED[lifted](block, x)}


@pytest.mark.parametrize("lifted", LIFTED)
def test_they_are_accepted(lifted):
    model = Hybrid(nnx.Rngs(1))
    adapted = slidedp_jax.adapt(
        model,
        **parts(lifted),
        whole_loss=lambda model, batch: next_token_loss(model(batch["input_ids"]), batch["labels"]),
    )
    assert len(set(adapted.model.layer_fns)) == 2


def test_training_is_that_of_the_module():
    batches = token_batches(VOCAB, 6, 9, 3)
    model = Hybrid(nnx.Rngs(1))
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def loss(parameters, batch, number):
        whole = nnx.merge(graph, parameters, rest)
        return next_token_loss(whole(batch["input_ids"]), batch["labels"])

    plain_losses, plain = train_plainly(loss, parameters, adamw(), batches)
    adapted = slidedp_jax.adapt(model, **parts("remat"))
    losses, trained = train(adapted, batches, devices=3, layers=2)
    assert_equal_training(losses, trained, plain_losses, named_leaves(nnx.to_pure_dict(plain)))


@pytest.mark.thorough
def test_dropout_in_them_is_that_of_the_layer_itself():
    batches = token_batches(VOCAB, 3, 9, 2)
    results = [
        train(
            slidedp_jax.adapt(Hybrid(nnx.Rngs(1), rate=0.4), **chosen, dropout=True),
            batches,
            devices=1,
            seed=5,
        )
        for chosen in (PARTS, parts("remat"), parts("jit"))
    ]
    losses, weights = results[0]
    for other_losses, other_weights in results[1:]:
        np.testing.assert_allclose(other_losses, losses, rtol=2e-6)
        assert other_weights.keys() == weights.keys()
    still = train(slidedp_jax.adapt(Hybrid(nnx.Rngs(1)), **PARTS), batches, devices=1)[0]
    assert abs(still[0] - losses[0]) > 1e-3


class Counting(nnx.Module):
    """A layer with running statistics and a weight that it may scale."""

    def __init__(self, rngs, scales=False):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.scales = scales

    def __call__(self, x):
        if self.scales:
            self.linear.kernel[...] = self.linear.kernel[...] * 0.5
        return self.linear(self.norm(x))


@pytest.mark.parametrize("lifted", ["remat", "jit", "jit of remat"])
def test_what_does_change_in_them_is_refused(lifted):
    model = Hybrid(nnx.Rngs(1))
    model.blocks = nnx.List([Counting(nnx.Rngs(0))])
    with pytest.raises(UserError, match=r"changed the module's state.*norm\.mean \(BatchStat\)"):
        slidedp_jax.adapt(model, **parts(lifted))
    model.blocks = nnx.List([Counting(nnx.Rngs(0), scales=True)])
    model.eval()
    with pytest.raises(UserError, match=r"running: linear\.kernel \(Param\)\. Streamed"):
        slidedp_jax.adapt(model, **parts(lifted))
    model.blocks = nnx.List([Counting(nnx.Rngs(0))])
    model.eval()
    slidedp_jax.adapt(model, **parts(lifted))


def test_random_numbers_without_dropout_are_noticed_in_them():
    model = Hybrid(nnx.Rngs(1), rate=0.4)
    model.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="layer draws random numbers"):
        slidedp_jax.adapt(model, **parts("remat"))


@pytest.mark.parametrize("kept", [0, 2])
def test_choices_in_a_recomputed_function_are_not_made_again(kept):
    host = ErringHost()

    def router(params, x, batch):
        @jax.checkpoint
        def run(params, x):
            counts = batch["targets"] >= 0
            return toy_layers.router_layer(params, x, counts, lambda s: decided(host(s)))

        return run(params, x)

    values = toy_layers.initial_parameters(("router", "router"))
    names = toy_layers.SHAPES["router"]
    model = slidedp_jax.adapt(
        {
            "table": values["embed.table"],
            "layers": [{name: values[f"layers.{n}.{name}"] for name in names} for n in range(2)],
            **{name: values[name] for name in ("scale", "out")},
        },
        layers="layers",
        embed=lambda p, batch: p["table"][batch["input_ids"]],
        layer=router,
        head_loss=lambda p, x, batch: toy_layers.head_loss(p, x, batch["targets"]),
        vocab_size=toy_layers.VOCAB,
        check_loss=False,
    ).model
    toy_layers.train(model, plan(1, 1, kept, 1), 1)
    assert host.asked_again == 0
