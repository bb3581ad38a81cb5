"""Models that do not fit are refused with what was found and what to change."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import InvalidRngError
from streamed_steps import adamw, strategy
from toy_nnx import PARTS, VOCAB, WIDTH, Hybrid, Mixer, embed, head_loss, sum_of_losses

import slidedp_jax
from slidedp_jax import Trainer, UserError


def refused(model, match: str, **changes) -> None:
    with pytest.raises(UserError, match=match):
        slidedp_jax.adapt(model, **(PARTS | changes))


class Changing(nnx.Module):
    """A layer that changes something while it runs."""

    def __init__(self, rngs, kind):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if kind == "batch_norm" else None
        self.calls = nnx.Variable(jnp.zeros(())) if kind == "counter" else None
        self.kind = kind

    def __call__(self, x):
        if self.norm is not None:
            x = self.norm(x)
        if self.calls is not None:
            self.calls[...] = self.calls[...] + 1
        if self.kind == "sow":
            self.sow(nnx.Intermediate, "hidden", x)
        if self.kind == "parameter":
            self.linear.kernel[...] = self.linear.kernel[...] * 0.5
        return self.linear(x)


def test_the_rests_weight_used_in_a_layer():
    model = Hybrid(nnx.Rngs(0))
    model.blocks[1].norm_of_all = model.norm
    model.a_norm = model.norm
    refused(model, r"blocks\.1\.norm_of_all\.scale and a_norm\.scale are one parameter")


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("batch_norm", r"norm\.mean \(BatchStat\)"),
        ("counter", r"calls \(Variable\)"),
        ("sow", r"hidden \(Intermediate\)"),
        ("parameter", r"linear\.kernel \(Param\)"),
    ],
)
def test_state_that_changes_in_the_forward_pass(kind, named):
    model = Hybrid(nnx.Rngs(0))
    model.blocks = nnx.List([Changing(nnx.Rngs(0), kind)])
    refused(model, f"layer changed the module's state.*{named}.*LayerNorm")


def test_frozen_statistics_are_allowed():
    model = Hybrid(nnx.Rngs(0))
    model.blocks = nnx.List([Changing(nnx.Rngs(0), "batch_norm") for _ in range(2)])
    model.eval()
    adapted = slidedp_jax.adapt(model, **PARTS)
    assert adapted.model.layer_fns[0] is adapted.model.layer_fns[1]
    model.blocks[1].norm.mean[...] = jnp.ones(WIDTH)
    adapted = slidedp_jax.adapt(model, **PARTS)
    assert adapted.model.layer_fns[0] is not adapted.model.layer_fns[1]


def test_weights_shared_between_layers():
    model = Hybrid(nnx.Rngs(0))
    model.blocks[2] = model.blocks[0]
    refused(model, r"blocks\.0\.\S+ and blocks\.2\.\S+ are one parameter.*own nnx\.Param")


def test_a_layers_weight_used_elsewhere():
    model = Hybrid(nnx.Rngs(0))
    model.norm = model.blocks[0].norm
    refused(model, r"head_loss reads blocks\.0\.norm\.scale, which a layer owns")


def test_a_layers_weight_read_by_the_head():
    def head(model, x, batch):
        return head_loss(model, x + model.blocks[0].norm.scale[...][None, None], batch)

    refused(Hybrid(nnx.Rngs(0)), r"head_loss reads blocks\.0\.norm\.scale", head_loss=head)


def test_a_parameter_that_nothing_reads():
    model = Hybrid(nnx.Rngs(0))
    model.forgotten = nnx.Param(jnp.ones(3))
    refused(model, "no stage reads forgotten")


def test_layers_left_out_are_parameters_that_nothing_reads():
    paths = ["blocks.0", "blocks.1", "blocks.2"]
    refused(Hybrid(nnx.Rngs(0)), r"no stage reads blocks\.3\.", layers=paths)


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ("layers", "has no 'layers'; it has blocks, "),
        ("blocks.7", "has no '7'"),
        ("norm", "is a RMSNorm, not a list of layers"),
        (["blocks.0", "blocks.0"], "names a layer twice"),
        ([], "holds no layer"),
    ],
)
def test_paths_that_lead_to_no_layers(layers, match):
    refused(Hybrid(nnx.Rngs(0)), match, layers=layers)


def test_random_numbers_without_dropout():
    model = Hybrid(nnx.Rngs(0), rate=0.1)
    refused(model, r"embed draws random numbers.*dropout=True.*model\.eval\(\)")
    model.eval()
    assert not slidedp_jax.adapt(model, **PARTS).model.random


def test_functions_that_return_something_else():
    model = Hybrid(nnx.Rngs(0))
    refused(model, "layer at blocks.0 returned.*return x", layer=lambda b, x, _: (None, b(x)))
    refused(model, r"turned hidden states of shape \(1, 16, 16\)", layer=lambda b, x, _: x[..., :4])
    refused(model, "embed returned", embed=lambda m, batch: embed(m, batch)[0])
    refused(model, "head_loss returned", head_loss=lambda m, x, _: m.logits(x))
    refused(model, "layer= has 1 functions for 4 layers", layer=[lambda b, x, _: b(x)])


def test_a_mean_for_a_loss():
    def mean(model, x, batch):
        return head_loss(model, x, batch) / jnp.maximum(jnp.sum(batch["targets"] >= 0), 1)

    refused(Hybrid(nnx.Rngs(0)), "head_loss is no sum over rows", head_loss=mean)


def test_a_loss_that_is_bfloat16_in_a_bfloat16_run():
    """The model's own dtype is float32, in which it would go unseen."""

    def own_dtype(model, x, batch):
        return head_loss(model, x, batch).astype(x.dtype)

    refused(
        Hybrid(nnx.Rngs(0)),
        r"head_loss returns bfloat16 for hidden states in bfloat16.*logits.astype\(jnp.float32\)",
        head_loss=own_dtype,
    )


def test_a_loss_that_counts_masked_tokens():
    def unmasked(model, x, batch):
        return sum_of_losses(model.logits(x), jnp.abs(batch["targets"]))

    refused(Hybrid(nnx.Rngs(0)), "every target is -100", head_loss=unmasked)


def test_a_batch_array_that_is_not_there():
    def segmented(model, batch):
        return embed(model, batch) * (batch["segment_ids"] > 0)[..., None]

    model = Hybrid(nnx.Rngs(0))
    refused(model, r"asked for batch\['segment_ids'\].*packed=True", embed=segmented)
    slidedp_jax.adapt(model, **(PARTS | {"embed": segmented}), packed=True)


def test_a_batch_without_the_arrays_that_were_named():
    def weighted(model, x, batch):
        return head_loss(model, x, batch | {"targets": batch["targets"] * (batch["w"] > 0)})

    model = Hybrid(nnx.Rngs(0))
    refused(model, r"asked for batch\['w'\].*token_arrays", head_loss=weighted)
    refused(model, r"names \['targets'\]", token_arrays={"targets": "int32"})
    parts = PARTS | {"token_arrays": {"w": "float32"}}
    adapted = slidedp_jax.adapt(model, **parts)
    ids = np.ones((2, 4), np.int32)
    with Trainer(
        adapted.model, adamw(), strategy=strategy(1, 2), num_devices=1, kernel_form="whole"
    ) as trainer:
        with pytest.raises(UserError, match=r"the batch lacks \['w'\]"):
            trainer.step({"input_ids": ids, "labels": ids})
        with pytest.raises(UserError, match=r"w has shape \(2, 3\)"):
            trainer.step({"input_ids": ids, "labels": ids, "w": ids[:, :3]})


def test_collections_of_linen_that_change():
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    refused(variables, r"collections \['batch_stats'\].*variables\['params'\]")


def pytree(**changes):
    tree = {"table": jnp.ones((VOCAB, 4)), "layers": [jnp.ones(4), jnp.ones(4)], "w": jnp.ones(4)}
    return tree | changes


TREE_PARTS = {
    "embed": lambda p, batch: p["table"][batch["input_ids"]],
    "layer": lambda p, x, batch: x * p[None, None],
    "head_loss": lambda p, x, batch: sum_of_losses(
        (x * p["w"][None, None]) @ p["table"].T, batch["targets"]
    ),
    "layers": "layers",
}


def test_plain_trees_that_do_not_fit():
    shared = jnp.ones(4)
    refused(pytree(layers=[shared, shared]), r"layers\.0 and layers\.1 are one", **TREE_PARTS)
    refused(pytree(layers=jnp.ones((2, 4))), r"slidedp_jax\.Stacked\('layers'\)", **TREE_PARTS)
    refused(pytree(extra=jnp.ones(4, jnp.int32)), "parameter extra is int32", **TREE_PARTS)
    no_norm = TREE_PARTS | {
        "head_loss": lambda p, x, batch: sum_of_losses(x @ p["table"].T, batch["targets"])
    }
    tree = pytree()
    del tree["w"]
    refused(tree, "no parameter of its own", **no_norm)


def test_leaves_that_are_no_arrays():
    layers = [{"w": jnp.ones(4), "rate": 0.5}, {"w": jnp.ones(4), "rate": 0.5}]
    refused(pytree(layers=layers), r"layers\.0\.rate is no array but a float.*eqx", **TREE_PARTS)
    boxed = nn.LogicallyPartitioned(jnp.ones(4), ("embed",))
    refused(pytree(w=boxed), r"boxes of flax\.linen.*unbox\(params\)", **TREE_PARTS)


def test_weights_that_do_not_belong_are_not_written_back():
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(0)), **PARTS)
    with pytest.raises(UserError, match=r"1 parameters for a model of.*unknown \(such as x\)"):
        adapted.write_back({"x": np.ones(2)})


def test_a_model_of_shapes_needs_starting_weights():
    def mixers():
        model = Hybrid(nnx.Rngs(0), rate=0.1)
        model.blocks = nnx.List([Mixer(nnx.Rngs(0), rate=0.1) for _ in range(2)])
        return model

    module = nnx.eval_shape(mixers)
    tree = jax.eval_shape(pytree)
    for adapted in (
        slidedp_jax.adapt(module, **PARTS, dropout=True),
        slidedp_jax.adapt(tree, **(PARTS | TREE_PARTS)),
    ):
        with pytest.raises(UserError, match=r"holds the shape of .* but no values"):
            Trainer(adapted.model, adamw(), strategy=strategy(1, 2), num_devices=1)


def test_other_state_needs_values():
    model = Hybrid(nnx.Rngs(0))
    model.blocks = nnx.List([Changing(nnx.Rngs(0), "batch_norm")])
    model.eval()
    abstract = nnx.eval_shape(lambda: model)
    refused(abstract, r"no nnx\.Param and has no value")


def test_functions_that_take_something_else():
    model = Hybrid(nnx.Rngs(0))
    said = r"embed takes \(model\); it is called as embed\(model, batch\)"
    refused(model, said, embed=lambda model: 1)
    refused(model, r"called as layer\(layer, x, batch\)", layer=[lambda layer, x: x] * 4)
    refused(model, r"called as head_loss\(model, x, batch\)", head_loss=lambda model, x: x)
    refused(model, r"called as whole_loss\(model, batch\)", whole_loss=lambda model: 1.0)


def test_what_a_function_raises_says_for_which_stage():
    """Linen's dropout without random numbers, in the embedding and in a layer."""

    def dropped(x):
        return nn.Dropout(0.5, deterministic=False).apply({}, x)

    parts = PARTS | TREE_PARTS
    in_embed = {"embed": lambda p, batch: dropped(p["table"][batch["input_ids"]])}
    in_layer = {"layer": lambda p, x, batch: dropped(x @ p["w"])}
    for changes, called in ((in_embed, "embed(model,"), (in_layer, "layer(layer, x,")):
        with pytest.raises(InvalidRngError) as caught:
            slidedp_jax.adapt(pytree(layers=[{"w": jnp.ones((4, 4))}]), **(parts | changes))
        first, second = caught.value.__notes__[-2:]
        assert first.startswith(f"slidedp_jax called {called}")
        assert "pass dropout=True to adapt()" in second


def test_a_vocabulary_beyond_the_table(caplog):
    parts = PARTS | {"vocab_size": VOCAB + 1}
    adapted = slidedp_jax.adapt(Hybrid(nnx.Rngs(0)), **parts)
    assert f"vocab_size is {VOCAB + 1}, but no parameter of embed has so many" in caplog.text
    with pytest.raises(UserError, match=rf"vocab_size is {VOCAB + 1}, more than any table"):
        adapted.check(lambda model, batch: jnp.mean(model(batch["input_ids"])) + jnp.nan)
