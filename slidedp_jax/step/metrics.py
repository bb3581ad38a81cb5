"""What a step reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import jax
import numpy as np

from slidedp_jax.update.update_thread import StepUpdate


class StepMetrics:
    """Figures of one step, fetched from the devices when they are read.

    A step returns before its loss and norm are known, so that the next one can begin; reading a
    figure waits for it.

    Attributes:
      step: number of the step, from 1.
      num_tokens: tokens of the step, without padding where the batch has `segment_ids` to tell it.
      num_supervised_tokens: tokens that count in the loss.
    """

    def __init__(
        self,
        *,
        step: int,
        losses: Sequence[jax.Array],
        aux: Sequence[jax.Array] = (),
        figures: Mapping[str, jax.Array] | None = None,
        num_supervised: int,
        num_tokens: int,
        update: Callable[[], StepUpdate],
        flags: jax.Array | None = None,
    ):
        self.step = step
        self.num_tokens = num_tokens
        self.num_supervised_tokens = num_supervised
        self._losses = losses
        self._aux = aux
        self._figures = figures or {}
        self._update = update
        self._flags = flags

    def __repr__(self) -> str:
        """One line, also within lists and on a prompt; waits for the figures."""
        skipped = ", skipped" if self.skipped else ""
        return f"step {self.step}: loss {self.loss:.4f}, grad norm {self.grad_norm:.4f}{skipped}"

    @cached_property
    def loss(self) -> float:
        """What the step minimises, before its update, per supervised token.

        That is the mean loss of the supervised tokens and, where layers have losses of their own,
        `aux_loss`.
        """
        return mean_loss(self._losses, self.num_supervised_tokens)

    @cached_property
    def aux_loss(self) -> float:
        """The layers' own losses within `loss`, coefficients included; 0 if there are none.

        A mixture's router losses are among them.
        """
        return mean_loss(self._aux, self.num_supervised_tokens)

    @cached_property
    def figures(self) -> dict[str, float]:
        """What the model reports beside its losses, by name (`models.router_losses`)."""
        return {name: float(value) for name, value in sorted(self._figures.items())}

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradients before clipping."""
        return self._update().grad_norm

    @cached_property
    def stop(self) -> bool:
        """Whether any of several hosts asked to stop after this step (`Trainer.step`)."""
        return self._flags is not None and bool(np.asarray(self._flags)[:, 0].any())

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped for a non-finite norm or a loss above the limit."""
        return self._update().skipped


def hosts_differ(flags: jax.Array) -> str:
    """Whether hosts were given different rows, in words; empty: all the same."""
    rows = np.asarray(flags)[:, 1]
    odd = np.flatnonzero(rows != rows[0])
    if not len(odd):
        return ""
    return (
        f"hosts were given different rows (the devices from {odd[0]} on others than device 0), so "
        "they would not train as one. Give every host the same batches, in the same order"
    )


def mean_loss(losses: Sequence[jax.Array], num_supervised: int) -> float:
    """`loss_sum` per supervised token."""
    return loss_sum(losses) / num_supervised


def loss_sum(losses: Sequence[jax.Array]) -> float:
    """Sum of the devices' and microbatches' losses, in float64 and their order."""
    return sum((float(np.sum(np.asarray(part, np.float64))) for part in losses), start=0.0)
