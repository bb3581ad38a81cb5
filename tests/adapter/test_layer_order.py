"""Layers run in the order of the model, also past ten, where names sorted as text disagree."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lanes import mostly_thorough
from plain_steps import next_token_loss, token_batches
from streamed_steps import strategy
from toy_nnx import sum_of_losses

import slidedp_jax
from slidedp_jax import Trainer, UserError
from slidedp_jax.adapter.paths import by_number

VOCAB, WIDTH, ROWS, TOKENS, RATE = 23, 8, 4, 6, 0.1
MANY = (12, pytest.param(101, marks=pytest.mark.thorough))


def matrices(number: int) -> list[np.ndarray]:
    """One per layer; products of them depend on their order."""
    draws = [np.random.default_rng(i).standard_normal((WIDTH, WIDTH)) for i in range(number)]
    return [(np.eye(WIDTH) + 0.4 * draw / WIDTH**0.5).astype(np.float32) for draw in draws]


def around(layers) -> dict:
    """A tree of parameters with `layers` in it."""
    rng = np.random.default_rng(1234)
    return {
        "table": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
        "stack": layers,
        "out": rng.standard_normal((WIDTH, VOCAB)).astype(np.float32),
    }


def plain_loss(table, layers, out, batch):
    x = table[batch["input_ids"]]
    for matrix in layers:
        x = jnp.tanh(x @ matrix)
    return next_token_loss(x @ out, batch["labels"])


TREES = {
    "list": list,
    "tuple": tuple,
    "numbers as keys": lambda values: dict(enumerate(values)),
    "sorted as text": lambda values: dict(sorted((str(i), v) for i, v in enumerate(values))),
    "names in a jitted tree": lambda values: jax.jit(lambda tree: tree)(
        {f"block_{i}/w": v for i, v in enumerate(values)}
    ),
    "any order": lambda values: {
        f"block_{i}": values[i] for i in np.random.default_rng(0).permutation(len(values))
    },
    "two numbers": lambda values: dict(
        sorted((f"stage_{i // 11}_block_{i % 11}", v) for i, v in enumerate(values))
    ),
    "words, not sorted": lambda values: {
        chr(ord("z") - i // 10) * (1 + i % 10): v for i, v in enumerate(values)
    },
}


def adapted_tree(make, number):
    parts = {
        "embed": lambda p, batch: p["table"][batch["input_ids"]],
        "layer": lambda p, x, batch: jnp.tanh(x @ p),
        "head_loss": lambda p, x, batch: sum_of_losses(x @ p["out"], batch["targets"]),
        "vocab_size": VOCAB,
    }
    layers = make(matrices(number))
    paths = "stack"
    if isinstance(layers, dict) and "/" in str(next(iter(layers))):
        paths = [f"stack.block_{i}/w" for i in range(number)]
    return slidedp_jax.adapt(around(layers), layers=paths, **parts)


class Block(nnx.Module):
    """One matrix."""

    def __init__(self, matrix):
        self.w = nnx.Param(jnp.asarray(matrix))


class Decoder(nnx.Module):
    """Matrices between a table and a projection; where they hang is up to `hang`."""

    def __init__(self, hang, number):
        values = around(None)
        self.table, self.out = nnx.Param(values["table"]), nnx.Param(values["out"])
        hang(self, [Block(matrix) for matrix in matrices(number)])


def hang_attributes(model, blocks):
    for index, block in enumerate(blocks):
        setattr(model, f"block_{index}", block)


MODULES = {
    "nnx list": lambda model, blocks: setattr(model, "stack", nnx.List(blocks)),
    "nnx dict": lambda model, blocks: setattr(
        model, "stack", nnx.Dict(dict(sorted((f"b{i}", b) for i, b in enumerate(blocks))))
    ),
    "nnx attributes": hang_attributes,
}


def adapted_module(hang, number):
    paths = [f"block_{i}" for i in range(number)] if hang is hang_attributes else "stack"
    return slidedp_jax.adapt(
        Decoder(hang, number),
        layers=paths,
        embed=lambda model, batch: model.table[...][batch["input_ids"]],
        layer=lambda block, x, batch: jnp.tanh(x @ block.w[...]),
        head_loss=lambda model, x, batch: sum_of_losses(x @ model.out[...], batch["targets"]),
        vocab_size=VOCAB,
    )


def adapted_hybrid(number):
    """One function per layer, in a mapping that has lost its order."""
    fns = [lambda p, x, batch, i=i: jnp.tanh(x @ p) * (1 + i / 100) for i in range(number)]
    adapted = slidedp_jax.adapt(
        around(TREES["sorted as text"](matrices(number))),
        layers="stack",
        embed=lambda p, batch: p["table"][batch["input_ids"]],
        layer=fns,
        head_loss=lambda p, x, batch: sum_of_losses(x @ p["out"], batch["targets"]),
        vocab_size=VOCAB,
    )
    return adapted


class LinenStack(nn.Module):
    """Blocks that Linen names after the attribute."""

    number: int

    def setup(self):
        self.blocks = [nn.Dense(WIDTH, use_bias=False) for _ in range(self.number)]

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


class LinenDecoder(nn.Module):
    """A stack between a table and a projection."""

    number: int

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(ids)
        x = LinenStack(self.number, name="stack")(x)
        return nn.Dense(VOCAB, use_bias=False, name="out")(x)


def check(adapted, number, loss, parameters, names):
    """Evaluation, and for few layers one step of SGD, against jax.grad of the whole loss."""
    assert [stage.name for stage in adapted.model.layers] == names
    batch = token_batches(VOCAB, ROWS, TOKENS, 1)[0]
    plan = strategy(2, ROWS, layers=1 if number < 50 else 9)
    options = {"max_grad_norm": None, "num_devices": 2, "kernel_form": "whole"}
    with (
        jax.numpy_rank_promotion("allow"),
        Trainer(adapted.model, optax.sgd(RATE), strategy=plan, **options) as trainer,
    ):
        expected, gradients = jax.value_and_grad(loss)(parameters, batch)
        # Single precision through up to 101 layers in another order of sums.
        np.testing.assert_allclose(trainer.evaluate(batch)[0], expected, rtol=1e-5)
        if number < 50:
            np.testing.assert_allclose(trainer.step(batch).loss, expected, rtol=1e-5)
            return trainer.parameters(), jax.tree.map(
                lambda value, gradient: value - RATE * gradient, parameters, gradients
            )
    return None


def assert_trained(result, name_of):
    if result is None:
        return
    trained, wanted = result
    for (path, values), name in zip(
        jax.tree_util.tree_leaves_with_path(wanted), name_of, strict=True
    ):
        np.testing.assert_allclose(
            trained[name], np.asarray(values), rtol=0, atol=1e-5, err_msg=str(path)
        )


def loss_of_lists(parameters, batch):
    return plain_loss(*parameters, batch)


def as_lists(number):
    values = around(None)
    return values["table"], matrices(number), values["out"]


@pytest.mark.parametrize("number", MANY)
@pytest.mark.parametrize(
    "kind", mostly_thorough(TREES, ("list", "sorted as text", "any order", "two numbers"))
)
def test_trees(kind, number):
    adapted = adapted_tree(TREES[kind], number)
    keys = {
        "names in a jitted tree": [f"block_{i}/w" for i in range(number)],
        "any order": [f"block_{i}" for i in range(number)],
        "two numbers": [f"stage_{i // 11}_block_{i % 11}" for i in range(number)],
        "words, not sorted": [chr(ord("z") - i // 10) * (1 + i % 10) for i in range(number)],
    }.get(kind, list(map(str, range(number))))
    names = [f"stack.{key}" for key in keys]
    result = check(adapted, number, loss_of_lists, as_lists(number), names)
    assert_trained(result, ["table", *names, "out"])


@pytest.mark.parametrize("number", MANY)
@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind, number):
    stem = {"nnx list": "stack.", "nnx dict": "stack.b", "nnx attributes": "block_"}[kind]
    names = [f"{stem}{i}" for i in range(number)]
    adapted = adapted_module(MODULES[kind], number)
    result = check(adapted, number, loss_of_lists, as_lists(number), names)
    assert_trained(result, ["table", *(f"{name}.w" for name in names), "out"])


@pytest.mark.parametrize("number", MANY)
@pytest.mark.parametrize("listed", [False, True])
def test_linen(listed, number):
    model = LinenDecoder(number)
    ids = jnp.zeros((1, TOKENS), jnp.int32)
    with jax.numpy_rank_promotion("allow"):
        params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    names = [f"stack.blocks_{i}" for i in range(number)]
    adapted = slidedp_jax.adapt(
        params,
        layers=names if listed else "stack",
        embed=lambda p, batch: p["tokens"]["embedding"][batch["input_ids"]],
        layer=lambda p, x, batch: jnp.tanh(x @ p["kernel"]),
        head_loss=lambda p, x, batch: sum_of_losses(x @ p["out"]["kernel"], batch["targets"]),
        vocab_size=VOCAB,
    )

    def loss(params, batch):
        return next_token_loss(model.apply({"params": params}, batch["input_ids"]), batch["labels"])

    result = check(adapted, number, loss, params, names)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert_trained(
        result, [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    )


@pytest.mark.parametrize("number", MANY)
def test_functions_of_layers_go_with_their_layers(number):
    def loss(parameters, batch):
        table, layers, out = parameters
        x = table[batch["input_ids"]]
        for index, matrix in enumerate(layers):
            x = jnp.tanh(x @ matrix) * (1 + index / 100)
        return next_token_loss(x @ out, batch["labels"])

    names = [f"stack.{i}" for i in range(number)]
    result = check(adapted_hybrid(number), number, loss, as_lists(number), names)
    assert_trained(result, ["table", *names, "out"])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["attention", "feed_forward", "mix"], "as sorted by name, not numbered"),
        (["block_01", "block_1"], "as sorted by name, not numbered"),
        (["up_3", "up_2", "up_1"], "backwards by number"),
    ],
)
def test_an_order_in_doubt_is_asked_for(keys, said):
    with pytest.raises(UserError, match=said) as caught:
        adapted_tree(lambda values: dict(zip(keys, values, strict=True)), len(keys))
    assert f"layers=['stack.{keys[0]}', 'stack.{keys[1]}']" in str(caught.value)


def test_paths_sorted_as_text_are_refused():
    tree = around({f"block_{i}": value for i, value in enumerate(matrices(12))})
    paths = sorted(f"stack.block_{i}" for i in range(12))
    with pytest.raises(UserError, match=r"block_0, stack\.block_1, stack\.block_2, stack\.block_3"):
        slidedp_jax.adapt(
            tree,
            layers=paths,
            embed=lambda p, batch: p["table"][batch["input_ids"]],
            layer=lambda p, x, batch: jnp.tanh(x @ p),
            head_loss=lambda p, x, batch: sum_of_losses(x @ p["out"], batch["targets"]),
            vocab_size=VOCAB,
        )


def test_order_by_number():
    assert by_number(["b10", "b9", "b100"]) == ["b9", "b10", "b100"]
    assert by_number([3, 11, 2]) == [2, 3, 11]
    assert by_number(["a1", "b2"]) is None
    assert by_number(["1", "01"]) is None
    assert by_number(["x", "y"]) is None
