import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from jax.sharding import AxisType, PartitionSpec

from slidedp_jax.models.config import ModelConfig, RopeParameters, named_config
from slidedp_jax.models.decoder import build, initial_value

CONFIG = named_config("tiny-tied")


def variant(**changes):
    return ModelConfig(**(vars(CONFIG) | {"num_hidden_layers": 2, "layer_windows": ()} | changes))


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape).astype(np.int32)


def compiled_loss(model):
    return plain_model.quick_jit(
        jax.value_and_grad(lambda trees, batch: plain_model.loss(model, trees, batch))
    )


def assert_trees_close(got, expected, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-3)


def padded_batch(documents, width, *, side="right"):
    """One document per row, padded; positions and segments as the data pipeline gives them."""
    batch = {
        "input_ids": np.zeros((len(documents), width), np.int32),
        "targets": np.full((len(documents), width), -100, np.int32),
        "positions": np.zeros((len(documents), width), np.int32),
        "segment_ids": np.zeros((len(documents), width), np.int32),
    }
    for row, document in enumerate(documents):
        start = 0 if side == "right" else width - len(document)
        part = slice(start, start + len(document))
        batch["input_ids"][row, part] = document
        batch["targets"][row, part] = [*document[1:], -100]
        batch["positions"][row, part] = np.arange(len(document))
        batch["segment_ids"][row, part] = 1
    return {name: jnp.asarray(array) for name, array in batch.items()}


def packed_batch(documents, width):
    """All documents in one row, padding behind them."""
    parts = [padded_batch([document], len(document)) for document in documents]
    missing = width - sum(map(len, documents))
    padding = {"input_ids": 0, "targets": -100, "positions": 0, "segment_ids": 0}
    batch = {}
    for name, fill in padding.items():
        pieces = [np.asarray(part[name]) for part in parts]
        if name == "segment_ids":
            pieces = [piece * (index + 1) for index, piece in enumerate(pieces)]
        pieces.append(np.full((1, missing), fill, np.int32))
        batch[name] = jnp.asarray(np.concatenate(pieces, axis=1))
    return batch


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"layer_windows": (5, None)}, marks=pytest.mark.thorough),
        pytest.param(
            {
                "max_position_embeddings": 8,
                "rope_parameters": RopeParameters(rope_type="dynamic", factor=2.0),
            },
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["full", "window", "dynamic-rope"],
)
def test_packed_rows_equal_unpacked_rows(changes):
    model = plain_model.built(variant(**changes), loss_chunk_tokens=16)
    trees = plain_model.model_arrays(model, plain_model.random_values(model))
    documents = [random_ids(length, seed=length) for length in (13, 1, 19, 7)]
    run = compiled_loss(model)
    loss, gradient = run(trees, packed_batch(documents, 48))
    # One document per row; below, padding is shown to change nothing.
    expected_loss, expected_gradient = run(trees, padded_batch(documents, 19))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_trees_close(gradient, expected_gradient, 1e-5)


@pytest.mark.thorough
def test_padding_side_and_amount_change_nothing():
    model = plain_model.built(variant(), loss_chunk_tokens=32)
    trees = plain_model.model_arrays(model, plain_model.random_values(model))
    document = random_ids(21)
    run = compiled_loss(model)
    loss, gradient = run(trees, plain_model.rows_batch([document]))
    # The other rows: one token, and no supervised token at all.
    others = [document[:1], document[:1]]
    with jax.debug_nans(True):
        for batch in (
            padded_batch([document], 64),
            padded_batch([document], 64, side="left"),
            padded_batch([document], 200),
            padded_batch([document, *others], 64, side="left"),
        ):
            padded_loss, padded_gradient = run(trees, batch)
            np.testing.assert_allclose(padded_loss, loss, rtol=1e-5)
            assert_trees_close(padded_gradient, gradient, 1e-5)


def test_layers_of_one_kind_share_one_function():
    model = build(variant(num_hidden_layers=4, layer_windows=(None, 8, None, 8)))
    first, second, third, fourth = model.layer_fns
    assert first is third
    assert second is fourth
    assert first is not second


@pytest.mark.thorough
@pytest.mark.parametrize("check_vma", [True, False])
def test_runs_per_device_inside_shard_map(check_vma):
    model = plain_model.built(variant(), loss_chunk_tokens=16)
    trees = plain_model.model_arrays(model, plain_model.random_values(model))
    batch = plain_model.rows_batch(random_ids(4, 20))
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

    def per_device(trees, batch):
        loss, gradient = jax.value_and_grad(lambda t: plain_model.loss(model, t, batch))(trees)
        if not check_vma:  # with it, JAX itself sums the gradient of what all devices share
            gradient = jax.lax.psum(gradient, "data")
        return jax.lax.psum(loss, "data"), gradient

    sharded = plain_model.quick_jit(
        jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
    loss, gradient = sharded(trees, batch)
    expected_loss, expected_gradient = compiled_loss(model)(trees, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_trees_close(gradient, expected_gradient, 1e-5)


def test_bfloat16_parameters_mean_bfloat16_compute():
    model = plain_model.built(variant(num_hidden_layers=1), loss_chunk_tokens=16)
    values = plain_model.random_values(model)
    batch = plain_model.rows_batch(random_ids(2, 40))
    narrow = plain_model.model_arrays(model, values, jnp.bfloat16)
    hidden = jax.eval_shape(lambda trees: plain_model.hidden_states(model, trees, batch), narrow)
    assert hidden.dtype == jnp.bfloat16
    loss, gradient = compiled_loss(model)(narrow, batch)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    expected, expected_gradient = compiled_loss(model)(
        plain_model.model_arrays(model, values), batch
    )
    np.testing.assert_allclose(loss, expected, rtol=5e-3)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
    assert_trees_close(wide, expected_gradient, 0.06)


def test_embedding_gradient_of_a_frequent_token_sums_in_float32():
    model = build(variant())
    embed = plain_model.stage_arrays(model.embed, plain_model.random_values(model), jnp.bfloat16)
    batch = plain_model.rows_batch(np.full((1, 4096), 3, np.int32))
    gradient = jax.grad(lambda p: model.embed_fn(p, batch).astype(jnp.float32).sum())(embed)
    assert np.all(np.asarray(gradient["weight"][3], np.float32) == 4096.0)
    assert not np.any(np.asarray(gradient["weight"][:3], np.float32))


def test_a_token_outside_the_vocabulary_is_loud():
    model = build(variant())
    embed = plain_model.stage_arrays(model.embed, plain_model.random_values(model))
    for wrong in (CONFIG.vocab_size, -1):
        rows = model.embed_fn(embed, plain_model.rows_batch([[1, wrong]]))
        assert np.all(np.isfinite(rows[0, 0]))
        assert np.all(np.isnan(rows[0, 1]))


def test_a_tied_head_asks_for_the_embedding():
    model = build(variant())
    head = plain_model.stage_arrays(model.head, plain_model.random_values(model))
    x = jnp.zeros((1, 2, CONFIG.hidden_size))
    with pytest.raises(ValueError, match="tied to the embedding"):
        model.head_logits_fn(head, None, x)


def test_attention_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="'flash'; supported"):
        build(CONFIG, attention="flash")
    model = build(CONFIG, attention="cudnn")
    trees = plain_model.model_arrays(model, plain_model.random_values(model))
    with pytest.raises(ValueError, match="platform is cpu"):
        plain_model.logits(model, trees, plain_model.rows_batch(random_ids(1, 4)))


def test_initial_values_depend_on_name_and_seed_alone():
    name = "model.layers.3.mlp.up_proj.weight"
    value = initial_value(name, (160, 64), 7)
    np.testing.assert_array_equal(value, initial_value(name, (160, 64), 7))
    assert not np.array_equal(value, initial_value(name, (160, 64), 8))
    assert not np.array_equal(value, initial_value(name.replace("3", "2"), (160, 64), 7))
    assert value.dtype == np.float32
    assert abs(value.std() - 0.02) < 1e-3
    assert abs(build(variant(initializer_range=0.1)).initial_value(name, (160, 64), 7).std()) > 0.09
    for norm in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert np.all(initial_value(norm, (8,), 0) == 1.0)
    assert np.all(initial_value("model.layers.0.self_attn.q_proj.bias", (8,), 0) == 0.0)
