"""What the optimizers of the training command keep, by name; no JAX, so no optax.

A test compares with the states that optax makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, get_args

OptimizerName = Literal["adamw", "lion", "sgd", "adafactor", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)

WHOLE_PARAMETER_OPTIMIZERS: tuple[OptimizerName, ...] = ("adafactor", "muon")
"""Those whose update of a matrix reads all of it; it runs on the host."""

LEANER: Mapping[OptimizerName, tuple[OptimizerName, ...]] = {
    "adamw": ("lion", "adafactor"),
    "muon": ("lion", "adafactor"),
    "lion": ("adafactor",),
    "sgd": ("adafactor",),
    "adafactor": (),
}
"""Optimizers with less state than another, fastest update first."""

AVERAGE_BYTES = 4
"""Bytes per trained parameter of a moving average of the weights."""

_FACTORED_FROM = 128
"""Size of a matrix's smaller dimension from which Adafactor keeps sums of rows and columns."""

Shape = tuple[int, ...]


def state_bytes(optimizer: OptimizerName, shapes: Mapping[str, Shape]) -> int:
    """Bytes of an optimizer's float32 state, counters aside.

    Args:
      optimizer: as `--optim` names it; SGD with momentum.
      shapes: of the parameters that are trained, by full name.
    """
    count = _ELEMENTS[optimizer]
    return 4 * sum(count(name, shape) for name, shape in shapes.items())


def decays(name: str, shape: Shape) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to norms and biases."""
    return len(shape) > 1 and not name.endswith((".bias", "norm.weight"))


def muon_updates(name: str, shape: Shape) -> bool:
    """Whether Muon updates a parameter itself (a layer's matrix); Adam updates the others.

    Experts are no matrix but many in one array, of which one holds gate and up: Adam has those.
    """
    return ".layers." in name and len(shape) == 2 and decays(name, shape)


def _two_moments(name: str, shape: Shape) -> int:
    return 2 * math.prod(shape)


def _one_moment(name: str, shape: Shape) -> int:
    return math.prod(shape)


def _of_muon(name: str, shape: Shape) -> int:
    return math.prod(shape) * (1 if muon_updates(name, shape) else 2)


def _of_adafactor(name: str, shape: Shape) -> int:
    if len(shape) < 2 or sorted(shape)[-2] < _FACTORED_FROM:
        return math.prod(shape) + 2
    smaller, larger = sorted(shape)[-2:]
    return math.prod(shape) // larger + math.prod(shape) // smaller + 1


_ELEMENTS: Mapping[OptimizerName, Callable[[str, Shape], int]] = {
    "adamw": _two_moments,
    "lion": _one_moment,
    "sgd": _one_moment,
    "adafactor": _of_adafactor,
    "muon": _of_muon,
}
