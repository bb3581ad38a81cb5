"""Layers that keep keys and values give, token by token, what a full forward pass gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from lanes import mostly_thorough

from slidedp_jax.models import cached_layers
from slidedp_jax.models.config import RopeParameters, named_config
from slidedp_jax.models.decoder import build

NUM_TOKENS, CAPACITY = 16, 16

TINY = dataclasses.replace(
    named_config("tiny"),
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_windows=(),
)
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 6}
CASES = {
    "windows": {"layer_windows": (5, None)},
    "llama3-tied-biases-no-norm": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "qk_norm": False,
        "rope_parameters": RopeParameters(rope_type="llama3", **STRETCHED),
    },
    "linear-window-of-one": {
        "layer_windows": (1, 3),
        "rope_parameters": RopeParameters(rope_type="linear", factor=2.0),
    },
    "experts": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "sparse_layers": (False, True),
        "qk_norm_per_head": False,
        "clip_qkv": 0.5,
    },
    "gemma": {
        "layer_windows": (5, None),
        "local_rope_parameters": RopeParameters(rope_theta=100.0),
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "norms_add_one": True,
        "norms_after": True,
        "scale_embeddings": True,
        "query_pre_attn_scalar": 24.0,
    },
    "yarn": {"rope_parameters": RopeParameters(rope_type="yarn", **STRETCHED)},
    "dynamic-to-the-last-position": {
        "max_position_embeddings": CAPACITY,
        "rope_parameters": RopeParameters(rope_type="dynamic", factor=3.0),
    },
}


def full_logits(model, trees, rows):
    """Logits after each prefix of each row, [R, T, V]: prefixes are padded rows of one batch."""
    num_tokens = rows.shape[1]
    index = np.arange(num_tokens)
    segments = np.tile((index[None, :] <= index[:, None]).astype(np.int32), (len(rows), 1))
    batch = {
        "input_ids": jnp.asarray(segments * np.repeat(rows, num_tokens, axis=0)),
        "positions": jnp.asarray(segments * index),
        "segment_ids": jnp.asarray(segments),
    }
    logits = np.asarray(jax.jit(lambda t: plain_model.logits(model, t, batch))(trees))
    logits = logits.reshape(len(rows), num_tokens, num_tokens, -1)
    return logits[:, index, index]


def cached_logits(model, trees, ids, prompt_lengths):
    """Logits [B, V] after the prompts, then after each further token, through the caches."""

    @jax.jit
    def run(layer_trees, batch, last, caches):
        x = model.embed_fn(trees["embed"], batch)
        fns = model.cached.decode_fns if x.shape[1] == 1 else model.cached.prefill_fns
        kept = []
        for fn, params, cache in zip(fns, layer_trees, caches, strict=True):
            x, cache = fn(params, x, batch, cache)
            kept.append(cache)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)
        embed = trees["embed"] if model.tied else None
        return model.head_logits_fn(trees["head"], embed, x)[:, 0], kept

    lengths = np.asarray(prompt_lengths, np.int32)
    index = np.arange(lengths.max(), dtype=np.int32)[None]
    segments = (index < lengths[:, None]).astype(np.int32)
    batch = {
        "input_ids": ids[:, : lengths.max()] * segments,
        "positions": index * segments,
        "segment_ids": segments,
    }
    caches = [model.cached.init_cache(len(ids), CAPACITY, jnp.float32) for _ in model.layers]
    # What an earlier user left must not be seen.
    caches = jax.tree.map(lambda leaf: leaf + 1e3, caches)
    logits, caches = run(trees["layers"], batch, lengths - 1, caches)
    yield logits
    for step in range(NUM_TOKENS - lengths.max()):
        positions = (lengths + step)[:, None]
        batch = {"input_ids": np.take_along_axis(ids, positions, 1), "positions": positions}
        logits, caches = run(trees["layers"], batch, np.zeros_like(lengths), caches)
        yield logits


@pytest.mark.parametrize("case", mostly_thorough(CASES, ("windows", "llama3-tied-biases-no-norm")))
def test_each_position_of_unequal_rows_equals_the_full_forward_pass(case):
    model = build(dataclasses.replace(TINY, **CASES[case]))
    trees = plain_model.model_arrays(model, plain_model.random_values(model))
    ids = np.random.default_rng(3).integers(0, TINY.vocab_size, (2, NUM_TOKENS), dtype=np.int32)
    prompt_lengths = (3, 9)
    expected = full_logits(model, trees, ids)
    for step, logits in enumerate(cached_logits(model, trees, ids, prompt_lengths)):
        for row, length in enumerate(prompt_lengths):
            wanted = expected[row, length - 1 + step]
            error = np.abs(np.asarray(logits[row]) - wanted).max()
            assert error <= 1e-5 * np.abs(wanted).max(), (row, step)
    assert step == NUM_TOKENS - max(prompt_lengths)


def test_a_cache_holds_keys_and_values_in_the_compute_dtype():
    cache = cached_layers.init_cache(TINY, 3, CAPACITY, jnp.bfloat16)
    size = 2 * 3 * CAPACITY * TINY.num_key_value_heads * TINY.head_dim
    assert sum(leaf.nbytes for leaf in cache) == 2 * size


def test_rows_end_where_the_positions_do():
    assert build(TINY).cached.max_tokens == TINY.max_position_embeddings
    with pytest.raises(ValueError, match=r"capacity is 257, but rows must end .* \(256\)"):
        cached_layers.init_cache(TINY, 1, 257, jnp.float32)
