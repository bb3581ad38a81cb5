"""Cross-entropy in two passes over slices of the vocabulary.

Pass 1 (`add_to_statistics`, slice after slice) gives the logarithm of the sum over the vocabulary
and the label's logit of each token, and so its log-probability. Pass 2 (`slice_gradients`) takes a
coefficient per token, the objective's derivative by that log-probability, and gives of one slice
the gradient of its rows and its part of the hidden states' gradient. So one slice's logits and
gradient exist at a time, for one product more than in one pass (`models.loss`): four instead of
three. The coefficients may be any function of all tokens' log-probabilities; those of the sum of
-log p are -1. With another `TokenLoss`, minus a token's loss stands in the log-probability's place.

Logits, sums and statistics are float32. The sum of exponentials is kept relative to the highest
logit so far (Milakov and Gimelshein, arXiv:1805.02867).

Letters: N tokens, D hidden, V vocabulary, R rows of a slice, C tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from slidedp_jax.models.batch_arrays import IGNORED
from slidedp_jax.models.loss import project_to_vocab
from slidedp_jax.models.token_loss import PLAIN, TokenLoss

HiddenFn = Callable[[jax.Array], jax.Array]
"""[C, D] -> [C, D]: what the projection is multiplied with, token by token."""

_T = TypeVar("_T")

_LOWEST = -1e30


class Statistics(NamedTuple):
    """What pass 1 knows of each token after some slices, float32 [N] each.

    Attributes:
      highest: highest logit.
      total: sum of exponentials of the logits less `highest`.
      of_label: the label's logit; -inf until its slice has come.
      logits: sum of the logits; None: not wanted.
    """

    highest: jax.Array
    total: jax.Array
    of_label: jax.Array
    logits: jax.Array | None = None


def no_statistics(num_tokens: int, token_loss: TokenLoss = PLAIN) -> Statistics:
    """Before the first slice."""
    return Statistics(
        highest=jnp.full(num_tokens, _LOWEST, jnp.float32),
        total=jnp.zeros(num_tokens, jnp.float32),
        of_label=jnp.full(num_tokens, -jnp.inf, jnp.float32),
        logits=jnp.zeros(num_tokens, jnp.float32) if token_loss.label_smoothing else None,
    )


def add_to_statistics(
    statistics: Statistics,
    rows: jax.Array,
    first: jax.Array,
    x: jax.Array,
    targets: jax.Array,
    *,
    vocab_size: int,
    hidden_fn: HiddenFn,
    block_tokens: int,
) -> Statistics:
    """One slice of pass 1.

    Args:
      statistics: of the slices before.
      rows: of the projection, [R, D]; those from the vocabulary's end on count nothing.
      first: number of the first of them, int32 scalar.
      x: hidden states before `hidden_fn`, [N, D].
      targets: int32 [N]; -100 where nothing is supervised.
      vocab_size: V.
      hidden_fn: applied to each block of tokens.
      block_tokens: tokens whose logits exist at a time.
    """

    def of_block(own: Statistics, some_x: jax.Array, labels: jax.Array) -> Statistics:
        logits = _logits(hidden_fn(some_x), rows, first, vocab_size)
        highest = jnp.maximum(own.highest, logits.max(axis=1))
        total = own.total * jnp.exp(own.highest - highest)
        total += jnp.exp(logits - highest[:, None]).sum(axis=1)
        inside = (labels >= first) & (labels < first + rows.shape[0]) & (labels < vocab_size)
        place = jnp.where(inside, labels - first, 0)
        found = jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0]
        sums = own.logits
        if sums is not None:
            sums = sums + jnp.where(_is_row(logits, first, vocab_size), logits, 0.0).sum(axis=1)
        return Statistics(highest, total, jnp.where(inside, found, own.of_label), sums)

    def visit(carried: Statistics, start: jax.Array, size: int) -> Statistics:
        own = jax.tree.map(lambda array: _block(array, start, size), carried)
        new = of_block(own, _block(x, start, size), _block(targets, start, size))
        updated: Statistics = jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0), carried, new
        )
        return updated

    return _over_blocks(visit, statistics, x.shape[0], block_tokens)


def log_sums(statistics: Statistics) -> jax.Array:
    """Logarithm of the sum of the exponentials of all logits, float32 [N]."""
    return statistics.highest + jnp.log(statistics.total)


def log_probabilities(statistics: Statistics, targets: jax.Array) -> jax.Array:
    """Of the labels, float32 [N]; 0 where nothing is supervised, -inf for ids without a row."""
    own = statistics.of_label - log_sums(statistics)
    return jnp.where(targets == IGNORED, 0.0, own)


def token_losses(
    statistics: Statistics, targets: jax.Array, token_loss: TokenLoss, *, vocab_size: int
) -> jax.Array:
    """Of the tokens, float32 [N]; 0 where nothing is supervised, inf for ids without a row.

    Args:
      statistics: over the whole vocabulary, begun with `token_loss`.
      targets: int32 [N].
      token_loss: label smoothing and z-loss.
      vocab_size: V.
    """
    sums = statistics.logits
    mean = None if sums is None else sums / vocab_size
    losses = token_loss.values(log_sums(statistics), statistics.of_label, mean)
    return jnp.where(targets == IGNORED, 0.0, losses)


def slice_gradients(
    d_hidden: jax.Array,
    d_rows: jax.Array | None,
    rows: jax.Array,
    first: jax.Array,
    x: jax.Array,
    targets: jax.Array,
    log_sum: jax.Array,
    coefficients: jax.Array,
    *,
    vocab_size: int,
    hidden_fn: HiddenFn,
    block_tokens: int,
    token_loss: TokenLoss = PLAIN,
) -> tuple[jax.Array, jax.Array | None]:
    """One slice of pass 2.

    Args:
      d_hidden: gradient of the hidden states after `hidden_fn` from the slices before, float32
        [N, D].
      d_rows: gradient of this slice's rows from other tokens, float32 [R, D]; None: not wanted.
      rows: of the projection, [R, D].
      first: number of the first of them, int32 scalar.
      x: hidden states before `hidden_fn`, [N, D].
      targets: int32 [N].
      log_sum: `log_sums` over the whole vocabulary, float32 [N].
      coefficients: the objective's derivative by the label's log-probability, or by minus the
        token's loss, float32 [N]; 0 where nothing is supervised.
      vocab_size: V.
      hidden_fn: applied to each block of tokens.
      block_tokens: tokens whose logits exist at a time.
      token_loss: label smoothing and z-loss.

    Returns:
      Both gradients with this slice's part added.
    """

    def visit(
        carried: tuple[jax.Array, jax.Array | None], start: jax.Array, size: int
    ) -> tuple[jax.Array, jax.Array | None]:
        d_hidden, d_rows = carried
        hidden = hidden_fn(_block(x, start, size))
        logits = _logits(hidden, rows, first, vocab_size)
        labels = _block(targets, start, size) - first
        is_label = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels[:, None]
        own_sum = _block(log_sum, start, size)
        shares, wanted = token_loss.derivative_parts(
            jnp.exp(logits - own_sum[:, None]),
            is_label.astype(jnp.float32),
            own_sum,
            vocab_size=vocab_size,
            in_vocabulary=_is_row(logits, first, vocab_size),
        )
        factor = _block(coefficients, start, size)[:, None]
        d_logits = jnp.where(factor == 0, 0.0, factor * (wanted - shares))
        d_logits = d_logits.astype(rows.dtype)
        part = _dot(d_logits, rows, 1, 0) + _block(d_hidden, start, size)
        d_hidden = lax.dynamic_update_slice_in_dim(d_hidden, part, start, 0)
        if d_rows is not None:
            d_rows += _dot(d_logits, hidden, 0, 0)
        return d_hidden, d_rows

    return _over_blocks(visit, (d_hidden, d_rows), x.shape[0], block_tokens)


def _logits(hidden: jax.Array, rows: jax.Array, first: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [C, R]; far below all others from the end of the vocabulary on."""
    logits = project_to_vocab(hidden, rows)
    return jnp.where(_is_row(logits, first, vocab_size), logits, _LOWEST)


def _is_row(logits: jax.Array, first: jax.Array, vocab_size: int) -> jax.Array:
    """Which logits stand for a row of the vocabulary, bool [C, R]."""
    return first + lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    contraction = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, contraction, preferred_element_type=jnp.float32)


def _block(array: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, size, axis=0)


def _over_blocks(
    visit: Callable[[_T, jax.Array, int], _T], carried: _T, num_tokens: int, block_tokens: int
) -> _T:
    """Blocks of tokens in turn; what is carried is changed in place."""
    size = min(block_tokens, num_tokens)
    num_full, remainder = divmod(num_tokens, size)
    starts = jnp.arange(num_full, dtype=jnp.int32) * size
    carried, _ = lax.scan(lambda c, start: (visit(c, start, size), None), carried, starts)
    if remainder:
        carried = visit(carried, jnp.int32(num_full * size), remainder)
    return carried
