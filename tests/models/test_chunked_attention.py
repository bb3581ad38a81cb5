import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from jax.extend.core import jaxprs_in_params

from slidedp_jax.models.chunked_attention import chunked_attention, visible_block_pairs


def draw(num_tokens, *, rows=2, heads=4, kv_heads=2, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    shapes = [(rows, num_tokens, count, head_dim) for count in counts]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def value_and_gradients(function, q, k, v, d_out):
    def run(q, k, v):
        out, pull_back = jax.vjp(function, q, k, v)
        return out, *pull_back(d_out)

    return plain_model.quick_jit(run)(q, k, v)


def packed_segments(num_tokens):
    """One row of documents and trailing padding, one with padding on its left."""
    first = np.repeat([1, 2, 3, 0], [num_tokens // 3, 1, num_tokens // 3, num_tokens])[:num_tokens]
    second = np.repeat([0, 1, 2], [3, num_tokens // 2, num_tokens])[:num_tokens]
    return jnp.asarray(np.stack([first, second]), jnp.int32)


EDGES = [(1, None), (15, None), (16, None), (17, None), (50, None), (50, 1), (50, 16), (64, 21)]
OFTEN = {(16, None, False), (17, None, True), (64, 21, False), (50, 16, True)}


@pytest.mark.parametrize(
    ("num_tokens", "window", "segmented"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.thorough)
        for case in ((*edge, segmented) for edge in EDGES for segmented in (False, True))
    ],
)
def test_equals_the_full_score_matrix(num_tokens, window, segmented):
    q, k, v, d_out = draw(num_tokens)
    segments = packed_segments(num_tokens) if segmented else None
    ours = value_and_gradients(
        lambda q, k, v: chunked_attention(q, k, v, segments, window=window, block=16),
        q, k, v, d_out,
    )  # fmt: skip
    plain = value_and_gradients(
        lambda q, k, v: plain_model.attention(q, k, v, segments, window), q, k, v, d_out
    )
    for got, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=3e-6)


def test_packed_rows_equal_the_documents_alone():
    q, k, v, d_out = draw(40, rows=1)
    lengths = [13, 17, 10]
    segments = jnp.asarray(np.repeat([[1, 2, 3]], lengths, axis=1), jnp.int32)
    packed = value_and_gradients(
        lambda q, k, v: chunked_attention(q, k, v, segments, block=8), q, k, v, d_out
    )
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = value_and_gradients(
            lambda q, k, v: chunked_attention(q, k, v, None, block=8),
            *(x[:, part] for x in (q, k, v, d_out)),
        )
        for got, expected in zip(packed, alone, strict=True):
            np.testing.assert_allclose(got[:, part], expected, rtol=1e-5, atol=2e-6)
        start += length


def test_padding_gives_exact_zeros_and_no_nan():
    q, k, v, d_out = draw(20)
    segments = jnp.asarray([[0] * 20, [0] * 7 + [1] * 9 + [0] * 4], jnp.int32)
    with jax.debug_nans(True):
        results = value_and_gradients(
            lambda q, k, v: chunked_attention(q, k, v, segments, block=8), q, k, v, d_out
        )
    padding = np.asarray(segments) == 0
    for array in results:
        assert np.all(np.asarray(array)[padding] == 0.0)
        assert np.any(np.asarray(array)[~padding] != 0.0)


def test_what_another_document_says_does_not_change_a_bit():
    q, k, v, _ = draw(24, rows=1)
    segments = jnp.asarray([[1] * 10 + [2] * 14], jnp.int32)
    run = plain_model.quick_jit(lambda k, v: chunked_attention(q, k, v, segments, block=8))
    before = run(k, v)[:, 10:]
    after = run(k.at[:, :10].set(7.0), v.at[:, :10].set(-3.0))[:, 10:]
    np.testing.assert_array_equal(before, after)


def test_large_scores_stay_exact():
    q, k, v, d_out = draw(33)
    q = q * 50.0
    ours = value_and_gradients(
        lambda q, k, v: chunked_attention(q, k, v, None, block=16), q, k, v, d_out
    )
    plain = value_and_gradients(plain_model.attention, q, k, v, d_out)
    for got, expected in zip(ours, plain, strict=True):
        assert np.linalg.norm(got - expected) < 1e-4 * np.linalg.norm(expected)


def test_bfloat16_is_as_close_as_its_rounding():
    q, k, v, d_out = (x.astype(jnp.bfloat16) for x in draw(40))
    ours = value_and_gradients(
        lambda q, k, v: chunked_attention(q, k, v, None, block=16), q, k, v, d_out
    )
    wide = (x.astype(jnp.float32) for x in (q, k, v, d_out))
    for got, expected in zip(ours, value_and_gradients(plain_model.attention, *wide), strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(got.astype(jnp.float32) - expected) / np.linalg.norm(expected)
        assert error < 0.01


def test_visible_pairs_are_the_lower_triangle_or_the_window():
    queries, keys = visible_block_pairs(33, block=16, window=None)
    assert list(zip(queries, keys, strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    # The first query of block 2 is token 32; with a window of 17 its oldest key is token 16.
    queries, keys = visible_block_pairs(33, block=16, window=17)
    assert list(zip(queries, keys, strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]


def test_no_array_has_the_size_of_the_score_matrix():
    """Forward and backward of 4,096 tokens: the largest value is far below T x T."""
    num_tokens = 4096
    q, k, v, d_out = (jax.ShapeDtypeStruct((1, num_tokens, 1, 8), jnp.float32),) * 4

    def run(q, k, v, d_out):
        return jax.vjp(lambda q, k, v: chunked_attention(q, k, v, None), q, k, v)[1](d_out)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    assert max(sizes(jax.make_jaxpr(run)(q, k, v, d_out).jaxpr)) <= num_tokens**2 / 64
