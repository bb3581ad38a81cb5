"""A chunk whose intermediate results stay on the device between forward and backward.

What stays are the outputs of matrix products and of fused attention, so backward recomputes nothing
but element-wise programs (and attention where it is not one fused program). Weights, inputs and the
batch are not kept twice: backward is given them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from slidedp_jax.jax_internals import is_fused_attention, pullback_parts
from slidedp_jax.state.layout import Trained
from slidedp_jax.step.layer_functions import LayerFns, accumulate, apply_layers, choose, merge
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a backward program does on one device.

    Attributes:
      function: (...) -> (dx, sums of gradients), both with rows split over the devices.
      inputs: how each argument is split.
      donate: arguments that are used up.
    """

    function: Callable[..., Any]
    inputs: tuple[PartitionSpec, ...]
    donate: tuple[int, ...]


_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class KeptPrograms:
    """Forward and backward of one structure of chunk; forward runs first.

    Args:
      on_devices: compiles for the compute devices.
      layer_fns: the chunk's layers.
      widen: sum gradients in fp32 (several microbatches).
      trained: which leaves are trained; None: all.
      needs_dx: whether a chunk below needs the gradient of x.

    Attributes:
      forward: (trees per layer, x, batch) -> (x after the chunk, what is kept: arrays [G, ...]).
      backward: (trees, x before the chunk, kept, dy, batch, sums or None) -> (dx, sums), as
        `ComputePrograms.backward` without its recomputation; to be compiled.
    """

    def __init__(
        self,
        on_devices: DeviceMap,
        layer_fns: LayerFns,
        widen: bool,
        trained: Trained | None,
        needs_dx: bool,
    ):
        self._layer_fns = layer_fns
        self._widen = widen
        self._trained = trained
        self._needs_dx = needs_dx
        self._pullbacks: dict[Any, tuple[Any, list[int | None]]] = {}
        self.forward = on_devices(self._forward, (SAME, ROWS, ROWS), (ROWS, ROWS))
        self.backward = Body(
            function=self._backward,
            inputs=(SAME, ROWS, ROWS, ROWS, ROWS, ROWS),
            donate=(3, 5) if needs_dx else (5,),
        )

    def _forward(self, trees: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, list[jax.Array]]:
        chosen, frozen = choose(trees, self._trained)

        def run(chosen: Any, x: jax.Array) -> jax.Array:
            return apply_layers(self._layer_fns, merge(chosen, frozen), x, batch)

        saving = jax.checkpoint(run, policy=_is_kept)
        if self._needs_dx:
            y, pullback = jax.vjp(saving, chosen, x)
        else:
            y, pullback = jax.vjp(lambda chosen: saving(chosen, x), chosen)
        structure, leaves, places = pullback_parts(pullback, jax.tree.leaves((trees, x, batch)))
        self._pullbacks[_signature(trees, x, batch)] = structure, places
        return y, [leaf[None] for leaf, place in zip(leaves, places, strict=True) if place is None]

    def _backward(
        self, trees: Any, x: jax.Array, kept: Any, dy: jax.Array, batch: Any, sums: Any
    ) -> Any:
        structure, places = self._pullbacks[_signature(trees, x, batch)]
        given, own = jax.tree.leaves((trees, x, batch)), iter(kept)
        leaves = [next(own)[0] if place is None else given[place] for place in places]
        gradients, *dx = jax.tree.unflatten(structure, leaves)(dy)
        return dx[0] if self._needs_dx else None, accumulate(sums, gradients, self._widen)


def _is_kept(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """Whether a result is kept: of products with weights, and of a fused attention program."""
    if is_fused_attention(primitive):
        return True
    return bool(_products(primitive, *arguments, **parameters))


def _signature(*arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
