"""Random numbers that depend on seed, step, row and stage alone.

The key of a row in a stage is `fold_in` of seed, step, the row's place in the step and the stage's
place in forward order (embedding 0, layer i at i + 1, head after the last layer), in this order.
A random stream of an NNX module starts at that key with the CRC-32 of the stream's path in the
module (`drop.rngs.key`) folded in.
A function that draws is run row by row under `vmap`, so that what one row draws does not depend on
the rows beside it: the same on any number of devices, in any microbatch, and when recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

IMPLEMENTATION = "threefry2x32"


def row_key(seed: Any, step: Any, row: Any, stage: Any) -> jax.Array:
    """The key of one row in one stage.

    Args:
      seed: the trainer's, 0 to 2**32 - 1.
      step: the first is 1.
      row: place among the step's rows.
      stage: 0 for the embedding, i + 1 for layer i, the number of layers + 1 for the head.
    """
    key = jax.random.key(seed, impl=IMPLEMENTATION)
    for part in (step, row, stage):
        key = jax.random.fold_in(key, part)
    return key


def row_by_row(fn: Callable[..., Any], seeds: jax.Array, stage: Any, rows: Any) -> Any:
    """`fn(rows, key)` on each row as a batch of one; what it returns is stacked in front.

    Args:
      fn: takes arrays [1, ...] and a key.
      seeds: `row_seeds` uint32 [B, 3].
      stage: the stage's place, an integer or an int32 scalar.
      rows: pytree of arrays [B, ...].
    """

    def one(row: Any, seeds: jax.Array) -> Any:
        seed, step, place = seeds
        return fn(jax.tree.map(lambda a: a[None], row), row_key(seed, step, place, stage))

    return jax.vmap(one)(rows, seeds)
