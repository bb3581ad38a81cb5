"""Mixtures of experts: choices, skew, packed rows, generation, and the names of what is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.models.decoder import build
from slidedp_jax.models.named_results import DECIDED, named_bytes


def layers(*sparse):
    return dataclasses.replace(
        named_config("tiny-moe"),
        num_hidden_layers=len(sparse),
        layer_windows=(None,) * len(sparse),
        sparse_layers=sparse,
    )


CONFIG, TWO_LAYERS = layers(True), layers(False, True)
LAYER = "model.layers.0."


def dense_reference(config, values, x):
    """Every expert on every token, in NumPy, float64; the layer's feed-forward block alone."""
    experts, k = config.num_experts, config.num_experts_per_tok
    logits = x @ values[LAYER + "mlp.gate.weight"].T
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(shares, chosen, axis=-1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    gate, up = np.split(
        np.einsum("td,efd->tef", x, values[LAYER + "mlp.experts.gate_up_proj"]), 2, axis=-1
    )
    inner = gate / (1 + np.exp(-gate)) * up
    results = np.einsum("tef,edf->ted", inner, values[LAYER + "mlp.experts.down_proj"])
    mixed = np.zeros_like(x)
    for expert in range(experts):
        mixed += results[:, expert] * (weights * (chosen == expert)).sum(-1)[:, None]
    return mixed, chosen


def feed_forward(config, values, x):
    """Ours, [T, D] -> [T, D], and the experts that it chose."""
    model = build(config)
    layer = model.layer_fns[0].args[0]
    params = plain_model.stage_arrays(model.layers[0], values)

    @plain_model.quick_jit
    def run(params, x):
        y, routing = layer.merge(params).mlp(x[None])
        return y[0], routing.chosen[0]

    return tuple(map(np.asarray, run(params, jnp.asarray(x, jnp.float32))))


def values_of(config, **changes):
    return plain_model.random_values(build(config)) | {
        LAYER + name: value for name, value in changes.items()
    }


def tokens(count=23):
    return np.random.default_rng(3).standard_normal((count, CONFIG.hidden_size))


@pytest.mark.parametrize("normalised", [True, False])
def test_the_block_is_the_chosen_experts_sum(normalised):
    config = dataclasses.replace(CONFIG, norm_topk_prob=normalised)
    values, x = values_of(config), tokens()
    expected, chosen = dense_reference(config, values, x)
    y, own = feed_forward(config, values, x)
    np.testing.assert_array_equal(own, chosen)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_of_equal_shares_the_first_experts_are_chosen():
    gate = np.zeros((CONFIG.num_experts, CONFIG.hidden_size), np.float32)
    values = values_of(CONFIG, **{"mlp.gate.weight": gate})
    y, chosen = feed_forward(CONFIG, values, tokens())
    np.testing.assert_array_equal(chosen, np.tile(np.arange(2), (23, 1)))
    np.testing.assert_allclose(
        y, dense_reference(CONFIG, values, tokens())[0], rtol=1e-4, atol=1e-5
    )


def test_no_visit_is_dropped_when_all_tokens_want_the_same_experts():
    config = dataclasses.replace(CONFIG, num_experts_per_tok=1)
    x = np.tile(tokens(1), (300, 1))
    values = values_of(config)
    expected, chosen = dense_reference(config, values, x)
    assert len(np.unique(chosen)) == 1
    np.testing.assert_allclose(feed_forward(config, values, x)[0], expected, rtol=1e-4, atol=1e-5)


def packed(rows, lengths):
    """One row with the documents of `rows` one after the other, then padding."""
    total = sum(lengths) + 2
    ids, segments, positions = (np.zeros((1, total), np.int32) for _ in range(3))
    targets, start = np.full((1, total), -100, np.int32), 0
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True), 1):
        own = slice(start, start + length)
        ids[0, own], segments[0, own] = row[:length], number
        positions[0, own] = np.arange(length)
        targets[0, start : start + length - 1] = row[1:length]
        start += length
    arrays = {"input_ids": ids, "targets": targets, "positions": positions}
    return {k: jnp.asarray(v) for k, v in (arrays | {"segment_ids": segments}).items()}


def test_packed_documents_are_as_alone():
    config = TWO_LAYERS
    model = build(config)
    trees = plain_model.model_arrays(model, values_of(config))
    rows = np.random.default_rng(4).integers(0, config.vocab_size, (2, 9))
    logits = plain_model.quick_jit(lambda batch: plain_model.logits(model, trees, batch))
    together, start = logits(packed(rows, (9, 6)))[0], 0
    for row, length in zip(rows, (9, 6), strict=True):
        alone = logits(plain_model.rows_batch(row[None]))[0, :length]
        np.testing.assert_allclose(together[start : start + length], alone, rtol=1e-4, atol=1e-4)
        start += length


def test_choices_and_weights_are_named():
    """int32 and float32 of two experts for each of four layers' tokens."""
    config = named_config("tiny-moe")
    model = build(config)
    trees = plain_model.model_arrays(model, values_of(config))
    batch = plain_model.rows_batch(np.zeros((2, 5)))
    program = jax.make_jaxpr(lambda t: plain_model.loss(model, t, batch))(trees)
    assert named_bytes(program, DECIDED) == 4 * (2 * 5) * 2 * (4 + 4)
