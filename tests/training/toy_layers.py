"""Small layers with losses of their own and with choices, and the plain training of their models.

A model is a tuple of kinds of layers, bottom first. Parameters are a flat dict by full name.
Gradients are compared as such, since AdamW would hide a wrong scale: with plain SGD a step's
gradient is what the weights have lost. Both sides compute in fp32 and sum in different orders.
Letters: B rows, T tokens, D hidden, E experts, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from streamed_training import strategy

from slidedp_jax import Trainer
from slidedp_jax.models.named_results import decided
from slidedp_jax.models.streamed import LayerOutput, Stage, StreamedModel

VOCAB, WIDTH, EXPERTS, CHOSEN = 29, 8, 5, 2
IGNORED = -100
ROWS, TOKENS, RATE = 11, 6, 0.5  # a row fills up on three devices or in two microbatches
OPTIMIZER = optax.sgd(RATE)
SHAPES = {
    "plain": {"w": (WIDTH, WIDTH)},
    "aux": {"v": (WIDTH, 3), "w": (WIDTH, WIDTH)},
    "router": {"experts": (EXPERTS, WIDTH, WIDTH), "gate": (WIDTH, EXPERTS)},
}


def dense(w, x):
    return x + jnp.tanh(x @ w)


def aux_layer(layer, x, counts):
    """Penalises what `v` sees of x."""
    seen = jnp.sum((x @ layer["v"]).astype(jnp.float32) ** 2, axis=-1)
    return dense(layer["w"], x), 0.05 * jnp.sum(seen * counts)


def router_layer(layer, x, counts, choose):
    """The experts that `choose(scores)` names, int32 [B, T, k], by their scores."""
    scores = jax.nn.softmax(x @ layer["gate"], axis=-1)
    chosen = choose(lax.stop_gradient(scores))
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    every = jnp.tanh(jnp.einsum("btd,edf->btef", x, layer["experts"]))
    mixed = jnp.take_along_axis(every, chosen[..., None], axis=2) * weights[..., None]
    loss = jnp.sum((weights.astype(jnp.float32) ** 2).sum(axis=-1) * counts)
    return x + mixed.sum(axis=2), 0.2 * loss


def best(scores):
    return lax.top_k(scores, CHOSEN)[1]


class ErringHost:
    """The best by score, chosen on the host, and others when it is asked the same again."""

    def __init__(self):
        self.asked_again = 0
        self._asked = set()

    def __call__(self, scores):
        result = jax.ShapeDtypeStruct((*scores.shape[:-1], CHOSEN), jnp.int32)
        return jax.pure_callback(self._answer, result, scores)

    def _answer(self, scores):
        scores = np.asarray(scores)
        order = np.argsort(-scores, axis=-1)[..., :CHOSEN].astype(np.int32)
        if scores.tobytes() not in self._asked:
            self._asked.add(scores.tobytes())
            return order
        self.asked_again += 1
        return (order + 1) % EXPERTS


def head_loss(head, x, targets):
    logits = (x * head["scale"][None, None]) @ head["out"]
    index = jnp.maximum(targets, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), index)
    return jnp.sum(losses * (targets >= 0))


def initial_value(name, shape, seed):
    draw = np.random.default_rng([seed, *name.encode()]).standard_normal(shape)
    return (1 + 0.1 * draw if name == "scale" else 0.5 * draw).astype(np.float32)


def streamed(kinds, choose=lambda scores: decided(best(scores))) -> StreamedModel:
    """The model as the runtime sees it; `choose` is the routers'."""

    def plain_fn(layer, x, batch):
        return dense(layer["w"], x)

    def aux_fn(layer, x, batch):
        return LayerOutput(*aux_layer(layer, x, batch["targets"] >= 0))

    def router_fn(layer, x, batch):
        return LayerOutput(*router_layer(layer, x, batch["targets"] >= 0, choose))

    fns = {"plain": plain_fn, "aux": aux_fn, "router": router_fn}
    return StreamedModel(
        embed=Stage(name="embed", shapes=as_shapes({"table": (VOCAB, WIDTH)})),
        layers=tuple(
            Stage(name=f"layers.{n}", shapes=as_shapes(SHAPES[kind]))
            for n, kind in enumerate(kinds)
        ),
        head=Stage(name="", shapes=as_shapes({"scale": (WIDTH,), "out": (WIDTH, VOCAB)})),
        embed_fn=lambda params, batch: params["table"][batch["input_ids"]],
        layer_fns=tuple(fns[kind] for kind in kinds),
        head_loss_fn=lambda head, embed, x, batch: head_loss(head, x, batch["targets"]),
        head_logits_fn=lambda head, embed, x: x @ head["out"],
        tied=False,
        vocab_size=VOCAB,
        initial_value=initial_value,
    )


def as_shapes(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def initial_parameters(kinds):
    model = streamed(kinds)
    return {
        name: initial_value(name, shape.shape, 0)
        for stage in model.stages()
        for name, shape in zip(stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True)
    }


def batches():
    """Three steps of rows with unsupervised tokens."""
    rng = np.random.default_rng(4)
    shape = (3, ROWS, TOKENS)
    ids = rng.integers(0, VOCAB, shape, dtype=np.int32)
    labels = np.where(rng.random(shape) < 0.3, IGNORED, ids).astype(np.int32)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def plain_losses(kinds, params, input_ids, labels):
    """Loss per supervised token of the whole batch, and the layers' own part of it."""
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
    counts, x, aux = targets >= 0, params["embed.table"][input_ids], 0.0
    for n, kind in enumerate(kinds):
        layer = {name: params[f"layers.{n}.{name}"] for name in SHAPES[kind]}
        if kind == "plain":
            x = dense(layer["w"], x)
            continue
        own = functools.partial(router_layer, choose=best) if kind == "router" else aux_layer
        x, more = own(layer, x, counts)
        aux += more
    total = head_loss(params, x, targets) + aux
    return total / jnp.sum(counts), aux / jnp.sum(counts)


def train_plainly(kinds, frozen=()):
    """One step per batch: per step (loss, own part, gradients), and the last parameters."""
    params = {name: jnp.asarray(value) for name, value in initial_parameters(kinds).items()}
    state = OPTIMIZER.init(params)

    @jax.jit
    def step(params, state, batch):
        (loss, aux), gradients = jax.value_and_grad(
            lambda p: plain_losses(kinds, p, batch["input_ids"], batch["labels"]), has_aux=True
        )(params)
        gradients = {n: 0 * g if n in frozen else g for n, g in gradients.items()}
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, (loss, aux, gradients)

    steps = []
    for batch in batches():
        params, state, figures = step(params, state, batch)
        steps.append(figures)
    return steps, params


def plan(devices, microbatches, kept, layers, **changes):
    return strategy(
        rows_per_microbatch=-(-ROWS // (devices * microbatches)),
        num_microbatches=microbatches,
        kept_chunks=kept,
        layers_per_chunk=layers,
        num_host_devices=2 * devices,
        block_size=64,
        **changes,
    )


def trainer(model, plan, devices, **options):
    options = {"max_grad_norm": None, "kernel_form": "whole"} | options
    return Trainer(model, OPTIMIZER, strategy=plan, num_devices=devices, **options)


def train(model, plan, devices, **options):
    """Per step (loss, own part, weights lost by name); the last weights."""
    with trainer(model, plan, devices, **options) as it:
        steps, before = [], it.parameters()
        for batch in batches():
            metrics = it.step(batch)
            after = it.parameters()
            lost = {name: before[name] - after[name] for name in before}
            steps.append((metrics.loss, metrics.aux_loss, lost))
            before = after
        return steps, before


def assert_equal(run, plain):
    (steps, parameters), (plain_steps, plain_parameters) = run, plain
    for (loss, aux, lost), (plain_loss, plain_aux, gradients) in zip(
        steps, plain_steps, strict=True
    ):
        np.testing.assert_allclose(loss, plain_loss, rtol=2e-6)
        np.testing.assert_allclose(aux, plain_aux, rtol=2e-6)
        for name, gradient in gradients.items():
            # Weights around 1 lose 2e-7 by rounding.
            np.testing.assert_allclose(lost[name], RATE * gradient, atol=1e-6, err_msg=name)
    for name, values in plain_parameters.items():
        np.testing.assert_allclose(parameters[name], values, atol=2e-6, err_msg=name)
