"""One form of the update kernel on a state made for it, as `bench_host_update` times it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from running_copies import Exchange, timed

from slidedp_jax import jax_internals
from slidedp_jax.state.weight_rounding import Rounding, WeightRounding
from slidedp_jax.update.kernel_form import KernelForm

UPDATE_BYTES = 2 * (2 + 2 + 4 + 4) + 2
PROBE_ELEMENTS = 1 << 19
"""Elements per device of the first, short run; a form slow on it is not run on the full size."""
SLOWEST_GPARAMS_PER_S = 0.02
"""Per host device. A loop that XLA does not update in place falls far below it."""
VECTOR = 2560
"""Elements of each of the parameters that are not decayed; blocks hold parts of several."""


class UpdateVariant:
    """One form and block size of the update, on a state made for it."""

    def __init__(
        self, form: KernelForm, block_size: int, sharding: Any, rounding: Rounding = "dither"
    ):
        import optax

        from slidedp_jax.update.elementwise import ElementwiseOptimizer
        from slidedp_jax.update.treatments import Treatments
        from slidedp_jax.update.update_kernel import UpdateKernels

        transformation = optax.adamw(
            1e-5,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mask=lambda params: {name: leaf.ndim > 1 for name, leaf in params.items()},
        )
        shapes = {"matrix": (1024, 1024), "vector": (1024,)}
        (optimizer,) = Treatments(transformation, shapes).optimizers
        assert isinstance(optimizer, ElementwiseOptimizer)
        self.optimizer = optimizer
        self.sharding = sharding
        self.block_size = block_size
        self.kernels = UpdateKernels(
            self.optimizer,
            sharding,
            block_size=block_size,
            form=form,
            rounding=WeightRounding.of(rounding, seed=0),
        )

    def measure(self, args: argparse.Namespace, exchange: Exchange) -> dict[str, Any]:
        """Times on the full size, or on a short one for a form that is not worth more."""
        step, size, _ = self.prepare(min(PROBE_ELEMENTS, args.elements_per_device))
        probe = size / statistics.median(timed(step, 3)) / 1e9
        if probe < SLOWEST_GPARAMS_PER_S * self.sharding.mesh.size:
            return {
                "elements": size,
                "bytes_per_element": UPDATE_BYTES,
                "seconds": timed(step, 3),
                "note": "too slow for the full size",
            }
        step, size, in_place = self.prepare(args.elements_per_device)
        rates = exchange.rates(step, size, UPDATE_BYTES, args.repeats)
        return {**rates, "in_place": in_place()}

    def prepare(self, per_device: int) -> tuple[Callable[[], None], int, Callable[[], bool]]:
        """(one update, elements, whether the state still lies where it lay)."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from slidedp_jax.state.layout import FlatLayout, Slot

        num_devices = self.sharding.mesh.size
        blocks = max(1, per_device // self.block_size) * num_devices
        vectors = max(1, blocks // 64)
        first, end = (blocks - vectors) * self.block_size, blocks * self.block_size
        slots = (
            Slot(name="matrix", shape=(first,), group=0, offset=0),
            *(
                Slot(name=f"{at}", shape=(min(VECTOR, end - at),), group=1, offset=at)
                for at in range(first, end, VECTOR)
            ),
        )
        layout = FlatLayout(
            name=f"chunk of {blocks} blocks",
            slots=slots,
            block_size=self.block_size,
            num_pieces=num_devices,
            block_groups=(0,) * (blocks - vectors) + (1,) * vectors,
        )
        size = layout.padded_size

        def full(value: float, dtype: Any) -> jax.Array:
            make = jax.jit(lambda: jnp.full(size, value, dtype), out_shardings=self.sharding)
            array: jax.Array = jax.block_until_ready(make())
            return array

        values = (0.02, 77, *(1e-4 for _ in self.optimizer.state_dtypes))
        dtypes = (jnp.bfloat16, jnp.int16, *self.optimizer.state_dtypes)
        state = {"arrays": tuple(map(full, values, dtypes))}
        gradient = full(1e-3, jnp.bfloat16)
        shared = self.kernels.place_shared(
            [np.asarray(leaf + 7, leaf.dtype) for leaf in self.optimizer.initial_shared()]
        )
        start = pointers(state["arrays"])

        def step() -> None:
            state["arrays"] = jax.block_until_ready(
                self.kernels.start_update(layout, state["arrays"], [gradient], shared, 2.0, 1.0)
            )

        step()
        return step, size, lambda: pointers(state["arrays"]) == start


def pointers(arrays: Any) -> list[int]:
    """Addresses of all pieces of some arrays."""
    return [address for array in arrays for address in jax_internals.addresses(array)]
