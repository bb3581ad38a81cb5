"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import optax

from slidedp_jax.run.arguments import TrainArguments


def num_warmup_steps(args: TrainArguments, num_steps: int) -> int:
    """Steps of linear warm-up: `warmup_steps`, or `warmup_ratio` of all steps rounded up."""
    if args.warmup_steps is not None or args.lr_scheduler_type == "constant":
        return args.warmup_steps or 0
    return math.ceil(round(args.warmup_ratio * num_steps, 6))


def learning_rate(args: TrainArguments, num_steps: int) -> optax.Schedule:
    """Updates done so far -> learning rate of the next update.

    Warm-up goes linearly from 0 to the peak, so that update k (from 0) of W warm-up updates runs
    at k / W of it, as in Hugging Face's schedulers; then constant, linear or half a cosine down to
    `min_lr_ratio` at `num_steps`.
    """
    warmup = num_warmup_steps(args, num_steps)
    decay = max(1, num_steps - warmup)
    peak, floor = args.learning_rate, args.min_lr_ratio

    def schedule(count: Any) -> Any:
        step = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((step - warmup) / decay, 0.0, 1.0)
        if args.lr_scheduler_type == "cosine":
            after = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif args.lr_scheduler_type == "linear":
            after = floor + (1 - floor) * (1 - progress)
        else:
            after = jnp.ones_like(step)
        rising = step / max(1, warmup)
        return peak * jnp.where(step < warmup, rising, after)

    return schedule
