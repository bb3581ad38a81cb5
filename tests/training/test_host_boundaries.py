"""Boundary activations that wait in host memory: the same training, bit for bit.

The programs of a step are the same wherever the inputs of chunks wait, and copies change no bit.
"""

import functools
import random

import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import (
    assert_bitwise_equal,
    assert_close_to_plain_adam,
    small_config,
    strategy,
    train,
    trainer,
)

from slidedp_jax import UserError
from slidedp_jax.planner.hardware import MIB
from slidedp_jax.planner.pinned_pool import pool_regions
from slidedp_jax.planner.strategy import BOUNDARIES_IN_FLIGHT
from slidedp_jax.state.starting_state import gradient_regions
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer import boundary_store

RATE, ROWS, TOKENS, STEPS, LAYERS = 1e-3, 8, 12, 3, 4
OPTIMIZER = optax.adamw(RATE, eps=1e-5, weight_decay=0.1)
CLIP = 0.7


def boundary_bytes(*, rows, tokens=TOKENS, config=None):
    """float32 compute."""
    return rows * tokens * (config or small_config()).hidden_size * 4


def on_host(count, *, rows=4, tokens=TOKENS):
    return {
        "host_boundaries": count,
        "host_boundary_bytes": boundary_bytes(rows=rows, tokens=tokens) if count else 0,
    }


def batches(config, *, packed=True, tokens=TOKENS):
    return [random_batch(config, ROWS, tokens, packed=packed, seed=i) for i in range(STEPS)]


@functools.cache
def run(*, count, tied=False, devices=1, frozen=(), clip=CLIP, packed=True, **changes):
    config = small_config(tied=tied, layers=LAYERS)
    rows = changes.get("rows_per_microbatch", 4)
    return train(
        config,
        OPTIMIZER,
        strategy(
            rows_per_step=ROWS,
            num_devices=devices,
            update_policy="eager" if clip is None else "deferred",
            **on_host(count, rows=rows),
            **changes,
        ),
        batches(config, packed=packed),
        parameters=initial_parameters(config),
        num_devices=devices,
        max_grad_norm=clip,
        frozen=frozen,
    )


# Two microbatches on one device unless said otherwise.
@pytest.mark.parametrize(
    ("count", "case"),
    [
        (LAYERS, {"tied": True, "vocab_slices": 4, "slice_head_weights": True}),
        (2, {"devices": 2, "kept_chunks": 3, "prefetch_depth": 2}),
        (2, {"frozen": ("model.embed_tokens.*", "model.layers.[01].*"), "clip": None}),
        pytest.param(1, {"resident_chunks": 2, "layers_per_chunk": 2}, marks=pytest.mark.thorough),
        pytest.param(
            LAYERS,
            {"devices": 4, "rows_per_microbatch": 1, "vocab_slices": 2, "kept_chunks": LAYERS},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_where_boundaries_wait_changes_no_bit(count, case):
    assert_bitwise_equal(run(count=count, **case), run(count=0, **case))


def test_it_is_the_step_of_plain_optax():
    config = small_config(layers=LAYERS)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZER)
    plain = train_plainly(config, initial_parameters(config), optimizer, batches(config))
    assert_close_to_plain_adam(run(count=LAYERS), plain, learning_rate=RATE)


@pytest.mark.parametrize(
    "case",
    [
        {"vocab_slices": 4, "attention_chunks": 2, "layers_per_chunk": 2},
        pytest.param(
            {"tied": True, "devices": 2, "attention_chunks": LAYERS, "vocab_slices": 2},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_all_that_long_rows_need_at_once_equals_plain_optax(case):
    """Blocks of tokens, attention that stays, boundaries on the host, a head in slices."""
    tied = case.get("tied", False)
    config = small_config(tied=tied, layers=LAYERS)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZER)
    plain = train_plainly(config, initial_parameters(config), optimizer, batches(config))
    long = run(count=2, layer_block_tokens=5, **case)
    assert_close_to_plain_adam(long, plain, learning_rate=RATE)


class Watch(Tracer):
    """Names of what is issued."""

    def __init__(self):
        self.names = []

    def span(self, lane, name):
        self.names.append(name)
        return super().span(lane, name)


def test_copies_back_are_issued_before_the_backward_program_that_hides_them():
    watch = Watch()
    config = small_config(layers=LAYERS)
    plan = strategy(rows_per_step=ROWS, **on_host(LAYERS))
    with trainer(config, OPTIMIZER, plan, num_devices=1, tracer=watch) as it:
        it.step(batches(config)[0])
    names = [n for n in watch.names if "input of" in n or n.startswith(("forward", "backward"))]
    forward = [n for layer in range(LAYERS) for n in (layer + 1, f"forward layers.{layer}-{layer}")]
    expected = [f"download input of chunk {n}" if isinstance(n, int) else n for n in forward]
    expected.append(f"upload input of chunk {LAYERS}")  # beside the head
    for layer in reversed(range(LAYERS)):
        expected += [f"upload input of chunk {layer}"] * (layer > 0)
        expected.append(f"backward layers.{layer}-{layer}")
    assert names == [*expected, "backward embed"]


def test_no_more_leave_at_a_time_than_are_counted(monkeypatch):
    """On a link on which nothing arrives by itself."""
    waited, most = [], 0
    store_type = boundary_store.BoundaryStore
    monkeypatch.setattr(boundary_store, "is_ready", lambda array: False)
    put = store_type.put

    def watched(self, chunk, xs):
        nonlocal most
        put(self, chunk, xs)
        most = max(most, len(self._leaving))
        waited.append(chunk)

    monkeypatch.setattr(store_type, "put", watched)
    config = small_config(layers=LAYERS)
    plan = strategy(rows_per_step=ROWS, **on_host(LAYERS))
    with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
        it.step(batches(config)[0])
    assert waited == [*range(1, LAYERS + 2)]
    assert most == BOUNDARIES_IN_FLIGHT


def test_shorter_rows_use_the_same_places_and_longer_ones_are_refused():
    config = small_config(layers=2)
    plans = [strategy(rows_per_step=ROWS, **on_host(count, tokens=16)) for count in (2, 0)]
    runs = []
    for plan in plans:
        with trainer(
            config, OPTIMIZER, plan, num_devices=2, parameters=initial_parameters(config)
        ) as it:
            losses = [it.step(batches(config, tokens=tokens)[0]).loss for tokens in (16, 9, 16)]
            runs.append((losses, it.parameters()))
            if plan.host_boundaries:
                sizes = {array.shape for array in it._pipeline._boundaries._places.values()}
                assert sizes == {(8, 16, config.hidden_size)}
                with pytest.raises(UserError, match="rows of 17 tokens make boundary"):
                    it.step(batches(config, tokens=17)[0])
                it.step(batches(config, tokens=16)[0])  # nothing has failed
    assert runs[0][0] == runs[1][0]
    for name, values in runs[1][1].items():
        np.testing.assert_array_equal(runs[0][1][name], values, err_msg=name)


def test_places_stay_the_same_over_steps_evaluations_saves_and_failures(tmp_path):
    config = small_config(layers=2)
    plan = strategy(rows_per_step=ROWS, **on_host(2))
    with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
        batch = batches(config)[0]
        for step in range(3):
            it.step(batch)
            it.evaluate(batch)
            it.save(tmp_path)
            run_layer = it._programs.backward
            it._programs.backward = lambda *_, **__: 1 / 0
            with pytest.raises(ZeroDivisionError):
                it.gradients(batch)
            it._programs.backward = run_layer
            gradients = it.gradients(batch)
            assert all(np.isfinite(values).all() for values in gradients.values())
            places = it._pipeline._boundaries._places
            assert sorted(places) == [(1, 0), (1, 1), (2, 0), (2, 1)]
            held = sum(array.nbytes for array in places.values())
            assert held == 4 * boundary_bytes(rows=4)
            assert step + 1 == it.step_count


class Pool:
    """XLA's best-fit allocator, as `planner.pinned_pool` describes it; regions of a list of
    [size, whether it is free, name]."""

    def __init__(self, regions):
        self.regions = [[[region, True, None]] for region in regions]

    def take(self, name, size):
        free = [(c[0], i, j) for i, r in enumerate(self.regions) for j, c in enumerate(r) if c[1]]
        fitting = [place for place in free if place[0] >= size]
        assert fitting, f"the pool would grow: {name} of {size} in {sorted(free)}"
        room, i, j = min(fitting)
        left = room - size
        if left >= min(size, 128 * MIB):
            self.regions[i][j : j + 1] = [[size, False, name], [left, True, None]]
        else:
            self.regions[i][j] = [room, False, name]

    def free(self, name):
        for region in self.regions:
            for place, chunk in enumerate(region):
                if chunk[2] == name:
                    region[place] = [chunk[0], True, None]
                    self._join(region)
                    return

    def _join(self, region):
        at = 0
        while at + 1 < len(region):
            if region[at][1] and region[at + 1][1]:
                region[at : at + 2] = [[region[at][0] + region[at + 1][0], True, None]]
            else:
                at += 1


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_never_grows_over_a_hundred_steps_with_saves(seed):
    """Boundaries are copied, gradients arrive and are used up, and saves pass, in any order that
    steps allow."""
    rng = random.Random(seed)
    layers, boundary = rng.randint(4, 30), rng.randint(1, 600) * MIB
    gradients = [rng.randint(100, 900) * MIB] + [rng.randint(20, 300) * MIB] * layers
    gradients += [rng.randint(1, 900) * MIB]
    count = rng.randint(1, layers)
    slots = [(chunk, mb) for chunk in range(1, count + 1) for mb in range(rng.randint(1, 2))]
    pool = Pool(pool_regions([*[boundary] * len(slots), *reversed(gradients)]))
    waiting = []
    for _ in range(100):
        for slot in slots:  # forward; updates use gradients up meanwhile, the lowest first
            pool.free(slot)
            pool.take(slot, boundary)
            for _ in range(rng.randint(0, 4)):
                if waiting:
                    pool.free(waiting.pop(0))
        if rng.random() < 0.3:  # a save reads what stays on devices, in pieces
            pool.take("save", 64 * MIB)
            pool.free("save")
        while waiting:
            pool.free(waiting.pop(0))
        for number, size in reversed([*enumerate(gradients)]):
            pool.take(f"gradient {number}", size)
            waiting.insert(0, f"gradient {number}")


def test_room_is_made_for_boundaries_first():
    config = small_config(layers=2)
    plan = strategy(rows_per_step=ROWS, **on_host(2))
    with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
        layouts = it.store.layouts
        gradients = [4.0 * layout.padded_size for layout in reversed(layouts)]
        expected = pool_regions([boundary_bytes(rows=4)] * 2 * 2 + gradients)
        assert gradient_regions(layouts, plan, 1) == expected


def test_a_number_without_a_size_is_refused():
    with pytest.raises(ValueError, match="state both, or neither"):
        strategy(host_boundaries=2)
