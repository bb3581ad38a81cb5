"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from slidedp_jax.run.arguments import TrainArguments


def num_warmup_steps(args: TrainArguments, num_steps: int) -> int:
    """Steps of linear warm-up: `warmup_steps`, or `warmup_ratio` of all steps rounded up."""
    if args.warmup_steps is not None or args.lr_scheduler_type == "constant":
        return args.warmup_steps or 0
    return math.ceil(round(args.warmup_ratio * num_steps, 6))


def num_decay_steps(args: TrainArguments, num_steps: int) -> int:
    """Last steps of `warmup_stable_decay`: `lr_decay_steps`, or a share of all rounded up."""
    if args.lr_decay_steps is not None:
        return args.lr_decay_steps
    return math.ceil(round(args.lr_decay_ratio * num_steps, 6))


def learning_rate(args: TrainArguments, num_steps: int) -> optax.Schedule:
    """Updates done so far -> learning rate of the next update.

    Warm-up goes linearly from 0 to the peak, so that update k (from 0) of W warm-up updates runs
    at k / W of it, as in Hugging Face's schedulers; then, of the peak and not below `min_lr_ratio`
    where it decays:

    - `constant`, `constant_with_warmup`: 1;
    - `linear`, `cosine`: down to `min_lr_ratio` at `num_steps`, half a cosine;
    - `inverse_sqrt`: sqrt(W / k), with 10,000 in place of W where there is no warm-up;
    - `warmup_stable_decay`: 1, and in the last D updates down to `min_lr_ratio` by half a cosine, a
      line, or 1 - sqrt(i / D) of the rest (Hägele et al., arXiv:2405.18392).
    """
    warmup, last = num_warmup_steps(args, num_steps), num_decay_steps(args, num_steps)
    decay = max(1, num_steps - warmup)
    peak, floor = args.learning_rate, args.min_lr_ratio
    # Where warm-up and decay overlap, the decay begins after the warm-up.
    stable = max(warmup, num_steps - last)
    timescale = warmup or _TIMESCALE

    def schedule(count: Any) -> Any:
        step = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((step - warmup) / decay, 0.0, 1.0)
        if args.lr_scheduler_type == "cosine":
            after = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif args.lr_scheduler_type == "linear":
            after = floor + (1 - floor) * (1 - progress)
        elif args.lr_scheduler_type == "inverse_sqrt":
            since = jnp.maximum(step - warmup + timescale, timescale)
            after = jnp.maximum(jnp.sqrt(timescale / since), floor)
        elif args.lr_scheduler_type == "warmup_stable_decay":
            done = jnp.clip((step - stable) / max(1, num_steps - stable), 0.0, 1.0)
            after = floor + (1 - floor) * _DECAYS[args.lr_decay_type](done)
        else:
            after = jnp.ones_like(step)
        rising = step / max(1, warmup)
        return peak * jnp.where(step < warmup, rising, after)

    return schedule


_TIMESCALE = 10_000
"""Of `inverse_sqrt` without warm-up, as Hugging Face has it."""

_DECAYS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda done: 0.5 * (1 + jnp.cos(jnp.pi * done)),
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - jnp.sqrt(done),
}
"""Share of the decay that has been done -> what is left of the peak."""
