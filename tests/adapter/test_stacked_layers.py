"""Layers stacked along an axis of their arrays: NNX, Linen and plain pytrees.

The reference is the user's own scan over the stack, under jax.grad and plain optax.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_steps import next_token_loss, token_batches
from plain_steps import train as train_plainly
from streamed_steps import adamw, assert_equal_training, strategy, train
from toy_nnx import VOCAB, WIDTH, sum_of_losses

import slidedp_jax
from slidedp_jax import Stacked, Trainer, UserError
from slidedp_jax.adapter.paths import named_leaves

LAYERS, ROWS, TOKENS, STEPS = 12, 4, 8, 3


def batches():
    return token_batches(VOCAB, ROWS, TOKENS, STEPS)


def causal_mean(y):
    return jnp.cumsum(y, axis=1) / jnp.arange(1, y.shape[1] + 1)[None, :, None]


def apart(leaves, path="layers", axis=0):
    """Names and values as the trainer has them."""
    taken = {}
    for name, leaf in leaves.items():
        if not name.startswith(path):
            taken[name] = np.asarray(leaf)
            continue
        for number in range(leaf.shape[axis]):
            part = np.take(np.asarray(leaf), number, axis)
            taken[f"{path}.{number}{name.removeprefix(path)}"] = part
    return taken


class NnxBlock(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(causal_mean(self.down(nnx.gelu(self.up(self.norm(x))))))


class NnxDecoder(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(axis_size=LAYERS)
        def make(rngs):
            return NnxBlock(rngs, rate)

        self.layers = make(rngs)

    def __call__(self, ids):
        x, _ = nnx.scan(lambda x, block: (block(x), None))(self.tokens(ids), self.layers)
        return self.tokens.attend(self.norm(x))


NNX_PARTS = {
    "layers": Stacked("layers"),
    "embed": lambda model, batch: model.tokens(batch["input_ids"]),
    "layer": lambda block, x, batch: block(x),
    "head_loss": lambda model, x, batch: sum_of_losses(
        model.tokens.attend(model.norm(x)), batch["targets"]
    ),
    "vocab_size": VOCAB,
}


def whole_loss(model, batch):
    return next_token_loss(model(batch["input_ids"]), batch["labels"])


def test_an_nnx_model():
    model = NnxDecoder(nnx.Rngs(2))
    adapted = slidedp_jax.adapt(model, **NNX_PARTS, whole_loss=whole_loss)
    assert len(adapted.model.layers) == LAYERS
    assert len(set(adapted.model.layer_fns)) == 1
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def loss(parameters, batch, number):
        own = jax.tree.map(jnp.asarray, rest)
        return whole_loss(nnx.merge(graph, parameters, own), batch)

    plain_losses, plain = train_plainly(loss, parameters, adamw(), batches())
    losses, trained = train(adapted, batches(), devices=3, layers=2)
    plain = named_leaves(nnx.to_pure_dict(plain))
    assert_equal_training(losses, trained, plain_losses, apart(plain))
    assert adapted.write_back(trained) is model
    assert model.layers.up.kernel[...].shape == (LAYERS, WIDTH, 2 * WIDTH)
    held = apart(named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    for name, values in trained.items():
        np.testing.assert_array_equal(held[name], values, err_msg=name)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = causal_mean(nn.Dense(WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(y))), None


class LinenDecoder(nn.Module):
    """Its stack has the axis of the layers where `axis` says, as MaxText's has it second."""

    axis: int = 0

    @nn.compact
    def __call__(self, ids):
        tokens = nn.Embed(VOCAB, WIDTH, name="tokens")
        scanned = nn.scan(
            LinenBlock,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = scanned(name="layers")(tokens(ids), None)
        return tokens.attend(nn.RMSNorm(name="norm")(x))


def linen_parts(axis=0):
    def head_loss(p, x, batch):
        x = nn.RMSNorm().apply({"params": p["norm"]}, x)
        return sum_of_losses(x @ p["tokens"]["embedding"].T, batch["targets"])

    return {
        "layers": Stacked("layers", axis=axis),
        "embed": lambda p, batch: p["tokens"]["embedding"][batch["input_ids"]],
        "layer": lambda p, x, batch: LinenBlock().apply({"params": p}, x, None)[0],
        "head_loss": head_loss,
        "vocab_size": VOCAB,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_linen_model(axis):
    model = LinenDecoder(axis)
    with jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), batches()[0]["input_ids"])["params"]
        assert params["layers"]["Dense_1"]["kernel"].shape[axis] == LAYERS

        def whole(params, batch):
            logits = model.apply({"params": params}, batch["input_ids"])
            return next_token_loss(logits, batch["labels"])

        adapted = slidedp_jax.adapt(params, **linen_parts(axis), whole_loss=whole)
        plain_losses, plain = train_plainly(
            lambda params, batch, number: whole(params, batch), params, adamw(), batches()
        )
    losses, trained = train(adapted, batches(), devices=2, layers=4)
    assert_equal_training(losses, trained, plain_losses, apart(named_leaves(plain), axis=axis))
    new = adapted.write_back(trained)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert new["layers"]["Dense_1"]["bias"].shape == params["layers"]["Dense_1"]["bias"].shape
    held = apart(named_leaves(new), axis=axis)
    np.testing.assert_array_equal(
        held["layers.11.Dense_0.kernel"], trained["layers.11.Dense_0.kernel"]
    )


def plain_layer(p, x):
    return x + jnp.tanh(causal_mean(x) @ p["w"]) * p["gain"][None, None]


def tree(dtype=np.float32):
    """Two layers, one by itself and three more, of NumPy arrays."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.3 * rng.standard_normal(shape)).astype(dtype)

    def stack(number):
        return {"w": draw(number, WIDTH, WIDTH), "gain": draw(number, WIDTH)}

    middle = {"w": draw(WIDTH, WIDTH), "gain": draw(WIDTH)}
    lower, upper = stack(2), stack(3)
    own = {"table": draw(VOCAB, WIDTH), "scale": draw(WIDTH)}
    return own | {"lower": lower, "middle": middle, "upper": upper}


TREE_PARTS = {
    "layers": [Stacked("lower"), "middle", Stacked("upper")],
    "embed": lambda p, batch: p["table"][batch["input_ids"]],
    "layer": lambda p, x, batch: plain_layer(p, x),
    "head_loss": lambda p, x, batch: sum_of_losses(
        (x * p["scale"][None, None]) @ p["table"].T, batch["targets"]
    ),
    "vocab_size": VOCAB,
}


def whole_of_tree(p, batch):
    def run(x, own):
        return plain_layer(own, x), None

    x, _ = jax.lax.scan(run, p["table"][batch["input_ids"]], p["lower"])
    x, _ = jax.lax.scan(run, plain_layer(p["middle"], x), p["upper"])
    return next_token_loss((x * p["scale"][None, None]) @ p["table"].T, batch["labels"])


@pytest.mark.thorough
def test_stacks_and_layers_in_turn():
    params = jax.tree.map(jnp.asarray, tree())
    adapted = slidedp_jax.adapt(params, **TREE_PARTS, whole_loss=whole_of_tree)
    names = [stage.name for stage in adapted.model.layers]
    assert names == ["lower.0", "lower.1", "middle", "upper.0", "upper.1", "upper.2"]
    losses, trained = train(adapted, batches(), devices=1, layers=2)
    plain_losses, plain = train_plainly(
        lambda p, batch, number: whole_of_tree(p, batch), params, adamw(), batches()
    )
    wanted = apart(apart(named_leaves(plain), "lower"), "upper")
    assert_equal_training(losses, trained, plain_losses, wanted)
    right = TREE_PARTS["layer"]
    wrong = [right] * 4 + [lambda p, x, batch: plain_layer(p, 1.01 * x), right]
    with pytest.raises(UserError, match=r"part in the layer at upper\.1"):
        slidedp_jax.adapt(params, **(TREE_PARTS | {"layer": wrong}), whole_loss=whole_of_tree)


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_weights_are_looked_at_where_they_are(kind):
    """The slices share the memory of the user's arrays until the trainer copies them."""
    params = tree() if kind == "numpy" else jax.tree.map(jnp.asarray, tree())
    adapted = slidedp_jax.adapt(params, **TREE_PARTS)
    whole = np.asarray(params["upper"]["w"])
    part = adapted.source.value("upper.2.w")
    assert np.shares_memory(part, whole)
    np.testing.assert_array_equal(part, whole[2])
    np.testing.assert_array_equal(adapted.model.initial_value("upper.2.w", (), 0), whole[2])


def test_weights_come_back_as_they_were():
    params = tree(dtype=np.float16)
    adapted = slidedp_jax.adapt(params, **TREE_PARTS, check_loss=False)
    names = [name for stage in adapted.model.stages() for name in stage.parameter_names()]
    start = {name: adapted.model.initial_value(name, (), 0) for name in names}
    new = adapted.write_back({name: values + 1 for name, values in start.items()})
    assert isinstance(new["upper"]["w"], np.ndarray)
    assert new["upper"]["w"].dtype == np.float16
    np.testing.assert_array_equal(new["upper"]["w"], (params["upper"]["w"] + np.float16(1)))
    np.testing.assert_array_equal(params["upper"]["w"], tree(dtype=np.float16)["upper"]["w"])
    with pytest.raises(UserError, match=r"1 are missing \(such as upper\.1\.w\)"):
        adapted.write_back({name: values for name, values in start.items() if name != "upper.1.w"})


def test_a_part_of_a_stack_that_is_not_used_keeps_its_value():
    def layer(p, x, batch):
        return x + jnp.tanh(causal_mean(x) @ p["w"])

    adapted = slidedp_jax.adapt(
        tree(), **(TREE_PARTS | {"layer": layer}), unused=["*.gain"], check_loss=False
    )
    names = [name for stage in adapted.model.stages() for name in stage.parameter_names()]
    new = adapted.write_back({n: adapted.model.initial_value(n, (), 0) + 1 for n in names})
    np.testing.assert_array_equal(new["upper"]["gain"], tree()["upper"]["gain"])
    np.testing.assert_array_equal(new["upper"]["w"], tree()["upper"]["w"] + 1)


def test_a_stack_of_shapes():
    adapted = slidedp_jax.adapt(jax.eval_shape(tree_of_arrays), **TREE_PARTS)
    assert adapted.check(whole_of_tree).loss > 0
    start = {
        name: np.zeros(leaf.shape, np.float32)
        for stage in adapted.model.stages()
        for name, leaf in zip(stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True)
    }
    plan = strategy(1, ROWS, layers=4)
    with Trainer(
        adapted.model, adamw(), strategy=plan, parameters=start, num_devices=1, kernel_form="whole"
    ) as trainer:
        assert trainer.parameters().keys() == start.keys()


def tree_of_arrays():
    return jax.tree.map(jnp.asarray, tree())


def test_dropout_in_a_stack_depends_on_the_layer():
    adapted = slidedp_jax.adapt(NnxDecoder(nnx.Rngs(2), rate=0.5), **NNX_PARTS, dropout=True)
    assert len(set(adapted.model.layer_fns)) == 1
    (layer_fn,) = set(adapted.model.layer_fns)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), adapted.model.layers[0].shapes)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, WIDTH)), jnp.float32)

    def run(index):
        batch = {"targets": jnp.ones((1, 5), jnp.int32), "row_seeds": jnp.ones((1, 3), jnp.uint32)}
        return np.asarray(layer_fn(params, x, batch | {"layer_index": jnp.full(1, index)}))

    np.testing.assert_array_equal(run(3), run(3))
    assert (run(3) != run(4)).any()


def test_what_is_no_stack():
    for layers, match in (
        (Stacked("upper", axis=2), "do not hold the same number of layers along axis 2"),
        (Stacked("upper", axis=-1), "along axis -1"),
        ([Stacked("lower"), Stacked("lower")], "names a layer twice"),
        (Stacked("uppers"), "has no 'uppers'"),
    ):
        with pytest.raises(UserError, match=match):
            slidedp_jax.adapt(tree(), **(TREE_PARTS | {"layers": layers}))
    uneven = tree() | {"upper": {"w": np.ones((3, 2)), "gain": np.ones(2)}}
    with pytest.raises(UserError, match=r"\(3, 2\).*do not hold the same number"):
        slidedp_jax.adapt(uneven, **(TREE_PARTS | {"layers": Stacked("upper")}))
    model = NnxDecoder(nnx.Rngs(2))
    with pytest.raises(UserError, match=r"NnxBlock, not a list.*Stacked\('layers'\)"):
        slidedp_jax.adapt(model, **(NNX_PARTS | {"layers": "layers"}))
    model.layers.gain = nnx.Variable(jnp.ones(WIDTH))
    with pytest.raises(UserError, match=r"12 layers and a state of shape \(16,\)"):
        slidedp_jax.adapt(model, **NNX_PARTS)


def test_a_stack_taken_for_a_list_of_its_modules_is_explained():
    model = LinenDecoder()
    with jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), batches()[0]["input_ids"])["params"]
        parts = linen_parts() | {"layers": ["layers.LayerNorm_0", "layers.Dense_0"]}
        with pytest.raises(Exception, match="Could not find parameter") as raised:
            slidedp_jax.adapt(params, **parts)
    (note,) = [note for note in raised.value.__notes__ if "slidedp_jax" in note]
    assert "called layer(layer, x, batch) for layers.LayerNorm_0" in note
    assert "Pass layers=slidedp_jax.Stacked" in note
    said = (
        r"holds .*LayerNorm_0.* first dimension 12\..*give layers=slidedp_jax\.Stacked\('layers'\)"
    )
    with pytest.raises(UserError, match=said):
        slidedp_jax.adapt(params, **(parts | {"layers": "layers"}))


def test_a_stack_as_one_layer_is_warned_of(caplog):
    def run_all(p, x, batch):
        return jax.lax.scan(lambda x, own: (plain_layer(own, x), None), x, p)[0]

    params = {name: part for name, part in tree().items() if name not in ("lower", "middle")}
    parts = TREE_PARTS | {"layers": ["upper"], "layer": run_all}
    slidedp_jax.adapt(params, **parts)
    assert "pass layers=slidedp_jax.Stacked('upper')" in caplog.text
