"""Cross-entropy against a large vocabulary without keeping the logits.

Tokens are taken in chunks. When a gradient is wanted, one pass computes loss, gradient of the
hidden states and gradient of the projection (three matrix products per chunk; recomputing the
logits in a backward pass would take four), which works because the loss is a sum and its cotangent
a scalar.

Memory beyond inputs: per chunk of C tokens about three float32 arrays [C, V]; when differentiated,
also the gradients, float32 [V, D] and [N, D] in the inputs' dtype.

Letters: N tokens, D hidden, V vocabulary, C tokens per chunk.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from slidedp_jax.models.batch_arrays import IGNORED
from slidedp_jax.models.token_loss import PLAIN, TokenLoss
from slidedp_jax.models.varying import vary_like


def project_to_vocab(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Logits x W^T in float32, [..., D] and [V, D] -> [..., V]."""
    contraction = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contraction, preferred_element_type=jnp.float32)


def cross_entropy_sum(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    chunk_tokens: int,
    token_loss: TokenLoss = PLAIN,
) -> jax.Array:
    """Sum of -log softmax(x W^T)[target] over the supervised tokens, or of another `token_loss`.

    Logits, log-sum-exp, the sum and the projection's gradient are float32; the gradients come back
    in the dtypes of `x` and `weight`.

    Args:
      x: hidden states, [N, D].
      weight: output projection, [V, D], same dtype as `x`.
      targets: int32 [N]; -100 counts nothing. Any other id outside [0, V) makes the loss NaN.
      chunk_tokens: tokens whose logits exist at one time.
      token_loss: label smoothing and z-loss.

    Returns:
      float32 scalar.
    """
    if chunk_tokens < 1:
        raise ValueError(f"loss_chunk_tokens is {chunk_tokens}; it must be at least 1.")
    weight = vary_like(weight, x, targets)
    return _loss(min(chunk_tokens, x.shape[0]), token_loss, x, weight, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(
    chunk: int, token_loss: TokenLoss, x: jax.Array, weight: jax.Array, targets: jax.Array
) -> jax.Array:
    def add_chunk(total: jax.Array, chunk_x: jax.Array, chunk_targets: jax.Array) -> jax.Array:
        losses, _, _ = _losses(token_loss, project_to_vocab(chunk_x, weight), chunk_targets)
        return total + losses.sum()

    total = vary_like(jnp.zeros((), jnp.float32), x, weight, targets)
    num_full, remainder = divmod(x.shape[0], chunk)

    def visit(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return add_chunk(total, _chunk(x, index, chunk), _chunk(targets, index, chunk)), None

    total, _ = lax.scan(visit, total, jnp.arange(num_full, dtype=jnp.int32))
    if remainder:
        total = add_chunk(total, x[-remainder:], targets[-remainder:])
    return total


_Sums = tuple[jax.Array, jax.Array]
"""Of losses, and of gradients of the weight."""


def _loss_and_gradients(
    chunk: int, token_loss: TokenLoss, x: jax.Array, weight: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    def of_chunk(
        sums: _Sums, chunk_x: jax.Array, chunk_targets: jax.Array
    ) -> tuple[_Sums, jax.Array]:
        total, d_weight = sums
        logits = project_to_vocab(chunk_x, weight)
        losses, log_total, supervised = _losses(token_loss, logits, chunk_targets)
        is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == chunk_targets[:, None]
        shares, wanted = token_loss.derivative_parts(
            jnp.exp(logits - log_total[:, None]),
            is_target.astype(jnp.float32),
            log_total,
            vocab_size=weight.shape[0],
        )
        d_logits = shares - wanted
        d_logits = jnp.where(supervised[:, None], d_logits, 0.0).astype(weight.dtype)
        d_weight += lax.dot_general(
            d_logits, chunk_x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        d_x = lax.dot_general(d_logits, weight, (((1,), (0,)), ((), ())))
        return (total + losses.sum(), d_weight), d_x

    sums = (
        vary_like(jnp.zeros((), jnp.float32), x, weight, targets),
        vary_like(jnp.zeros(weight.shape, jnp.float32), x, weight, targets),
    )
    num_full, remainder = divmod(x.shape[0], chunk)

    def visit(sums: _Sums, index: jax.Array) -> tuple[_Sums, jax.Array]:
        return of_chunk(sums, _chunk(x, index, chunk), _chunk(targets, index, chunk))

    sums, d_x = lax.scan(visit, sums, jnp.arange(num_full, dtype=jnp.int32))
    d_x = d_x.reshape(num_full * chunk, x.shape[1])
    if remainder:
        sums, d_tail = of_chunk(sums, x[-remainder:], targets[-remainder:])
        d_x = jnp.concatenate([d_x, d_tail])
    # Only the dtype of the weight is needed later; keeping the weight would keep it in memory.
    return sums[0], (d_x, sums[1], jnp.zeros((0,), weight.dtype))


def _scale_gradients(
    chunk: int,
    token_loss: TokenLoss,
    residuals: tuple[jax.Array, jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    d_x, d_weight, like_weight = residuals
    scaled = (d_x.astype(jnp.float32) * cotangent).astype(d_x.dtype)
    return scaled, (d_weight * cotangent).astype(like_weight.dtype), None


_loss.defvjp(_loss_and_gradients, _scale_gradients)


def _losses(
    token_loss: TokenLoss, logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per token: loss (0 where ignored), log-sum-exp of the logits, whether it is supervised."""
    supervised = targets != IGNORED
    # A negative id other than -100 must not count from the end of the vocabulary.
    wanted = jnp.where(targets < 0, logits.shape[1], targets)
    wanted = jnp.where(supervised, wanted, 0)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    of_target = jnp.take_along_axis(logits, wanted[:, None], axis=1, mode="fill")[:, 0]
    mean_logit = logits.mean(axis=-1) if token_loss.label_smoothing else None
    losses = token_loss.values(log_total, of_target, mean_logit)
    return jnp.where(supervised, losses, 0.0), log_total, supervised


def _chunk(array: jax.Array, index: jax.Array, chunk: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, index * chunk, chunk, axis=0)
