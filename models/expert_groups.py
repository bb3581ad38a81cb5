"""Tokens in the order of the experts that they visit, and back: sorted, padded, nothing dropped.

Each token visits k experts, so there are M = T k visits. They are sorted by expert, and each
expert's group is padded to whole blocks of rows, so that a block belongs to one expert. The number
of rows is the largest that any choice of experts can need: M + min(E, M) (block - 1), rounded down
to whole blocks. So no visit is ever dropped, whatever the skew; a block of 1 pads nothing.

Everything is gathered, never scattered: both ways are permutations, and a gather's sums have one
order, so the bits are the same in every run. Letters: T tokens, D hidden, E experts, P rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_BLOCK = 1024
SMALLEST_BLOCK = 8
_WASTE = 8
"""Padding is at most about 1 / 8 of the visits where these are spread evenly."""


class Groups(NamedTuple):
    """Where the visits of some tokens lie among rows that are sorted by expert.

    Attributes:
      slots: int32 [T, k], the row of each visit.
      sources: int32 [P], the visit (token k + its place) of each row, M where a row is padding.
      sizes: int32 [E], rows of each expert, padding included; they add up to P.
    """

    slots: jax.Array
    sources: jax.Array
    sizes: jax.Array


def block_rows(num_visits: int, num_experts: int) -> int:
    """Rows of a block: the largest power of two that pads by little, within the limits."""
    fitting = num_visits // (_WASTE * num_experts)
    power = 1 << max(fitting.bit_length() - 1, 0)
    return int(np.clip(power, SMALLEST_BLOCK, LARGEST_BLOCK))


def num_rows(num_visits: int, num_experts: int, block: int) -> int:
    """Rows that any choice of experts fits into, a multiple of the block."""
    most = num_visits + min(num_experts, num_visits) * (block - 1)
    return most // block * block


def group_visits(chosen: jax.Array, num_experts: int, block: int) -> Groups:
    """Sorts visits by expert; within one, tokens keep their order.

    Args:
      chosen: int32 [T, k], experts of each token.
      num_experts: E.
      block: rows that a group is padded to a multiple of; 1 for none.
    """
    num_visits = chosen.size
    rows = num_rows(num_visits, num_experts, block)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rank = jnp.argsort(order).astype(jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == experts[None, :], axis=0, dtype=jnp.int32)
    padded = -(-counts // block) * block
    begins, padded_begins = jnp.cumsum(counts) - counts, jnp.cumsum(padded) - padded
    slots = rank + (padded_begins - begins)[flat]
    # What no group needs is the last one's, so that the sizes say whose every row is.
    sizes = padded.at[-1].add(rows - jnp.sum(padded))
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = row_owners(sizes, row)
    within = row - padded_begins[owner]
    visit = order.at[begins[owner] + within].get(mode="clip")
    sources = jnp.where(within < counts[owner], visit, num_visits)
    return Groups(slots.reshape(chosen.shape), sources, sizes)


def row_owners(sizes: jax.Array, rows: jax.Array) -> jax.Array:
    """The expert of each row, int32, for groups of these sizes that follow each other."""
    ends = jnp.cumsum(sizes)
    return jnp.sum(ends[None, :] <= rows[:, None], axis=1, dtype=jnp.int32)


@jax.custom_vjp
def dispatch(x: jax.Array, groups: Groups) -> jax.Array:
    """Rows of tokens, [T, D] -> [P, D]; padding is 0."""
    token = groups.sources // groups.slots.shape[1]
    return x.at[token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(y: jax.Array, groups: Groups) -> jax.Array:
    """Sums of each token's rows, [P, D] -> [T, D], added up in float32."""
    visits = y.at[groups.slots].get(mode="promise_in_bounds")
    return jnp.sum(visits, axis=1, dtype=jnp.float32).astype(y.dtype)


# Each is the other's transpose; JAX would make a scatter of either, which adds in any order.
dispatch.defvjp(
    lambda x, groups: (dispatch(x, groups), groups),
    lambda groups, d_rows: (collect(d_rows, groups), None),
)
collect.defvjp(
    lambda y, groups: (collect(y, groups), groups),
    lambda groups, d_sums: (dispatch(d_sums, groups), None),
)


@jax.custom_vjp
def of_rows(values: jax.Array, groups: Groups) -> jax.Array:
    """A number per visit, [T, k], as a number per row, [P]; padding is 0."""
    return values.reshape(-1).at[groups.sources].get(mode="fill", fill_value=0)


of_rows.defvjp(
    lambda values, groups: (of_rows(values, groups), groups),
    lambda groups, d_rows: (d_rows.at[groups.slots].get(mode="promise_in_bounds"), None),
)
