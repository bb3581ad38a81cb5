"""Whether a user's loss is the sum that the runtime takes it for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.adapter.claims import example_batch
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import StreamedModel

TOLERANCE = 0.02
"""Of the losses' size: rounding in bf16 stays below it, a mean over rows is off by half."""

IGNORED = -100


def check_sum_over_rows(
    model: StreamedModel, x: jax.ShapeDtypeStruct, vocab_size: int, *, packed: bool
) -> None:
    """Compute the loss of two made-up rows, together and apart, and of a row that counts nothing.

    Args:
      model: the adapted model.
      x: hidden states of one row, [1, T, D].
      vocab_size: V.
      packed: whether batches have segments.

    Raises:
      UserError: the loss of two rows is not the sum of their losses, or an unsupervised row counts.
    """
    tokens = x.shape[1]
    ids = np.arange(3 * tokens, dtype=np.int32).reshape(3, tokens) % vocab_size
    targets = np.where([[True], [True], [False]], ids, IGNORED).astype(np.int32)
    arrays = {
        name: np.ones((3, *shape.shape[1:]), shape.dtype)
        for name, shape in example_batch(
            1, tokens, packed=packed, token_arrays=model.token_arrays
        ).items()
    }
    arrays |= {"input_ids": ids, "targets": targets}
    arrays["positions"] = np.tile(np.arange(tokens, dtype=np.int32), (3, 1))

    def losses() -> list[jax.Array]:
        head, embed = _made_up(model.head.shapes), _made_up(model.embed.shapes)
        hidden = _waves(jax.ShapeDtypeStruct((3, *x.shape[1:]), x.dtype))

        def of(*rows: int) -> jax.Array:
            chosen = np.array(rows)
            batch = {name: jnp.asarray(array[chosen]) for name, array in arrays.items()}
            return model.head_loss_fn(head, embed if model.tied else None, hidden[chosen], batch)

        return [of(0, 1), of(0), of(1), of(2)]

    both, first, second, nothing = map(float, jax.jit(losses)())
    size = abs(first) + abs(second)
    if not abs(both - first - second) <= TOLERANCE * size:
        raise UserError(
            f"head_loss is no sum over rows: two rows together give {both:.6g}, apart "
            f"{first:.6g} and {second:.6g}. Return the sum of the losses of the supervised tokens, "
            "no mean; the runtime divides by their number in the whole step"
        )
    if not abs(nothing) <= TOLERANCE * size / 100:
        raise UserError(
            f"head_loss of a row in which every target is -100 is {nothing:.6g}; it must be 0. "
            "Rows that fill up a microbatch and masked tokens must not count: multiply each "
            "token's loss by batch['targets'] >= 0"
        )


def _made_up(shapes: Any) -> Any:
    return jax.tree.map(_waves, shapes)


def _waves(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers of moderate size without a pattern that matters, made where they are needed."""
    flat = jnp.sin(jnp.arange(np.prod(shape.shape), dtype=jnp.float32) * 1.7 + 0.3)
    return (0.3 * flat).reshape(shape.shape).astype(shape.dtype)
