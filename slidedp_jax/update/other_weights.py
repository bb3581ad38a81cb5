"""Other weights in the trained ones' place for a while: averages, or a user's own.

They are put there and taken back through the gate, so nothing else uses the state meanwhile; what
fails in between leaves a state that says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np

from slidedp_jax.errors import UserError
from slidedp_jax.update.state_gate import StateGate

_LENT = (
    "other weights are in the trained ones' place (Trainer.evaluating): there is no step and no "
    "checkpoint of them; leave the `with` block first"
)


@contextlib.contextmanager
def other_weights(gate: StateGate, weights: Mapping[str, np.ndarray] | None) -> Iterator[None]:
    """See `Trainer.evaluating`."""
    with gate.turn:
        gate.check()
        gate.check_own()
        if weights is None:
            _swap(gate)
            kept = None
        else:
            kept = _put(gate, weights)
        gate.lent = _LENT
    try:
        yield
    finally:
        with gate.turn:
            gate.lent = ""
            if kept is None:
                _swap(gate)
            else:
                _put(gate, kept)


def _swap(gate: StateGate) -> None:
    if gate.ema_decay is None:
        raise UserError("no average is kept; pass ema_decay, such as 0.999, to the Trainer")
    gate.wait()
    shared = gate.shared
    with gate.writing() as writer:
        writer.swap_averages()
        writer.finish(gate.version, shared)


def _put(gate: StateGate, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write weights; returns what was there."""
    shapes = gate.shapes
    for name, values in weights.items():
        if name not in shapes:
            raise UserError(f"no parameter {name!r}; names are like {next(iter(shapes))}")
        if np.shape(values) != shapes[name]:
            raise UserError(f"{name} has shape {shapes[name]}, the weights {np.shape(values)}")
    with gate.reading() as reader:
        before = {name: reader.read(name) for name in weights}
        shared = reader.shared
    with gate.writing() as writer:
        for name, values in weights.items():
            writer.write(name, np.asarray(values))
        writer.finish(gate.version, shared)
    return before
