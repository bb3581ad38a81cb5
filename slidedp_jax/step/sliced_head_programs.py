"""The head in slices of the vocabulary as programs of the compute devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.models.batch_arrays import IGNORED
from slidedp_jax.models.sliced_loss import (
    Statistics,
    add_to_statistics,
    log_sums,
    no_statistics,
    slice_gradients,
    token_losses,
)
from slidedp_jax.models.streamed import VocabularyForm
from slidedp_jax.step.layer_functions import accumulate, choose, merge
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap
from slidedp_jax.transfer.vocabulary_slices import SlicePrograms


class SlicedHeadPrograms:
    """Compiled programs of the two passes.

    Args:
      form: the model's functions.
      vocab_size: V.
      slices: packing and unpacking.
      on_devices: compiles for the compute devices.
      head_trained: per leaf of the head but the projection, whether it is trained.
      block_tokens: tokens whose logits exist at a time.
    """

    def __init__(
        self,
        form: VocabularyForm,
        vocab_size: int,
        slices: SlicePrograms,
        on_devices: DeviceMap,
        *,
        head_trained: tuple[tuple[bool, ...], ...],
        block_tokens: int,
    ):
        self._form, self._on_devices = form, on_devices
        self._head_trained = head_trained
        self._sizes = {"vocab_size": vocab_size, "block_tokens": block_tokens}
        self.slices = slices
        self.begin = on_devices(self._begin, (ROWS,), ROWS)
        self.add = on_devices(self._add, (ROWS, SAME, SAME, SAME, ROWS, ROWS), ROWS, donate=(0,))
        self.losses = on_devices(self._losses, (ROWS, ROWS), (ROWS, ROWS))
        self.no_hidden = on_devices(self._no_hidden, (ROWS,), ROWS)
        self.no_rows = on_devices(self._no_rows, (), ROWS)
        self.gradients = on_devices(
            self._gradients,
            (ROWS, ROWS, SAME, SAME, SAME, ROWS, ROWS, ROWS, SAME),
            (ROWS, ROWS),
            donate=(0, 1),
        )
        self.finish = functools.cache(self._make_finish)
        self.look_up = on_devices(
            self._look_up_backward, (ROWS, SAME, ROWS, ROWS), ROWS, donate=(0,)
        )

    def _begin(self, batch: Any) -> Statistics:
        return no_statistics(batch["targets"].size, self._form.token_loss)

    def _add(
        self, statistics: Statistics, rows: Any, first: Any, others: Any, x: Any, batch: Any
    ) -> Statistics:
        return add_to_statistics(
            statistics,
            rows,
            first,
            x.reshape(-1, x.shape[-1]),
            batch["targets"].reshape(-1),
            hidden_fn=functools.partial(self._form.hidden_fn, others),
            **self._sizes,
        )

    def _losses(self, statistics: Statistics, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Sum of the losses [1], and the logarithms of the sums of exponentials [N]."""
        own = token_losses(
            statistics,
            batch["targets"].reshape(-1),
            self._form.token_loss,
            vocab_size=self._sizes["vocab_size"],
        )
        return jnp.sum(own)[None], log_sums(statistics)

    def _gradients(
        self,
        d_hidden: jax.Array,
        d_rows: jax.Array | None,
        rows: jax.Array,
        first: jax.Array,
        others: Any,
        x: jax.Array,
        batch: Any,
        log_sum: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """One slice of pass 2; of frozen rows None."""
        x, targets = x.reshape(-1, x.shape[-1]), batch["targets"].reshape(-1)
        d_hidden, own = slice_gradients(
            d_hidden,
            None if d_rows is None else d_rows[0],
            rows,
            first,
            x,
            targets,
            log_sum,
            jnp.where(targets == IGNORED, 0.0, -scale),
            hidden_fn=functools.partial(self._form.hidden_fn, others),
            token_loss=self._form.token_loss,
            **self._sizes,
        )
        return d_hidden, None if own is None else own[None]

    def _no_hidden(self, x: jax.Array) -> jax.Array:
        return jnp.zeros((x.size // x.shape[-1], x.shape[-1]), jnp.float32)

    def _no_rows(self) -> jax.Array:
        slices = self.slices.slices
        return jnp.zeros((1, slices.rows, slices.slot.shape[1]), jnp.float32)

    def _make_finish(self, widen: bool, needs_dx: bool) -> Callable[..., Any]:
        """(others, x, d_hidden, sums or None) -> (dx or None, sums of the others' gradients, end).

        `end` [G] is there when all is, and nobody takes it away.
        """

        def body(others: Any, x: jax.Array, d_hidden: jax.Array, sums: Any) -> Any:
            chosen, frozen = choose((others,), self._head_trained)
            d_hidden = d_hidden.reshape(x.shape).astype(x.dtype)

            def hidden(chosen: Any, x: jax.Array) -> jax.Array:
                return self._form.hidden_fn(merge(chosen, frozen)[0], x)

            gradients, dx = jax.vjp(hidden, chosen, x)[1](d_hidden)
            end = d_hidden.reshape(-1)[:1]
            return dx if needs_dx else None, accumulate(sums, gradients, widen), end

        return self._on_devices(body, (SAME, ROWS, ROWS, ROWS), (ROWS, ROWS, ROWS), donate=(3,))

    def _look_up_backward(
        self, d_rows: jax.Array, first: jax.Array, dx: jax.Array, batch: Any
    ) -> jax.Array:
        """The lookup's part added to a slice's gradient, float32 [1, R, D]."""
        num_rows = d_rows.shape[1]
        place = batch["input_ids"].reshape(-1) - first
        place = jnp.where((place < 0) | (place >= num_rows), num_rows, place)
        wide = dx.reshape(-1, dx.shape[-1]).astype(jnp.float32)
        return d_rows[0].at[place].add(wide, mode="drop")[None]
