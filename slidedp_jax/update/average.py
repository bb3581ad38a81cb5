"""An exponential moving average of the weights as one more state of the optimizer.

After every step, average := decay * average + (1 - decay) * weights, in fp32, beginning at the
starting weights. As a state of the transformation it is updated with the weights by the same
kernel, lies in host memory beside the moments (the last of a parameter's state arrays) and is part
of every checkpoint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class WithAverageState(NamedTuple):
    """State of the transformation inside, then the average of each parameter."""

    inner: Any
    average: Any


def with_average(
    transformation: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """The same updates, and an average of the weights after them.

    Args:
      transformation: any transformation.
      decay: between 0 and 1; an average over about 1 / (1 - decay) steps.

    Raises:
      ValueError: `decay` lies outside.
    """
    if not 0 < decay < 1:
        raise ValueError(f"ema_decay={decay}; it must lie between 0 and 1, such as 0.999")
    inside = optax.with_extra_args_support(transformation)

    def init(params: Any) -> WithAverageState:
        start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        return WithAverageState(inside.init(params), start)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, inner = inside.update(updates, state.inner, params, **extra)
        average = jax.tree.map(
            lambda old, new: old + (1 - decay) * (new - old),
            state.average,
            optax.apply_updates(params, updates),
        )
        return updates, WithAverageState(inner, average)

    return optax.GradientTransformationExtraArgs(init, update)
