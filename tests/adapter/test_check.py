"""Stages held against the user's own whole model: what agrees, and where a mistake is found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_steps import next_token_loss
from streamed_steps import strategy
from toy_nnx import PARTS, VOCAB, WIDTH, Hybrid, embed, head_loss, layer, sum_of_losses

import slidedp_jax
from slidedp_jax import Trainer, UserError


def whole_loss(model, batch):
    return next_token_loss(model(batch["input_ids"]), batch["labels"])


def adapt(model=None, **changes):
    return slidedp_jax.adapt(model or Hybrid(nnx.Rngs(1)), **(PARTS | changes), check_loss=False)


def found(match: str, model=None, **changes) -> None:
    with pytest.raises(UserError, match=match):
        adapt(model, whole_loss=whole_loss, **changes)


def test_stages_and_whole_model_agree():
    seen = adapt(whole_loss=whole_loss).check(whole_loss, seed=3)
    assert seen.loss == pytest.approx(seen.whole_loss, rel=1e-6)
    assert seen.gradient_norm == pytest.approx(seen.whole_gradient_norm, rel=1e-6)
    assert seen.largest_difference < 1e-5
    assert 0.5 < seen.loss / np.log(VOCAB) < 2
    assert seen.gradient_norm > 0.1
    assert adapt().check(whole_loss, seed=4).loss != seen.loss


def test_a_batch_of_ones_own():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (2, 7))
    labels = np.where(rng.random(ids.shape) < 0.5, -100, ids)
    adapted = adapt()
    seen = adapted.check(whole_loss, batch={"input_ids": ids, "labels": labels.tolist()})
    assert seen.loss == pytest.approx(seen.whole_loss, rel=1e-6)
    with pytest.raises(UserError, match=r"lacks \['labels'\]"):
        adapted.check(whole_loss, batch={"input_ids": ids})
    with pytest.raises(UserError, match="no supervised token"):
        adapted.check(whole_loss, batch={"input_ids": ids, "labels": ids * 0 - 100})


def misplaced(model, batch):
    """Positions that begin at 1."""
    places = model.places[...][batch["positions"] + 1]
    return model.tokens(batch["input_ids"]) + places


def without_norm(model, x, batch):
    logits = model.tokens.attend(x + 0 * model.norm(x))
    return sum_of_losses(logits, batch["targets"])


def wrong_at(number):
    def wrong(block, x, batch):
        return x + 0.99 * (block(x) - x)

    return [wrong if index == number else layer for index in range(4)]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"embed": misplaced}, "They part in embed"),
        ({"layer": wrong_at(0)}, r"part in the layer at blocks\.0: .* that embed gives"),
        ({"layer": wrong_at(2)}, r"part in the layer at blocks\.2: .* that blocks\.1 gives"),
        ({"head_loss": without_norm}, r"part in head_loss: .* that blocks\.3 gives"),
        (
            {"layers": ["blocks.0", "blocks.3", "blocks.2", "blocks.1"]},
            r"part in the layer at blocks\.3: .* computes other layers before this one: .* order",
        ),
    ],
)
def test_a_mistake_is_found_in_its_stage(changes, place):
    found(f"do not compute the loss of the whole model.*{place}", **changes)


def without_places(model, batch):
    return model.tokens(batch["input_ids"]) + 0 * embed(model, batch)


def without_its_input(block, x, batch):
    """What the block adds: that is an array of the whole model too."""
    return block(x) - x


def without_its_norm(block, x, batch):
    """Of a layer's own beginning, not of what is before it."""
    mean = jnp.cumsum(block.mix(x + 0 * block.norm(x)), axis=1)
    return x + mean / jnp.arange(1, x.shape[1] + 1)[None, :, None]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"embed": without_places}, r"in embed, or between it and the layer at blocks\.0: "),
        ({"layer": without_its_input}, r"in blocks\.0, or between it and the layer at blocks\.1: "),
        (
            {"layer": [layer, layer, layer, without_its_input]},
            r"in blocks\.3, or between it and head_loss: ",
        ),
        (
            {"layer": [without_its_norm, layer, layer, layer]},
            r"in the layer at blocks\.0: the hidden states that embed gives are those",
        ),
    ],
)
def test_what_is_a_part_of_the_next_stages_input_is_no_alibi(changes, place):
    found(f"They part {place}", **changes)


def test_a_scale_between_embedding_and_layers():
    def whole(p, batch):
        x = p["table"][batch["input_ids"]] * 4.0
        for own in p["layers"]:
            x = mix(own, x, batch["segment_ids"])
        logits = (x * p["scale"][None, None]) @ p["table"].T
        return sum_of_losses(logits, batch["targets"]) / jnp.sum(batch["targets"] >= 0)

    with pytest.raises(UserError, match=r"in embed, or between it and the layer at layers\.0: "):
        slidedp_jax.adapt(tree(), **TREE_PARTS, whole_loss=whole)


def test_it_is_found_within_compiled_functions_and_loops():
    def whole(model, batch):
        graph, state = nnx.split(model)

        @jax.jit
        def run(state, ids):
            return jax.checkpoint(lambda s, ids: nnx.merge(graph, s)(ids))(state, ids)

        def again(total, _):
            return next_token_loss(run(state, batch["input_ids"]), batch["labels"]), None

        return jax.lax.scan(again, jnp.zeros(()), None, length=1)[0]

    assert adapt().check(whole).loss > 0
    with pytest.raises(UserError, match=r"part in the layer at blocks\.2: "):
        adapt(layer=wrong_at(2)).check(whole)


def test_a_sum_for_a_mean():
    def total(model, batch):
        return head_loss(model, stacked(model, batch), batch)

    def stacked(model, batch):
        x = embed(model, batch)
        for block in model.blocks:
            x = block(x)
        return x

    with pytest.raises(UserError, match=r"sum over the \d+ supervised tokens.*their mean"):
        adapt().check(total)
    with pytest.raises(UserError, match="whole_loss returned"):
        adapt().check(lambda model, batch: stacked(model, batch))


def test_a_gradient_that_one_side_stops():
    def stopping(block, x, batch):
        return block(jax.lax.stop_gradient(x))

    found(
        r"loss of the whole model but other gradients, of (blocks\.0|places|tokens)",
        layer=[layer, stopping, layer, layer],
    )


def test_losses_of_layers_count():
    def with_aux(block, x, batch):
        y = block(x)
        square = jnp.sum(jnp.square(y), axis=-1, dtype=jnp.float32)
        return y, 0.01 * jnp.sum(square * (batch["targets"] >= 0))

    def whole(model, batch):
        x, total = embed(model, batch), 0.0
        for block in model.blocks:
            x, aux = with_aux(block, x, batch)
            total += aux
        total += sum_of_losses(model.logits(x), batch["targets"])
        return total / jnp.sum(batch["targets"] >= 0)

    adapt(layer=with_aux).check(whole)
    with pytest.raises(UserError, match="They part in head_loss"):
        adapt(layer=layer).check(whole)


def test_dropout_is_off_in_the_check():
    def whole(model, batch):
        return next_token_loss(model(batch["input_ids"]), batch["labels"])

    adapted = adapt(Hybrid(nnx.Rngs(1), rate=0.5), dropout=True)
    assert adapted.check(whole).loss == adapted.check(whole).loss


def test_what_is_left_out_shows_though_it_begins_at_zero():
    """A bias of zeros that the glue forgets."""
    model = Hybrid(nnx.Rngs(1), tied=False)

    def forgetful(model, x, batch):
        bias = model.output.bias[...]
        logits = model.output(model.norm(x)) - bias[None, None]
        return sum_of_losses(logits, batch["targets"])

    assert not model.output.bias[...].any()
    found("part in head_loss", model, head_loss=forgetful)


def tree():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    layers = [{"w": draw(WIDTH, WIDTH), "v": draw(WIDTH)} for _ in range(3)]
    return {"table": draw(VOCAB, WIDTH), "layers": layers, "scale": draw(WIDTH)}


def mix(layer, x, segments):
    """Sums over the earlier tokens of a document."""
    near = jnp.tril(segments[:, :, None] == segments[:, None])
    return x + jnp.tanh(near @ x @ layer["w"]) + layer["v"][None, None]


TREE_PARTS = {
    "layers": "layers",
    "embed": lambda p, batch: p["table"][batch["input_ids"]],
    "layer": lambda p, x, batch: mix(p, x, batch["segment_ids"]),
    "head_loss": lambda p, x, batch: sum_of_losses(
        (x * p["scale"][None, None]) @ p["table"].T, batch["targets"]
    ),
    "vocab_size": VOCAB,
    "packed": True,
    "check_loss": False,
}


def whole_of_tree(p, batch):
    x = p["table"][batch["input_ids"]]
    for own in p["layers"]:
        x = mix(own, x, batch["segment_ids"])
    logits = (x * p["scale"][None, None]) @ p["table"].T
    return sum_of_losses(logits, batch["targets"]) / jnp.sum(batch["targets"] >= 0)


@pytest.mark.parametrize("shapes", [False, True])
def test_packed_rows_of_a_tree(shapes):
    params = jax.eval_shape(tree) if shapes else tree()
    adapted = slidedp_jax.adapt(params, **TREE_PARTS, whole_loss=whole_of_tree)
    assert adapted.check(whole_of_tree).largest_difference < 1e-5

    def unpacked(p, x, batch):
        return mix(p, x, jnp.ones_like(batch["segment_ids"]))

    with pytest.raises(UserError, match=r"part in the layer at layers\.0"):
        slidedp_jax.adapt(params, **(TREE_PARTS | {"layer": unpacked}), whole_loss=whole_of_tree)


def test_a_model_that_computes_in_bfloat16_has_more_room():
    def low(p, x, batch):
        return mix(p, x.astype(jnp.bfloat16), batch["segment_ids"]).astype(x.dtype)

    def whole(p, batch):
        x = p["table"][batch["input_ids"]]
        for own in p["layers"]:
            x = mix(own, x, batch["segment_ids"])
        logits = (x * p["scale"][None, None]) @ p["table"].T
        return sum_of_losses(logits, batch["targets"]) / jnp.sum(batch["targets"] >= 0)

    adapted = slidedp_jax.adapt(tree(), **(TREE_PARTS | {"layer": low}))
    with pytest.raises(UserError, match="the stages"):
        adapted.check(whole)  # which computes in float32
    assert adapted.check(whole, rtol=0.02).loss > 0
    in_low = slidedp_jax.adapt(tree(), **(TREE_PARTS | {"layer": low}))

    def whole_low(p, batch):
        x = p["table"][batch["input_ids"]]
        for own in p["layers"]:
            x = low(own, x, batch) * (1 + 1e-3)
        logits = (x * p["scale"][None, None]) @ p["table"].T
        return sum_of_losses(logits, batch["targets"]) / jnp.sum(batch["targets"] >= 0)

    in_low.check(whole_low)
    with pytest.raises(UserError, match="do not compute the loss"):
        in_low.check(whole_low, rtol=1e-5)


def test_a_loss_that_is_not_finite():
    def broken(p, batch):
        return whole_of_tree(p, batch) * jnp.log(jnp.zeros(()))

    with pytest.raises(UserError, match=r"the whole loss is -?inf"):
        slidedp_jax.adapt(tree(), **TREE_PARTS).check(broken)


def keeping_shared(p, x, batch):
    """A layer that forgets its `v`, as glue that leaves an argument out."""
    return x + jnp.tanh(x @ p["w"])


def whole_without_v(p, batch):
    x = p["table"][batch["input_ids"]]
    for own in p["layers"]:
        x = keeping_shared(own, x, batch)
    logits = (x * p["scale"][None, None]) @ p["table"].T
    return sum_of_losses(logits, batch["targets"]) / jnp.sum(batch["targets"] >= 0)


def test_a_parameter_that_its_layer_does_not_read():
    parts = TREE_PARTS | {"layer": keeping_shared}
    with pytest.raises(UserError, match=r"layer holds layers\.0\.v.* does not read it.*unused="):
        slidedp_jax.adapt(tree(), **parts)
    with pytest.raises(UserError, match=r"unused= names layers\.0\.v.*which a stage reads"):
        slidedp_jax.adapt(tree(), **TREE_PARTS, unused=["layers.*.v"])
    with pytest.raises(UserError, match=r"unused='blocks\.\*' fits no parameter"):
        slidedp_jax.adapt(tree(), **parts, unused=["blocks.*"])
    adapted = slidedp_jax.adapt(tree(), **parts, unused=["*.v"], whole_loss=whole_without_v)
    with pytest.raises(UserError, match=r"own forward pass reads layers\.0\.v"):
        adapted.check(whole_of_tree)
    assert len(set(adapted.model.layer_fns)) == 1
    ids = np.ones((2, 4), np.int32)
    batch = {"input_ids": ids, "labels": ids, "segment_ids": ids}
    with Trainer(
        adapted.model,
        optax.sgd(0.1),
        strategy=strategy(2, 2),
        num_devices=2,
        kernel_form="whole",
    ) as trainer:
        trainer.step(batch)
        trained = trainer.parameters()
    assert "layers.0.v" not in trained
    new = adapted.write_back(trained)
    np.testing.assert_array_equal(new["layers"][0]["v"], tree()["layers"][0]["v"])
    assert (new["layers"][0]["w"] != tree()["layers"][0]["w"]).any()


def test_an_unused_parameter_of_a_module_keeps_its_value():
    model = Hybrid(nnx.Rngs(1))
    model.forgotten = nnx.Param(jnp.full(3, 7.0))
    adapted = adapt(model, unused=["forgotten"], whole_loss=whole_loss)
    names = [n for stage in adapted.model.stages() for n in stage.parameter_names()]
    assert "forgotten" not in names
    adapted.write_back({n: adapted.model.initial_value(n, (), 0) + 1 for n in names})
    np.testing.assert_array_equal(model.forgotten[...], jnp.full(3, 7.0))
    with pytest.raises(UserError, match="own forward pass reads forgotten"):
        adapted.check(lambda m, b: whole_loss(m, b) + 0 * b["labels"].sum() + m.forgotten[0] - 7)


def test_an_adapted_model_prints_in_a_line():
    text = repr(adapt())
    assert text.startswith("Adapted(<StreamedModel: ") and "\n" not in text
