"""The optimizers that the training command offers, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from slidedp_jax.planner.optimizers import decays, muon_updates
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.learning_rate import learning_rate


def make_optimizer(args: TrainArguments, num_steps: int) -> optax.GradientTransformation:
    """The transformation that `args.optim` names, with the run's schedule and decoupled decay."""
    return _OPTIMIZERS[args.optim](args, learning_rate(args, num_steps))


def state_bytes(optimizer: optax.GradientTransformation, shapes: Mapping[str, Any]) -> int:
    """Bytes of the optimizer state of float32 parameters with these shapes; nothing is made."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _decay_mask(params: Mapping[str, Any]) -> dict[str, bool]:
    return {name: decays(name, jnp.shape(value)) for name, value in params.items()}


def _averages_and_decay(args: TrainArguments) -> dict[str, Any]:
    """What AdamW and Lion take alike."""
    return {
        "b1": args.adam_beta1,
        "b2": args.adam_beta2,
        "weight_decay": args.weight_decay,
        "mask": _decay_mask,
    }


def _adamw(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, eps=args.adam_epsilon, **_averages_and_decay(args))


def _lion(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(rate, **_averages_and_decay(args))


def _sgd(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(args.adam_beta1) if args.adam_beta1 else optax.identity(),
        optax.add_decayed_weights(args.weight_decay, mask=_decay_mask),
        optax.scale_by_learning_rate(rate),
    )


def _adafactor(args: TrainArguments, rate: optax.Schedule) -> optax.GradientTransformation:
    """Learning rates as they are, not relative to the size of a parameter."""
    return optax.chain(
        optax.adafactor(multiply_by_parameter_scale=False),
        optax.scale(-1.0),  # adafactor without a learning rate descends by itself
        optax.add_decayed_weights(args.weight_decay, mask=_decay_mask),
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
