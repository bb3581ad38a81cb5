"""The training state at the start of a run: made, filled with weights, with room for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import StreamedModel
from slidedp_jax.planner.pinned_pool import pool_regions, resident_copy_bytes
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.host_share import WHOLE, HostShare
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.state.pinned_memory import check_pinned_limit, reserve_pinned
from slidedp_jax.state.weight_rounding import WeightRounding


class ToBeRestored:
    """Starting weights that a checkpoint will bring: until then the trainer refuses to work."""


TO_BE_RESTORED = ToBeRestored()

Parameters = (
    Mapping[str, np.ndarray] | Callable[[Callable[[str, np.ndarray], None]], Any] | ToBeRestored
)
"""Starting weights: by full name, a function that is handed `write(name, array)`, or
`TO_BE_RESTORED`."""


def make_state(
    model: StreamedModel,
    layouts: Sequence[ChunkLayout],
    state_dtypes: Sequence[Sequence[Any]],
    strategy: Strategy,
    host_devices: Sequence[jax.Device],
    device_sharding: NamedSharding,
    *,
    parameters: Parameters | None,
    rounding: WeightRounding,
    seed: int,
    for_training: bool,
    share: HostShare = WHOLE,
) -> HostStore:
    """The state with its weights; optimizer state is there but not initialised.

    Args:
      model: initial values where `parameters` is None.
      layouts: chunks in forward order.
      state_dtypes: for each kind of update, dtypes of the optimizer's flat state arrays.
      strategy: dtype and gradient route.
      host_devices: CPU devices over which the state is sharded.
      device_sharding: over the compute devices of this host.
      parameters: starting weights; None for the model's initial values.
      rounding: how masters become the weights that compute.
      seed: of the model's initial values.
      for_training: make page-locked memory for gradients.
      share: what lies on this host.

    Raises:
      UserError: `parameters` are not those of the model, or the gradients exceed the limit of
        page-locked memory.
    """
    devices = list(device_sharding.mesh.devices.flat)
    regions = gradient_regions(layouts, strategy, len(devices)) if for_training else ()
    check_pinned_limit(regions, devices[0])
    store = HostStore(
        layouts,
        host_devices,
        state_dtypes,
        device_sharding=device_sharding,
        upload_low=strategy.compute_dtype == "float32",
        rounding=rounding,
        share=share,
    )
    try:
        with ThreadPoolExecutor(1) as pool:
            # Page-locking is the driver's work and goes on beside the reading of the weights.
            reserved = pool.submit(reserve_pinned, regions, devices[0])
            _write(store, model, parameters, seed)
            reserved.result()
    except BaseException:
        store.close()
        raise
    return store


def gradient_regions(
    layouts: Sequence[ChunkLayout], strategy: Strategy, num_devices: int
) -> tuple[int, ...]:
    """Page-locked regions that hold what leaves this host's devices, bytes each.

    Boundary activations, which have their places for good, what a save copies of the state that
    stays on the devices, then all gradients of a step.
    """
    by_host = strategy.gradient_route == "host_sum"
    copies, share = (num_devices, 1) if by_host else (1, num_devices)
    requests: list[float] = [strategy.host_boundary_bytes] * (
        strategy.host_boundaries * strategy.num_microbatches * num_devices
    )
    requests.append(resident_copy_bytes(resident_sizes(layouts, strategy.num_hosts)))
    for layout in reversed(layouts):
        if not layout.resident:
            for part in layout.trained_parts:
                slices = strategy.vocab_slices if part.by_rows else 1
                of_host = part.padded_size / strategy.num_hosts
                size = of_host * strategy.gradient_bytes / share / slices
                requests += [size] * (copies * share * slices)
    return pool_regions(requests)


def resident_sizes(layouts: Sequence[ChunkLayout], num_hosts: int) -> list[float]:
    """Padded parameters, on one host, of each part whose state stays on the devices."""
    own = [layout.parts for layout in layouts if layout.resident]
    return [part.padded_size / num_hosts for parts in own for part in parts]


def check_host_devices(strategy: Strategy, num_host_devices: int, num_devices: int) -> None:
    """Whether the process has the CPU devices that the strategy wants.

    Raises:
      UserError: too few, or no multiple of the compute devices.
    """
    count = strategy.num_host_devices
    if count > num_host_devices or count % num_devices:
        raise UserError(
            f"the strategy shards the host state over {count} host devices; this process has "
            f"{num_host_devices}, and the number must be a multiple of its {num_devices} compute "
            "devices. Plan again, or pass num_host_devices to slidedp_jax.configure()"
        )
    slices = strategy.vocab_slices
    if slices > 1 and count % (slices * num_devices):
        raise UserError(
            f"the strategy takes the head in {slices} slices of the vocabulary, each {count} / "
            f"{slices} pieces of the state; that must be a multiple of the {num_devices} compute "
            "devices. Plan again, with other vocab_slices"
        )


def _write(
    store: HostStore, model: StreamedModel, parameters: Parameters | None, seed: int
) -> None:
    if parameters is None:
        store.fill(lambda name, shape: model.initial_value(name, shape, seed))
    elif isinstance(parameters, Mapping):
        _check_names(store, parameters.keys())
        for name, values in parameters.items():
            store.write(name, np.asarray(values))
    elif not isinstance(parameters, ToBeRestored):
        written: set[str] = set()

        def write(name: str, values: np.ndarray) -> None:
            store.write(name, values)
            written.add(name)

        parameters(write)
        _check_names(store, written)


def check_parameters(parameters: object) -> None:
    """Whether starting weights are of a kind that can be read, before anything is made.

    Raises:
      UserError: they are not.
    """
    if not (callable(parameters) or isinstance(parameters, Mapping | ToBeRestored | None)):
        raise UserError(
            f"parameters={parameters!r}; pass a mapping from full name to array, a function that "
            "is handed write(name, array), or None for the model's own values"
        )


def _check_names(store: HostStore, names: Set[str]) -> None:
    missing, unknown = store.shapes.keys() - names, names - store.shapes.keys()
    if missing or unknown:
        raise UserError(
            f"the starting weights lack {len(missing)} parameters (such as "
            f"{min(missing, default='none')}) and have {len(unknown)} that the model does not "
            f"have (such as {min(unknown, default='none')})"
        )
