"""Stages are read ahead of their use, completely, and errors come through."""

import copy
import threading

import optax
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax.stage_arrays import MASTER, ahead, read_stages, state_key


def test_the_next_is_made_while_one_is_used():
    made, used = [], []
    second = threading.Event()

    def make(item):
        made.append(item)
        if item == 1:
            second.set()
        return item * 10

    for item, value in ahead(make, range(4)):
        if item == 0:
            assert second.wait(10)  # or the second is not made before the first is done with
        assert len(made) <= len(used) + 3
        used.append((item, value))
    assert used == [(0, 0), (1, 10), (2, 20), (3, 30)]


def test_nothing_ahead_of_nothing():
    assert list(ahead(str, [])) == []


def test_errors_of_either_side_come_through():
    def make(item):
        if item == 2:
            raise OSError("no more")
        return item

    seen = []
    with pytest.raises(OSError, match="no more"):
        seen.extend(item for item, _ in ahead(make, range(5)))
    with pytest.raises(KeyError):
        for _ in ahead(make, range(2)):
            raise KeyError("from the caller")


def test_stages_hold_all_parameters_and_their_state_uncopied():
    config = small_config(tied=True, layers=3)
    with trainer(config, optax.adamw(1e-3), strategy(), num_devices=1) as it:
        seen = {}
        stages = it.model.stages()
        for stage, arrays in read_stages(it.store, stages):
            assert list(arrays) == list(stage.parameter_names())
            seen |= arrays
        assert set(seen) == set(it.store.parameter_names)
        for name, arrays in seen.items():
            assert list(arrays) == [MASTER, state_key(0), state_key(1)]
            assert arrays[MASTER].tobytes() == it.store.read(name).tobytes()
            assert arrays[state_key(1)].shape == it.store.shapes[name]
            # What Orbax does before it writes: with arrays of this size, half the time of a save.
            assert copy.deepcopy(arrays[MASTER]) is arrays[MASTER]
