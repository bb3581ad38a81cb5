"""How gradients of several devices are added up before they are sent."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from plain_training import random_batch
from streamed_training import small_config, strategy, trainer

import slidedp_jax.assembly
from slidedp_jax.process import current_setup
from slidedp_jax.step.pipeline import Pipeline
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.device_groups import DATA_AXIS
from slidedp_jax.transfer.routes import GradientPath

SIZE = 8 * 3 * 16


def to_wire(num_devices, gradient_dtype, wire_dtype=jnp.bfloat16):
    """The mapped function and one random gradient per device, [G * SIZE]."""
    devices = current_setup().devices()[0][:num_devices]
    mesh = Mesh(np.array(devices), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    path = GradientPath("reduce_scatter", mesh, None, jnp.dtype(wire_dtype))
    rows = PartitionSpec(DATA_AXIS)
    mapped = jax.shard_map(
        path.to_wire, mesh=mesh, in_specs=rows, out_specs=(rows, rows), check_vma=False
    )
    # Of very different sizes, so that sums in bfloat16 would lose the small ones.
    rng = np.random.default_rng(num_devices)
    scale = 2.0 ** rng.integers(-8, 8, (num_devices, 1))
    values = rng.standard_normal((num_devices, SIZE)) * scale
    return mapped, jnp.asarray(values.reshape(-1), gradient_dtype)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_sums_are_in_float32_and_rounded_once(num_devices, dtype):
    mapped, gradients = to_wire(num_devices, dtype)
    wire, squares = jax.jit(mapped)(gradients)
    each = np.asarray(gradients.astype(jnp.float32)).reshape(num_devices, SIZE)
    total = each.astype(np.float64).sum(axis=0).astype(np.float32)
    expected = np.asarray(jnp.asarray(total).astype(jnp.bfloat16).astype(jnp.float32))
    got = np.asarray(wire.astype(jnp.float32))
    # The order of the sum may move a value across the middle between two bfloat16 numbers.
    assert (got != expected).mean() < 0.01
    np.testing.assert_allclose(got, expected, rtol=2.0**-7)
    np.testing.assert_allclose(np.asarray(squares).sum(), np.square(got).sum(), rtol=1e-5)
    assert squares.shape == (num_devices,)


def test_what_is_rounded_already_travels_in_half_the_bytes():
    """An all-to-all of bfloat16 gradients; sums over microbatches, in float32, travel so."""

    def collectives(dtype, wire_dtype=jnp.bfloat16):
        mapped, gradients = to_wire(2, dtype, wire_dtype)
        text = str(jax.make_jaxpr(mapped)(gradients))
        return "all_to_all" in text, "reduce_scatter" in text

    assert collectives(jnp.bfloat16) == (True, False)
    assert collectives(jnp.float32) == (False, True)
    assert collectives(jnp.float32, jnp.float32) == (False, True)


class Order(Tracer):
    """The order in which backward passes and copies of gradients are issued."""

    def __init__(self):
        self.names = []

    @contextlib.contextmanager
    def span(self, lane, name):
        if name.startswith(("backward", "download")):
            self.names.append(name)
        yield


@pytest.mark.parametrize("kept_chunks", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("num_devices", "gradient_route", "beside"),
    [
        (2, "reduce_scatter", True),
        (2, "host_sum", False),
        pytest.param(1, "reduce_scatter", False, marks=pytest.mark.thorough),
    ],
)
def test_devices_sum_a_gradient_in_the_program_of_the_chunk_below(
    num_devices, gradient_route, beside, kept_chunks
):
    order, config = Order(), small_config(layers=3)
    plan = strategy(
        rows_per_microbatch=1,
        num_microbatches=2,
        gradient_route=gradient_route,
        kept_chunks=kept_chunks,
    )
    options = {"num_devices": num_devices, "tracer": order}
    with trainer(config, optax.sgd(1e-2), plan, **options) as it:
        it.step(random_batch(config, 2 * num_devices, 8, packed=False))
        down = [f"download {layout.name}" for layout in reversed(it.store.layouts)]
        back = [f"backward {layout.name}" for layout in reversed(it.store.layouts[1:-1])]
    embed = ["backward embed", down[-1]]
    if beside:
        pairs = zip(back, down, strict=False)  # each download is of the chunk above
        assert order.names == [name for pair in pairs for name in pair] + [down[-2], *embed]
    else:
        pairs = zip(back, down[1:], strict=False)
        assert order.names == [down[0], *(name for pair in pairs for name in pair), *embed]


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_chunk_is_done_when_its_weights_are_let_go(num_microbatches, monkeypatch):
    """Or the schedule would run ahead of the devices, and more than a window would lie there."""
    gradients, done = {}, {}

    class Checked(Pipeline):
        def _chunk_backward(self, chunk, *arguments):
            results = super()._chunk_backward(chunk, *arguments)
            gradients[chunk] = jax.tree.leaves(results[1])
            return results

        def _release_after_backward(self, weights, chunk):
            if chunk in gradients:
                done[chunk] = all(leaf.is_ready() for leaf in gradients[chunk])
            super()._release_after_backward(weights, chunk)

    monkeypatch.setattr(slidedp_jax.assembly, "Pipeline", Checked)
    config = dataclasses.replace(small_config(layers=6), hidden_size=128, intermediate_size=512)
    plan = strategy(rows_per_microbatch=2, num_microbatches=num_microbatches)
    with trainer(config, optax.sgd(1e-2), plan, num_devices=2) as it:
        batch = random_batch(config, 4 * num_microbatches, 32, packed=False)
        for _ in range(3):  # the first one compiles, which gives the devices time
            it.step(batch)
            assert done == dict.fromkeys(range(1, 7), True)
            done.clear()
