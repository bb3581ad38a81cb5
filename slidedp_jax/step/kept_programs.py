"""A chunk of which some results stay on the device between forward and backward.

Which ones is a choice of names (`models.named_results`). With `EVERYTHING` they are the outputs of
matrix products and of fused attention, so backward recomputes nothing but element-wise programs
(and attention where it is not one fused program). With `DECISIONS` they are what it must not
compute again. Weights, inputs and the batch are not kept twice: backward is given them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from slidedp_jax.jax_internals import is_fused_attention, pullback_parts
from slidedp_jax.models.named_results import ATTENTION, DECIDED, PRODUCTS
from slidedp_jax.models.streamed import LayerOutput
from slidedp_jax.step.layer_functions import (
    ChunkKind,
    accumulate,
    apply_layers,
    choose,
    cotangent,
    merge,
    per_device,
)
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a backward program does on one device.

    Attributes:
      function: (..., scale if the chunk has an auxiliary loss, derivatives by its sums if it gives
        some) -> (dx, sums of gradients), both with rows split over the devices.
      inputs: how each argument is split.
      donate: arguments that are used up.
    """

    function: Callable[..., Any]
    inputs: tuple[PartitionSpec, ...]
    donate: tuple[int, ...]


DECISIONS = frozenset({DECIDED})
EVERYTHING = frozenset({DECIDED, PRODUCTS, ATTENTION})
"""What a kept chunk keeps."""

ONLY_ATTENTION = frozenset({DECIDED, ATTENTION})
"""What a chunk keeps that is recomputed but for attention."""

_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class KeptPrograms:
    """Forward and backward of one structure of chunk; forward runs first.

    Args:
      on_devices: compiles for the compute devices.
      kind: the structure, and the names of what is kept.

    Attributes:
      forward: (trees per layer, x, batch) -> (what `ComputePrograms.forward` gives, what is kept:
        arrays [G, ...]).
      backward: (trees, x before the chunk, kept, dy, batch, sums or None) -> (dx, sums), as
        `ComputePrograms.backward` without its recomputation; to be compiled.
    """

    def __init__(self, on_devices: DeviceMap, kind: ChunkKind):
        self._kind = kind
        self._pullbacks: dict[Any, tuple[Any, list[int | None]]] = {}
        self.forward = on_devices(self._forward, (SAME, ROWS, ROWS), (ROWS, ROWS))
        self.backward = Body(
            function=self._backward,
            inputs=(SAME, ROWS, ROWS, ROWS, ROWS, ROWS, *kind_inputs(kind)),
            donate=(3, 5) if kind.needs_dx else (5,),
        )

    def _forward(
        self, trees: Any, x: jax.Array, batch: Any
    ) -> tuple[jax.Array | LayerOutput, list[jax.Array]]:
        chosen, frozen = choose(trees, self._kind.trained)

        def run(chosen: Any, x: jax.Array) -> jax.Array | LayerOutput:
            return apply_layers(self._kind.layer_fns, merge(chosen, frozen), x, batch)

        saving = jax.checkpoint(run, policy=_keeping(self._kind.keeps))
        if self._kind.needs_dx:
            y, pullback = jax.vjp(saving, chosen, x)
        else:
            y, pullback = jax.vjp(lambda chosen: saving(chosen, x), chosen)
        structure, leaves, places = pullback_parts(pullback, jax.tree.leaves((trees, x, batch)))
        self._pullbacks[_signature(trees, x, batch)] = structure, places
        kept = [leaf[None] for leaf, place in zip(leaves, places, strict=True) if place is None]
        return per_device(y), kept

    def _backward(
        self,
        trees: Any,
        x: jax.Array,
        kept: Any,
        dy: jax.Array,
        batch: Any,
        sums: Any,
        *more: Any,
    ) -> Any:
        structure, places = self._pullbacks[_signature(trees, x, batch)]
        given, own = jax.tree.leaves((trees, x, batch)), iter(kept)
        leaves = [next(own)[0] if place is None else given[place] for place in places]
        gradients, *dx = jax.tree.unflatten(structure, leaves)(cotangent(self._kind, dy, more))
        sums = accumulate(sums, gradients, self._kind.widen)
        return dx[0] if self._kind.needs_dx else None, sums


def kind_inputs(kind: ChunkKind) -> list[PartitionSpec]:
    """How the arguments are split that a chunk's backward has for what it gives beside x."""
    return [SAME] * (kind.gives_aux + kind.gives_sums)


def _keeping(names: frozenset[str]) -> Callable[..., bool]:
    """Whether a result is kept: by its name, or by a primitive that is recognised as one."""
    is_named = jax.checkpoint_policies.save_only_these_names(*names)

    def is_kept(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        if ATTENTION in names and is_fused_attention(primitive):
            return True
        if PRODUCTS in names and _products(primitive, *arguments, **parameters):
            return True
        return bool(is_named(primitive, *arguments, **parameters))

    return is_kept


def _signature(*arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
