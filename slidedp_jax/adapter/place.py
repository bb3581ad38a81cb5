"""Where stages and whole model part, told by the arrays that the whole model computes.

That an array equals what a stage gives does not say that the next stage is given it there:
something may be done to it first, or it may be a part of what is handed on. So the next stage is
tried on the other arrays that are there before it. If it agrees with the whole model on one of
them, it is right, and what it is given is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.jax_internals import values_within


@final
class WholePass:
    """All arrays of the hidden states' size that a whole model's forward pass computes, in order.

    Args:
      program: traced, of (values, batch).
      values: of all parameters by name.
      batch: the rows.
      size: elements of the hidden states.
    """

    def __init__(self, program: Any, values: Mapping[str, jax.Array], batch: Any, size: int):
        @jax.jit
        def run(values: Any, batch: Any) -> jax.Array:
            found = values_within(program, jax.tree.leaves((values, batch)), size)
            flat = [array.astype(jnp.float32).reshape(-1) for array in found]
            return jnp.stack(flat) if flat else jnp.zeros((0, size), jnp.float32)

        self._run, self._values, self._batch = run, values, batch
        self.found = run(values, batch)

    def holds(self, array: jax.Array, rtol: float, *, after: int = -1) -> bool:
        """Whether an array is among them, or among those that come after one of them."""
        distances = np.asarray(_distances(self.found, array.astype(jnp.float32).reshape(-1)))
        return bool((distances[after + 1 :] <= rtol).any())

    def before(self, names: Collection[str]) -> list[int]:
        """Indices of those that do not depend on some parameters."""
        moved = {n: 1.25 * v if n in names else v for n, v in self._values.items()}
        same = (self._run(moved, self._batch) == self.found).all(axis=1)
        indices: list[int] = np.flatnonzero(np.asarray(same)).tolist()
        return indices


@jax.jit
def _distances(found: jax.Array, own: jax.Array) -> jax.Array:
    distances: jax.Array = jnp.linalg.norm(found - own[None], axis=1) / jnp.linalg.norm(own)
    return distances


def equal(one: jax.Array, other: jax.Array, rtol: float) -> bool:
    """Whether two arrays are the same but for rounding."""
    flat = [array.astype(jnp.float32).reshape(-1) for array in (one, other)]
    return bool(_distances(flat[0][None], flat[1])[0] <= rtol)


def place(
    whole: WholePass,
    hidden: Sequence[jax.Array],
    names: Sequence[str],
    parameters: Sequence[Collection[str]],
    stage: Callable[[int, jax.Array], jax.Array | bool],
    rtol: float,
) -> str:
    """Where values part, in words.

    Args:
      whole: the whole model's forward pass.
      hidden: what embedding and layers give.
      names: of embedding, layers and head.
      parameters: names of those that each reads.
      stage: (number, hidden states) -> what that layer gives of them; of the head, whether the loss
        is that of the whole model.
      rtol: relative tolerance.
    """
    same = [
        number
        for number, own in enumerate(hidden)
        if whole.holds(own, rtol) and not (number and equal(own, hidden[number - 1], rtol))
    ]
    if not same:
        return (
            "They part in embed, or the model's own forward pass never holds its hidden states as "
            "one array"
        )
    last, first = same[-1], same[-1] + 1
    before, head = names[last], first == len(names) - 1
    if head and stage(first, hidden[last]):
        return "Values agree in every stage"
    what = names[first] if head else f"the layer at {names[first]}"

    def agrees_on_another(stages: Sequence[Collection[str]]) -> bool:
        names = {name for one in stages for name in one}
        return _agrees_on_another(whole, hidden[last], names, stage, first, rtol)

    if agrees_on_another(parameters[first:]):
        return (
            f"They part in {before}, or between it and {what}: what {before} gives is an array of "
            f"the whole model's forward pass, but not what {what} is given there. It agrees if it "
            f"is given another one, so {before} leaves something out at its end"
        )
    said = (
        f"They part in {what}: the hidden states that {before} gives are those of the whole model"
    )
    if agrees_on_another(parameters[first : first + 1]):
        return f"{said}, which computes other layers before this one: give layers= in its order"
    return said if head else f"{said}, what it gives is not"


def _agrees_on_another(
    whole: WholePass,
    own: jax.Array,
    names: Collection[str],
    stage: Callable[[int, jax.Array], jax.Array | bool],
    number: int,
    rtol: float,
) -> bool:
    """Whether a stage is right if it is given another array, one that is there before `names`."""
    for index in whole.before(names):
        given = whole.found[index].reshape(own.shape).astype(own.dtype)
        if equal(given, own, rtol):
            continue
        result = stage(number, given)
        if isinstance(result, bool):
            if result:
                return True
        elif whole.holds(result, rtol, after=index) and not equal(result, given, rtol):
            return True
    return False
