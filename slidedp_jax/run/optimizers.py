"""The optimizers that the training command offers, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from slidedp_jax.errors import UserError
from slidedp_jax.planner.optimizers import decays, muon_updates
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.learning_rate import learning_rate


def make_optimizer(args: TrainArguments, num_steps: int) -> optax.GradientTransformation:
    """The transformation that `args.optim` names, with the run's schedule and decoupled decay.

    Where learning rates are given by name, a parameter's update, decay included, is multiplied by
    the ratio of its peak rate to that of all: the schedule is the same for all.
    """
    made = _OPTIMIZERS[args.optim](args, learning_rate(args, num_steps))
    if not args.learning_rate_by_name:
        return made
    return optax.chain(made, _scaled_by_name(args))


def of_name(patterns: Mapping[str, float], name: str) -> float | None:
    """The value of the first pattern that fits a parameter's full name; None: none does."""
    return next((own for pattern, own in patterns.items() if fnmatchcase(name, pattern)), None)


def check_patterns(args: TrainArguments, trained: Collection[str]) -> None:
    """Whether every pattern of rates and decays by name decides something.

    Args:
      args: the run's settings.
      trained: full names of the parameters that are trained.

    Raises:
      UserError: one fits no trained parameter, or only those that an earlier one takes.
    """
    for setting in ("learning_rate_by_name", "weight_decay_by_name"):
        left = set(trained)
        for pattern in getattr(args, setting):
            own = {name for name in left if fnmatchcase(name, pattern)}
            if not own:
                earlier = any(fnmatchcase(name, pattern) for name in trained)
                why = "are taken by earlier patterns" if earlier else "there are none"
                raise UserError(
                    f"{setting}: the pattern {pattern!r} decides nothing: of the trained "
                    f"parameters that it fits, {'all ' if earlier else ''}{why}. Names are like "
                    f"{min(trained, default='none')}; the first pattern that fits counts"
                )
            left -= own


def _scaled_by_name(args: TrainArguments) -> optax.GradientTransformation:
    def update(updates: Mapping[str, Any], state: Any, params: Any = None) -> tuple[Any, Any]:
        ratios = {name: of_name(args.learning_rate_by_name, name) for name in updates}
        peak = args.learning_rate
        scaled = {
            name: value if (own := ratios[name]) is None else value * (own / peak)
            for name, value in updates.items()
        }
        return scaled, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def state_bytes(optimizer: optax.GradientTransformation, shapes: Mapping[str, Any]) -> int:
    """Bytes of the optimizer state of float32 parameters with these shapes; nothing is made."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _decay_mask(params: Mapping[str, Any]) -> dict[str, bool]:
    return {name: decays(name, jnp.shape(value)) for name, value in params.items()}


def _decay(args: TrainArguments) -> optax.GradientTransformation:
    """Decoupled decay: of matrices and embeddings, or as a pattern says."""
    patterns = args.weight_decay_by_name
    if not patterns:
        return optax.add_decayed_weights(args.weight_decay, mask=_decay_mask)

    def mask(wanted: float | None, params: Mapping[str, Any]) -> dict[str, bool]:
        """Whom a pattern gives `wanted`; None: who decays by default, and no pattern fits."""
        found = {name: of_name(patterns, name) for name in params}
        usual = _decay_mask(params)
        return {n: own == wanted and (own is not None or usual[n]) for n, own in found.items()}

    parts = [optax.add_decayed_weights(args.weight_decay, mask=functools.partial(mask, None))]
    parts += [
        optax.add_decayed_weights(value, mask=functools.partial(mask, value))
        for value in dict.fromkeys(patterns.values())
    ]
    return optax.chain(*parts)


def _adamw(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    """`optax.adamw`, where decay does not go by name."""
    return optax.chain(
        optax.scale_by_adam(b1=args.adam_beta1, b2=args.adam_beta2, eps=args.adam_epsilon),
        _decay(args),
        optax.scale_by_learning_rate(rate),
    )


def _lion(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    """`optax.lion`, where decay does not go by name."""
    return optax.chain(
        optax.scale_by_lion(b1=args.adam_beta1, b2=args.adam_beta2),
        _decay(args),
        optax.scale_by_learning_rate(rate),
    )


def _sgd(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(args.adam_beta1) if args.adam_beta1 else optax.identity(),
        _decay(args),
        optax.scale_by_learning_rate(rate),
    )


def _adafactor(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    """Learning rates as they are, not relative to the size of a parameter."""
    return optax.chain(
        optax.adafactor(multiply_by_parameter_scale=False),
        optax.scale(-1.0),  # adafactor without a learning rate descends by itself
        _decay(args),
        optax.scale_by_learning_rate(rate),
    )


def _muon(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    """Muon with decay for the layers' matrices, Adam with Nesterov's momentum for the rest.

    Updates are scaled to the size of Adam's (Liu et al., "Muon is Scalable for LLM Training",
    2025), so both take the same learning rate.
    """

    def layers_matrices(params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            # Of parameters that another branch updates there is a placeholder without dimensions.
            name: contrib.MuonDimensionNumbers()
            if muon_updates(name, getattr(value, "shape", ()))
            else None
            for name, value in params.items()
        }

    return contrib.muon(
        rate,
        weight_decay=args.weight_decay,
        adam_b1=args.adam_beta1,
        adam_b2=args.adam_beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=layers_matrices,
    )


_OPTIMIZERS: dict[str, Callable[[TrainArguments, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "muon": _muon,
}
