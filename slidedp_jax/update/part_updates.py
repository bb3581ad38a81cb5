"""The update of any part of a chunk, by the kernel or program of its kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.state.device_state import DevicePartState
from slidedp_jax.state.host_store import AnyPartState, HostStore, PartState
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.update.elementwise import ElementwiseOptimizer
from slidedp_jax.update.kernel_form import RESIDENT_FORM, KernelForm, kernel_form
from slidedp_jax.update.treatments import Treatments
from slidedp_jax.update.update_kernel import UpdateKernels
from slidedp_jax.update.whole_parameter import WholeParameterOptimizer, WholeParameterUpdates


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """Shared optimizer state before a step: values, on the host devices, on the compute devices."""

    values: Sequence[np.ndarray]
    placed: Sequence[jax.Array]
    resident: Sequence[jax.Array]


class PartUpdates:
    """Updates of all kinds.

    Args:
      treatments: how each parameter is updated.
      store: the training state.
      device_sharding: of the state that stays on the compute devices of this host.
      block_size: elements per block.
      form: form of the blocked kernel; None: what `kernel_form` names for this version of JAX.
    """

    def __init__(
        self,
        treatments: Treatments,
        store: HostStore,
        *,
        device_sharding: NamedSharding,
        block_size: int,
        form: KernelForm | None,
    ):
        self._treatments = treatments
        self._store = store
        self._device_sharding = device_sharding
        self._block_size = block_size
        self._whole = {
            kind: WholeParameterUpdates(optimizer, store)
            for kind, optimizer in enumerate(treatments.optimizers)
            if isinstance(optimizer, WholeParameterOptimizer)
        }
        self.form = form or kernel_form(jax.__version__)
        self._make_kernels()

    def use_form(self, form: KernelForm) -> None:
        """Update the host's parts with another form of the kernel from now on."""
        self.form = form
        self._make_kernels()

    def use_rounding(self, rounding: WeightRounding) -> None:
        """Round by another dither from now on; all weights have to be written anew."""
        self._store.rounding = rounding
        self._make_kernels()

    def _make_kernels(self) -> None:
        """Kernels of every kind; their programs are compiled when they are used."""
        make = functools.partial(
            UpdateKernels,
            block_size=self._block_size,
            rounding=self._store.rounding,
            share=self._store.share,
        )
        on_host = functools.partial(make, sharding=self._store.sharding, form=self.form)
        blocks = {
            kind: optimizer
            for kind, optimizer in enumerate(self._treatments.optimizers)
            if isinstance(optimizer, ElementwiseOptimizer)
        }
        self._kernels = {kind: on_host(optimizer) for kind, optimizer in blocks.items()}
        # For what concerns no kind.
        self._common = next(iter(self._kernels.values()), None) or on_host(
            self._treatments.no_blocks()
        )
        self._resident_kernels: dict[int, UpdateKernels] = {}
        if any(layout.resident for layout in self._store.layouts):
            self._resident_kernels = {
                kind: make(optimizer, sharding=self._device_sharding, form=RESIDENT_FORM)
                for kind, optimizer in blocks.items()
            }

    def _kernels_of(self, part: AnyPartState) -> UpdateKernels:
        resident = isinstance(part, DevicePartState)
        return (self._resident_kernels if resident else self._kernels)[part.layout.kind]

    def init(self, part: AnyPartState) -> None:
        """Make the starting optimizer state of a part whose master weights are set."""
        kind = part.layout.kind
        if kind in self._whole:
            assert isinstance(part, PartState)
            self._whole[kind].init(part)
        elif part.layout.trained:
            part.replace(self._kernels_of(part).init(part.layout, part.arrays))

    def start(
        self,
        part: AnyPartState,
        gradients: Sequence[jax.Array],
        scalars: StepScalars,
        norm: float,
        max_norm: float,
    ) -> Callable[[], None] | None:
        """Begin to update a part in place; the returned function must be called to end it.

        Whole parameters are updated by that function, which takes a while: nothing of them has
        begun before. None where nothing need be waited for: compute devices keep the order of what
        they are given, so what reads the part from now on reads the result.

        Args:
          part: a trained part.
          gradients: summands of its gradient, each [padded_size].
          scalars: of this step.
          norm: global norm of the gradients, 0 when there is no limit.
          max_norm: limit of the norm, infinity for none.
        """
        kind = part.layout.kind
        if kind in self._whole:
            assert isinstance(part, PartState)
            return functools.partial(
                self._whole[kind].update, part, gradients, scalars.values, norm, max_norm
            )
        resident = isinstance(part, DevicePartState)
        shared = scalars.resident if resident else scalars.placed
        arrays = self._kernels_of(part).start_update(
            part.layout, part.arrays, gradients, shared, norm, max_norm
        )
        if resident:
            part.replace(arrays)
            return None

        def finish() -> None:
            part.replace(jax.block_until_ready(arrays))

        return finish

    def scalars(self, shared: Sequence[Any]) -> StepScalars:
        """What the updates of a step need of the shared state before it."""
        resident = next(iter(self._resident_kernels.values()), None)
        return StepScalars(
            values=[np.asarray(leaf) for leaf in shared],
            placed=self._common.place_shared(shared),
            resident=resident.place_shared(shared) if resident is not None else [],
        )

    def advance(self, shared: Sequence[Any]) -> list[np.ndarray]:
        """Shared optimizer state after one step."""
        return self._common.advance(shared)

    def sum_of_squares(self, parts: Sequence[Sequence[jax.Array]]) -> np.ndarray:
        """Sums of squares of a chunk's summed gradient, given its parts' summands, float32 [K]."""
        first, *others = [self._common.sum_of_squares(summands) for summands in parts]
        return sum(others, start=first)
