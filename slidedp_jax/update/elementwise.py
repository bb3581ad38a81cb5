"""Update programs that may be run on blocks of elements, as the blocked kernel does.

An element-wise program's update of an element depends on that element's value, gradient and state
and on shared scalars. That is checked, not assumed: each program is run on a matrix as a whole and
in pieces, over several steps and gradient scales, which must agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.update.decompose import DecomposedOptimizer

LANES = 128
"""Blocks of a matrix are shown to the transformation as [block / LANES, LANES]: two dimensions."""

_LOG = logging.getLogger(__name__)

_GRADIENT_SCALES = (1e-3, 1.0, 1e6)


class ElementwiseOptimizer:
    """Element-wise programs with the same state, on blocks.

    Args:
      optimizer: the transformation taken apart.
      members: its groups that this object updates, in the order of their numbers here.

    Attributes:
      state_dtypes: dtypes of the per-parameter state arrays.
    """

    def __init__(self, optimizer: DecomposedOptimizer, members: Sequence[int]):
        self._optimizer = optimizer
        self._members = tuple(members)
        dtypes = {state_dtypes(optimizer, group) for group in members}
        assert len(dtypes) <= 1, dtypes
        self.state_dtypes: tuple[np.dtype, ...] = next(iter(dtypes), ())
        self.initial_shared = optimizer.initial_shared
        self.advance_shared = optimizer.advance_shared

    @property
    def num_groups(self) -> int:
        """Number of distinct update programs."""
        return len(self._members)

    def init_block(
        self, group: int, values: jax.Array, shape: tuple[int, ...] | None = None
    ) -> list[jax.Array]:
        """Starting state of a flat block of master weights."""
        shape = shape or self._block_shape(group, values.size)
        state = self._optimizer.init(self._members[group], values.reshape(shape))
        return [leaf.reshape(-1) for leaf in state]

    def update_block(
        self,
        group: int,
        values: jax.Array,
        gradients: jax.Array,
        state: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        shape: tuple[int, ...] | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """One step on a flat block: float32 [n], float32 [n], state [n] each -> the same.

        `shared` is the shared state before the step, the same for every block of the step. `shape`
        is what the transformation sees the block as; by default, a matrix if its group's are.
        """
        shape = shape or self._block_shape(group, values.size)
        new_values, new_state = self._optimizer.update(
            self._members[group],
            values.reshape(shape),
            gradients.reshape(shape),
            [leaf.reshape(shape) for leaf in state],
            shared,
        )
        return new_values.reshape(-1), [leaf.reshape(-1) for leaf in new_state]

    def _block_shape(self, group: int, size: int) -> tuple[int, ...]:
        rank = len(self._optimizer.shape(self._members[group]))
        lanes = math.gcd(LANES, size)
        return (1,) * (rank - 2) + (size // lanes, lanes) if rank >= 2 else (size,)


def state_dtypes(optimizer: DecomposedOptimizer, group: int) -> tuple[np.dtype, ...]:
    """Dtypes of the state arrays of a group's parameters."""
    return tuple(np.dtype(leaf.dtype) for leaf in optimizer.state_shapes(group))


def is_elementwise(optimizer: DecomposedOptimizer, group: int) -> bool:
    """Whether the group's state has the parameter's shape and its program agrees with its pieces.

    What cannot be run on a matrix of another shape, or on pieces of one, is not. Half of the
    weights start at 0, where an update of any size shows all its digits.
    """
    shape, trial = optimizer.shape(group), _trial_shape(len(optimizer.shape(group)))
    try:
        # A square matrix's row statistics have its shape; those of one that is not square do not.
        for own in (shape, trial):
            if any(leaf.shape != own for leaf in optimizer.state_shapes(group, own)):
                return False
        start = np.random.default_rng(0).standard_normal(math.prod(trial)).astype(np.float32)
        start[::2] = 0
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            whole, pieces = (_trial_steps(optimizer, group, start, number) for number in (1, 3))
    except Exception as error:
        _LOG.info("an update is taken for one of whole parameters, since a trial failed: %s", error)
        return False
    return all(_agree(expected, got) for expected, got in zip(whole, pieces, strict=True))


def _trial_shape(rank: int) -> tuple[int, ...]:
    """Of an array of that many dimensions on which a program is tried."""
    size = 6 * LANES * LANES
    return (1,) * (rank - 2) + (size // (2 * LANES), 2 * LANES) if rank >= 2 else (size,)


def _trial_steps(
    optimizer: DecomposedOptimizer, group: int, start: np.ndarray, pieces: int
) -> list[np.ndarray]:
    """After each of a few steps: the weights that began at 0, all weights, each state."""
    shape = _trial_shape(len(optimizer.shape(group))) if pieces == 1 else None
    blocks = ElementwiseOptimizer(optimizer, [group])
    init = jax.jit(lambda part: blocks.init_block(0, part, shape))
    step = jax.jit(
        lambda values, gradients, state, shared: blocks.update_block(
            0, values, gradients, state, shared, shape
        )
    )
    advance = jax.jit(optimizer.advance_shared)
    parts = [jnp.asarray(part) for part in np.split(start, pieces)]
    states = [init(part) for part in parts]
    shared: Sequence[Any] = optimizer.initial_shared()
    draw = np.random.default_rng(1)
    results = []
    for scale in _GRADIENT_SCALES:
        gradient = (scale * draw.standard_normal(start.size)).astype(np.float32)
        for number, part in enumerate(np.split(gradient, pieces)):
            parts[number], states[number] = step(parts[number], part, states[number], shared)
        shared = advance(shared)
        values = np.concatenate([np.asarray(part) for part in parts])
        results += [values[start == 0], values]
        for state in zip(*states, strict=True):
            results.append(np.concatenate([np.asarray(part, np.float32) for part in state]))
    return results


def _agree(expected: np.ndarray, got: np.ndarray) -> bool:
    """Equal but for rounding, on the scale of the largest value."""
    largest = float(np.nanmax(np.abs(expected), initial=0.0))
    atol = 1e-5 * largest if np.isfinite(largest) else 0.0
    return np.allclose(expected, got, rtol=1e-5, atol=atol, equal_nan=True)
