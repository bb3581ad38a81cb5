"""How each parameter is updated: on blocks, as a whole, or not at all.

Groups of parameters with the same kind of update and the same state lie together in memory (see
`chunk`); what a part of a chunk needs is a number, its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import optax

from slidedp_jax.state.layout import FROZEN
from slidedp_jax.update.average import with_average
from slidedp_jax.update.decompose import DecomposedOptimizer
from slidedp_jax.update.elementwise import ElementwiseOptimizer, is_elementwise, state_dtypes
from slidedp_jax.update.state_meaning import digest
from slidedp_jax.update.whole_parameter import WholeParameterOptimizer


class Treatments:
    """An optax transformation sorted into kinds of update.

    Args:
      transformation: sees the trained parameters as a flat dict from full name to array.
      shapes: full name -> shape of all trained parameters.
      ema_decay: keep a moving average of the weights with this decay; None for none.

    Attributes:
      optimizers: the update of each kind.
      kinds: parameter name -> kind, `FROZEN` where the transformation changes nothing.
      groups: parameter name -> group within its kind.
      state: what the state arrays of each parameter are.

    Raises:
      UserError: the update of a parameter depends on other parameters.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        ema_decay: float | None = None,
    ):
        taken_apart = DecomposedOptimizer(transformation, shapes)
        idle = {name for name, group in taken_apart.groups.items() if taken_apart.idle[group]}
        # An average is made of whatever the weights have become, by any program.
        programs = taken_apart.meaning.programs
        if ema_decay is not None:
            taken_apart = DecomposedOptimizer(with_average(transformation, ema_decay), shapes)
        self.state = replace(taken_apart.meaning, programs=programs)
        self._taken_apart = taken_apart
        self.initial_shared = taken_apart.initial_shared
        self.advance_shared = taken_apart.advance_shared
        members: dict[object, list[int]] = {}
        for group, name in enumerate(taken_apart.representatives):
            if name not in idle:
                blocks = is_elementwise(taken_apart, group)
                key = state_dtypes(taken_apart, group) if blocks else "whole"
                members.setdefault(key, []).append(group)
        self.optimizers: tuple[ElementwiseOptimizer | WholeParameterOptimizer, ...] = tuple(
            WholeParameterOptimizer(taken_apart, groups)
            if key == "whole"
            else ElementwiseOptimizer(taken_apart, groups)
            for key, groups in members.items()
        )
        place = {
            group: (kind, number)
            for kind, groups in enumerate(members.values())
            for number, group in enumerate(groups)
        }
        self.kinds: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        for name, group in taken_apart.groups.items():
            self.kinds[name], self.groups[name] = place.get(group, (FROZEN, 0))

    @property
    def whole_parameters(self) -> list[str]:
        """Names of the parameters that are updated as a whole."""
        return [
            name
            for name, kind in self.kinds.items()
            if kind != FROZEN and isinstance(self.optimizers[kind], WholeParameterOptimizer)
        ]

    def text(self) -> str:
        """Digest of all programs with their constants, and of the shared state to begin with."""
        texts = [*self._taken_apart.texts, self._taken_apart.shared_text, str(self.groups)]
        return digest("\n".join([*texts, *map(repr, self.initial_shared())]))

    def no_blocks(self) -> ElementwiseOptimizer:
        """An update of no group, with the shared state alone."""
        return ElementwiseOptimizer(self._taken_apart, [])
