"""What lies on the compute devices: a window of chunks, whatever the depth of the model."""

import contextlib
import functools
import gc
import threading
import weakref

import jax
import numpy as np
import optax
import psutil
import pytest
import shared_programs
from plain_training import random_batch
from streamed_training import small_config, strategy, trainer

from slidedp_jax import UserError
from slidedp_jax.process import current_setup
from slidedp_jax.state import starting_state
from slidedp_jax.state.starting_state import gradient_regions
from slidedp_jax.tracer import Tracer

NUM_DEVICES, NUM_ROWS, NUM_TOKENS = 2, 2, 4


def bytes_on_compute_devices():
    """Distinct buffers in the memory of the compute devices."""
    compute, _ = current_setup().devices()
    buffers = {}
    for array in jax.live_arrays():
        if array.sharding.memory_kind != "pinned_host" and not array.is_deleted():
            for shard in array.addressable_shards:
                if shard.device in compute:
                    # Programs write asynchronously; asking for the address waits for them.
                    buffers[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


class Weigher(Tracer):
    """Notes the bytes on the compute devices at every begin and end of a span of the schedule."""

    def __init__(self):
        self.samples = []

    def _sample(self):
        if threading.current_thread() is threading.main_thread():
            self.samples.append(bytes_on_compute_devices())

    @contextlib.contextmanager
    def span(self, lane, name):
        self._sample()
        yield
        self._sample()


@functools.cache
def peak_bytes(layers, *, tied, route, depth):
    """Most bytes on the devices in a second step, beyond what was there before the trainer."""
    gc.collect()
    config = small_config(tied=tied, layers=layers)
    batch = random_batch(config, NUM_ROWS, NUM_TOKENS, packed=False)
    before = bytes_on_compute_devices()
    weigher = Weigher()
    plan = strategy(
        rows_per_microbatch=1,
        weight_route=route,
        prefetch_depth=depth,
        num_host_devices=2,
    )
    with trainer(config, optax.sgd(1e-3), plan, num_devices=NUM_DEVICES, tracer=weigher) as it:
        it.step(batch)
        it.wait()
        weigher.samples.clear()
        it.step(batch)
        it.wait()
        sizes = [layout.padded_size for layout in it.store.layouts]
    return max(weigher.samples) - before, sizes


@pytest.mark.parametrize(
    ("tied", "route"),
    [
        (False, "replicate"),
        pytest.param(True, "replicate", marks=pytest.mark.thorough),
        pytest.param(True, "shard_all_gather", marks=pytest.mark.thorough),
        pytest.param(False, "shard_all_gather", marks=pytest.mark.thorough),
    ],
)
def test_the_peak_grows_with_depth_by_boundary_activations_alone(tied, route):
    """Per layer, a boundary float32 [rows, T, D], a sum of squares [G] and dithers' keys stay."""
    shallow, _ = peak_bytes(4, tied=tied, route=route, depth=1)
    deep, sizes = peak_bytes(12, tied=tied, route=route, depth=1)
    boundary = NUM_ROWS * NUM_TOKENS * small_config().hidden_size * 4
    squares = NUM_DEVICES * 4
    keys = NUM_DEVICES * 4 * len(small_config(layers=1).parameter_shapes())
    assert 8 * boundary < 0.2 * 4 * NUM_DEVICES * sizes[1]  # far below the weights of one layer
    assert deep - shallow <= 8 * (boundary + squares + keys)


@pytest.mark.parametrize(
    "depth", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))]
)
def test_the_peak_is_the_window_of_the_prefetch_depth(depth):
    """Prefetched uploads, weights in use, two chunks' gradients and a part of a chunk more.

    One gradient is computed while another is summed over the devices. In fp32 compute all take 4
    bytes per element. Here a layer is as large as the head.
    """
    peak, sizes = peak_bytes(12, tied=False, route="replicate", depth=depth)
    layer = 4 * NUM_DEVICES * sizes[1]
    assert layer == 4 * NUM_DEVICES * max(sizes)
    slots = strategy(prefetch_depth=depth).weight_slots
    assert (slots + 1) * layer < peak < (slots + 2) * layer


@pytest.mark.thorough
def test_each_further_prefetch_holds_one_more_upload():
    peaks, sizes = zip(
        *(peak_bytes(12, tied=False, route="replicate", depth=depth) for depth in (1, 2, 3)),
        strict=True,
    )
    layer = 4 * NUM_DEVICES * sizes[0][1]
    np.testing.assert_allclose(np.diff(peaks), layer, rtol=0.01)


@pytest.mark.thorough
def test_evaluating_more_rows_takes_no_more_of_a_device():
    """All that is there at once is what the strategy was planned for."""
    config = small_config(layers=2)
    peaks = []
    for rows in (4, 40):
        gc.collect()
        batch = random_batch(config, rows, 64, packed=False)
        before = bytes_on_compute_devices()
        weigher = Weigher()
        plan = strategy(rows_per_microbatch=1, num_microbatches=2, num_host_devices=2)
        with trainer(config, optax.sgd(1e-3), plan, num_devices=NUM_DEVICES, tracer=weigher) as it:
            it.evaluate(batch)
            weigher.samples.clear()
            it.evaluate(batch)
            peaks.append(max(weigher.samples) - before)
    boundary = 2 * 64 * config.hidden_size * 4  # of one row on each device
    assert peaks[1] - peaks[0] < boundary


@pytest.mark.thorough
def test_nothing_grows_over_a_hundred_steps():
    config = small_config(layers=2)
    batches = [random_batch(config, 4, 8, packed=True, seed=i) for i in range(4)]
    plan = strategy(rows_per_microbatch=1, num_microbatches=2, num_host_devices=2)
    with trainer(config, optax.adamw(1e-3), plan, num_devices=NUM_DEVICES) as it:

        def run(steps):
            for number in range(steps):
                figures = it.step(batches[number % 4])
            assert np.isfinite(figures.loss)
            del figures
            it.wait()
            gc.collect()
            return len(jax.live_arrays()), psutil.Process().memory_info().rss

        run(30)
        arrays, rss = run(20)
        later_arrays, later_rss = run(100)
    assert later_arrays <= arrays + 10  # the update thread may still hold the last gradient
    # A layer's gradient kept per step would be 4.5 MB, all gradients of a step 14 MB.
    assert later_rss - rss < 3e6


def test_a_trainer_leaves_nothing_behind():
    config = small_config(layers=2)
    batch = random_batch(config, 4, 8, packed=True)
    plan = strategy(rows_per_microbatch=1, num_microbatches=2, num_host_devices=2)
    with (
        shared_programs.unshared(),
        trainer(config, optax.adamw(1e-3), plan, num_devices=NUM_DEVICES) as it,
    ):
        assert np.isfinite(it.step(batch).grad_norm)
        left = [weakref.ref(part) for part in (it, it.store, it.model, it._programs, it._updates)]
    del it
    gc.collect()
    assert [part() for part in left] == [None] * len(left)


def test_a_trainer_for_inference_does_not_train(monkeypatch):
    reserved = []
    monkeypatch.setattr(starting_state, "reserve_pinned", lambda *of: reserved.append(of[0]))
    config = small_config(layers=1)
    batch = random_batch(config, NUM_ROWS, NUM_TOKENS, packed=False)
    with trainer(config, optax.sgd(1e-2), strategy(), num_devices=1, inference_only=True) as it:
        loss, _ = it.evaluate(batch)
        assert np.isfinite(loss)
        with pytest.raises(UserError, match="inference_only"):
            it.step(batch)
    with trainer(config, optax.sgd(1e-2), strategy(), num_devices=1) as it:
        assert reserved == [(), gradient_regions(it.store.layouts, strategy(), 1)]


@pytest.mark.parametrize("gradient_route", ["reduce_scatter", "host_sum"])
def test_page_locked_memory_is_made_for_gradients_that_travel(gradient_route, monkeypatch):
    """Last layers first; each device's share, or from each device all; float32 in fp32 compute."""
    config = small_config(layers=2)
    resident = 0 if gradient_route == "host_sum" else 2
    plan = strategy(gradient_route=gradient_route, resident_chunks=resident, rows_per_microbatch=1)
    with trainer(config, optax.sgd(1e-2), plan, num_devices=2) as it:
        sizes = [layout.padded_size for layout in it.store.layouts[resident:]]
        each = [4 * size if gradient_route == "host_sum" else 2 * size for size in sizes[::-1]]
        monkeypatch.setattr(starting_state, "pool_regions", list)
        asked = gradient_regions(it.store.layouts, plan, 2)
        copies = sum(4 * layout.padded_size for layout in it.store.layouts[:resident])
        assert asked == [copies, *(size for size in each for _ in range(2))]


def test_a_closed_trainer_says_so():
    config = small_config(layers=1)
    batch = random_batch(config, NUM_ROWS, NUM_TOKENS, packed=False)
    with trainer(config, optax.sgd(1e-2), strategy(), num_devices=1) as it:
        it.step(batch)
    for call in (lambda: it.step(batch), lambda: it.evaluate(batch), it.parameters):
        with pytest.raises(UserError, match="closed"):
            call()
