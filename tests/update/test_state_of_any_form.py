"""Transformations that treat each parameter by itself, whatever they keep of it: as plain optax.

The model's layers have square matrices, whose row statistics have the matrix's own shape.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from optax import contrib
from toy_layers import batches, initial_parameters, plain_losses, plan, streamed

from slidedp_jax import Trainer, UserError
from slidedp_jax.update.decompose import DecomposedOptimizer
from slidedp_jax.update.leaf_programs import owners_of
from slidedp_jax.update.treatments import Treatments

RATE = 1e-2
KINDS = ("plain", "aux")
SHAPES = {name: values.shape for name, values in initial_parameters(KINDS).items()}


def matrix(x):
    return x if x.ndim == 2 else x.reshape(-1, 1)


class Shampoo(typing.NamedTuple):
    left: typing.Any


def shampoo():
    """One-sided: L += G G^T, update L^-1 G."""

    def init(params):
        return Shampoo(jax.tree.map(lambda p: jnp.eye(matrix(p).shape[0]), params))

    def update(gradients, state, params=None):
        left = jax.tree.map(lambda old, g: old + matrix(g) @ matrix(g).T, state.left, gradients)
        updates = jax.tree.map(
            lambda own, g: -RATE * jnp.linalg.solve(own, matrix(g)).reshape(g.shape),
            left,
            gradients,
        )
        return updates, Shampoo(left)

    return optax.GradientTransformation(init, update)


class SoapState(typing.NamedTuple):
    count: typing.Any
    left: typing.Any
    basis: typing.Any
    second: typing.Any


def soap(every=2):
    """Adam's second moment in a basis that is made anew every few steps."""

    def init(params):
        eye = jax.tree.map(lambda p: jnp.eye(matrix(p).shape[0]), params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SoapState(jnp.zeros((), jnp.int32), eye, eye, zeros)

    def update(gradients, state, params=None):
        left = jax.tree.map(
            lambda old, g: 0.9 * old + 0.1 * matrix(g) @ matrix(g).T, state.left, gradients
        )

        def anew(basis, left):
            return jax.lax.cond(
                state.count % every == 0, lambda: jnp.linalg.qr(left @ basis)[0], lambda: basis
            )

        basis = jax.tree.map(anew, state.basis, left)
        turned = jax.tree.map(lambda q, g: (q.T @ matrix(g)).reshape(g.shape), basis, gradients)
        second = jax.tree.map(lambda v, r: 0.9 * v + 0.1 * r * r, state.second, turned)
        updates = jax.tree.map(
            lambda q, r, v: -RATE * (q @ matrix(r / (jnp.sqrt(v) + 1e-4))).reshape(r.shape),
            basis,
            turned,
            second,
        )
        return updates, SoapState(state.count + 1, left, basis, second)

    return optax.GradientTransformation(init, update)


class Quantized(typing.NamedTuple):
    whole: typing.Any
    scale: typing.Any


def eight_bit_momentum(block=16):
    """Momentum as int8 in blocks with a scale each, both in one tuple for each parameter."""

    def encode(x):
        flat = jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
        scale = jnp.max(jnp.abs(flat), axis=1, keepdims=True) / 127 + 1e-12
        return Quantized(jnp.round(flat / scale).astype(jnp.int8), scale)

    def decode(q, like):
        return (q.whole * q.scale).reshape(-1)[: like.size].reshape(like.shape)

    def init(params):
        return {"momentum": jax.tree.map(lambda p: encode(jnp.zeros_like(p)), params)}

    def update(gradients, state, params=None):
        moved = jax.tree.map(
            lambda q, g: 0.9 * decode(q, g) + g,
            state["momentum"],
            gradients,
            is_leaf=lambda node: isinstance(node, Quantized),
        )
        updates = jax.tree.map(lambda m: -RATE * m, moved)
        return updates, {"momentum": jax.tree.map(encode, moved)}

    return optax.GradientTransformation(init, update)


def one_cond():
    """Momentum that begins after two steps, decided once for the whole tree."""

    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)

    def update(gradients, state, params=None):
        count, momentum = state
        momentum = jax.lax.cond(
            count < 2,
            lambda: gradients,
            lambda: jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients),
        )
        return jax.tree.map(lambda m: -RATE * m, momentum), (count + 1, momentum)

    return optax.GradientTransformation(init, update)


def own_noise():
    """Each parameter draws from a key of its own, kept as integers."""

    def init(params):
        keys = jax.random.split(jax.random.key(0), len(params))
        return dict(zip(sorted(params), jax.random.key_data(keys), strict=True))

    def update(gradients, state, params=None):
        keys = {name: jax.random.split(jax.random.wrap_key_data(k)) for name, k in state.items()}
        updates = {
            name: -RATE * (g + 0.1 * jax.random.normal(keys[name][0], g.shape))
            for name, g in gradients.items()
        }
        return updates, {name: jax.random.key_data(pair[1]) for name, pair in keys.items()}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "shampoo": shampoo,
    "soap": soap,
    "eight bits": eight_bit_momentum,
    "one cond": one_cond,
    "own noise": own_noise,
    "sm3": lambda: optax.sm3(RATE),
    "novograd": lambda: optax.novograd(RATE),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
}
BLOCKS = {"one cond": set(SHAPES), "multi_steps": set(SHAPES), "sm3": {"scale"}}
"""Parameters that are updated in blocks."""


@functools.cache
def gradients_of():
    def loss(params, batch):
        return plain_losses(KINDS, params, batch["input_ids"], batch["labels"])[0]

    return jax.jit(jax.value_and_grad(loss))


def trained_plainly(optimizer):
    params = {name: jnp.asarray(values) for name, values in initial_parameters(KINDS).items()}
    state, losses = optimizer.init(params), []
    step = jax.jit(optimizer.update)
    for batch in batches():
        loss, gradients = gradients_of()(params, batch)
        updates, state = step(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize("name", mostly_thorough(OPTIMIZERS, ("shampoo", "novograd")))
def test_steps_are_those_of_plain_optax(name, tmp_path):
    make = OPTIMIZERS[name]
    treatments = Treatments(make(), SHAPES)
    assert {*treatments.whole_parameters} == SHAPES.keys() - BLOCKS.get(name, set())
    plain_losses, plain = trained_plainly(make())
    strategy = plan(2, 1, 0, 2)
    options = {"max_grad_norm": None, "num_devices": 2, "kernel_form": "whole"}
    start = initial_parameters(KINDS)
    rows = batches()
    with Trainer(streamed(KINDS), make(), strategy=strategy, parameters=start, **options) as it:
        losses = [it.step(batch).loss for batch in rows[:2]]
        folder = it.save(tmp_path)
    with Trainer(streamed(KINDS), make(), strategy=strategy, parameters=start, **options) as it:
        it.restore(folder)
        losses += [it.step(batch).loss for batch in rows[2:]]
        trained = it.parameters()
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for key, values in plain.items():
        moved = np.abs(values - start[key]).max()
        assert moved > 0, key
        np.testing.assert_allclose(trained[key], values, rtol=0, atol=0.01 * moved, err_msg=key)


REFUSED = {
    "lookahead": (lambda: optax.lookahead(optax.adam(RATE), 2, 0.5), "second set of weights"),
    "reduce_on_plateau": (
        lambda: optax.chain(optax.adam(RATE), contrib.reduce_on_plateau()),
        "'value'.*set between steps",
    ),
    "momo": (lambda: contrib.momo(RATE), "'value'"),
    "one_loop": (lambda: one_loop(), "in one loop, which cannot be taken apart"),
}


def one_loop():
    def update(gradients, state, params=None):
        return jax.lax.fori_loop(
            0, 2, lambda _, g: jax.tree.map(lambda x: 0.5 * x, g), gradients
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("name", REFUSED)
def test_the_true_reason_is_given(name):
    make, match = REFUSED[name]
    with pytest.raises(UserError, match=match):
        DecomposedOptimizer(make(), SHAPES)


def test_whose_state_it_is():
    names = {"a": 0, "b": 0}
    one, count = np.ones(3, np.float32), np.int32(0)
    state = {
        "momentum": {"a": Quantized(one, one), "b": one},
        "count": count,
        "labels": {"a": {"count": count, "mu": {"a": one}}, "b": {"mu": {"b": [one, one]}}},
        "alone": {"a": {"rate": np.float32(1), "count": count}},
    }
    assert owners_of(state, names) == [
        *(None, "a"),  # alone: the count, the rate
        None,
        *(None, "a", "b", "b"),  # labels
        *("a", "a", "b"),
    ]


def test_starting_states_of_their_own_are_kept_apart():
    """Large constants that differ beyond what NumPy shows of them, and one that reads another."""

    def starting_at(of):
        def init(params):
            return {name: of(name, params) for name in params}

        return optax.GradientTransformation(
            init, lambda g, state, params=None: (jax.tree.map(jnp.add, g, state), state)
        )

    shapes = {"a": (64, 64), "b": (64, 64)}
    large = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    large["b"][30, 30] = 1
    apart = DecomposedOptimizer(starting_at(lambda name, _: jnp.asarray(large[name])), shapes)
    assert apart.groups == {"a": 0, "b": 1}
    alike = DecomposedOptimizer(starting_at(lambda name, params: 2 * params[name]), shapes)
    assert alike.groups == {"a": 0, "b": 0}
    with pytest.raises(UserError, match=r"update of b reads other parameters \(such as a\)"):
        DecomposedOptimizer(starting_at(lambda name, params: params["a"]), shapes)
