"""Failures injected anywhere in a step: a clear error, no hang, and no half-updated chunk."""

import itertools

import numpy as np
import pytest
from streamed_training import differing
from test_fences import (
    BAD_WEIGHT,
    RUNS,
    batches,
    everything,
    good_and_bad,
    poisoned_model,
    start,
)

from slidedp_jax import TrainingStopped
from slidedp_jax.transfer import routes
from slidedp_jax.transfer.routes import ArrivingGradient
from slidedp_jax.update.update_kernel import UpdateKernels

pytestmark = pytest.mark.timeout(120)

NAMES = ["deferred", "deferred_host_sum", "eager", "eager_host_sum"]


class FailsAtCall:
    """A function that raises at its `number`-th call and at all later ones."""

    def __init__(self, function, number):
        self._function = function
        self._left = number

    def bind(self):
        """As a plain function, so that a class makes a method of it."""
        return lambda *arguments, **options: self(*arguments, **options)

    def __call__(self, *arguments, **options):
        self._left -= 1
        if self._left < 0:
            raise OSError("the cable is cut")
        return self._function(*arguments, **options)


PLACES = {
    "upload": (routes, "upload"),
    "download": (routes, "download"),
    "arrival": (ArrivingGradient, "wait"),
    "update": (UpdateKernels, "start_update"),
}


@pytest.fixture(scope="module")
def versions():
    """State after 0, 1, 2, ... undisturbed steps of a run."""
    states = {}

    def after_steps(name):
        if name not in states:
            with start(**RUNS[name]) as it:
                states[name] = [everything(it)]
                for batch in batches():
                    it.step(batch)
                    it.wait()
                    states[name].append(everything(it))
        return states[name]

    return after_steps


OFTEN = {
    ("upload", "deferred"),
    ("download", "deferred"),
    ("arrival", "deferred"),
    ("update", "eager"),
}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.thorough)
        for case in itertools.product(PLACES, NAMES)
    ],
)
def test_a_failure_stops_training_and_leaves_every_chunk_old_or_new(
    name, place, versions, monkeypatch
):
    """Calls are counted from the second step on, some way into it.

    Each chunk is then bit for bit what it was after some number of whole steps, and all parameters
    and moments of a chunk after the same one.
    """
    expected = versions(name)
    owner, attribute = PLACES[place]
    with start(**RUNS[name]) as it:
        it.step(batches()[0])
        it.wait()
        failing = FailsAtCall(getattr(owner, attribute), 9 if place == "upload" else 3)
        monkeypatch.setattr(owner, attribute, failing.bind())
        with pytest.raises((TrainingStopped, OSError), match="the cable is cut"):
            for batch in batches()[1:]:
                it.step(batch)
            it.wait()
        with pytest.raises(TrainingStopped, match="the cable is cut"):
            it.step(batches()[0])
        with pytest.raises(TrainingStopped, match="the cable is cut"):
            it.parameters()
        it._updates.close()  # whatever was under way has ended
        reached = everything(it)
        for layout in it.store.layouts:
            names = {slot.name for slot in layout.slots}
            matching = [
                number
                for number, version in enumerate(expected)
                if not names & set(differing(reached, version))
            ]
            assert matching and matching[0] >= 1, layout.name


@pytest.mark.parametrize(
    "row",
    [pytest.param(0, marks=pytest.mark.thorough), 3],
    ids=["first_device", "last_device"],
)
@pytest.mark.parametrize(
    "name", ["deferred", pytest.param("deferred_host_sum", marks=pytest.mark.thorough)]
)
def test_nan_in_one_microbatch_on_one_device_names_parameter_and_rows(name, row):
    model, poison = poisoned_model(False)
    good, _ = good_and_bad(poison)
    bad = good[1] | {"input_ids": good[1]["input_ids"].copy(), "row_ids": [70, 71, 82, 83]}
    bad["input_ids"][row, 0] = poison
    with start(model=model, **RUNS[name]) as it:
        before = everything(it)
        figures = it.step(bad)
        with pytest.raises(TrainingStopped, match="step 1: the gradient norm is nan") as caught:
            _ = figures.skipped
        assert BAD_WEIGHT in str(caught.value)
        assert "Its rows are 70, 71, 82, 83." in str(caught.value)
        assert differing(everything(it), before) == []


def test_steps_that_are_all_bad_stop_after_the_allowed_number_of_skips():
    model, poison = poisoned_model(False)
    good, bad = good_and_bad(poison)
    with start(model=model, on_nonfinite="skip", max_consecutive_skips=2) as it:
        rows = [bad, bad, good[0], bad, bad]
        assert [it.step(batch).skipped for batch in rows] == [True, True, False, True, True]
        before = everything(it)
        with pytest.raises(TrainingStopped, match="The 2 steps before were skipped as well"):
            _ = it.step(bad).skipped
        assert differing(everything(it), before) == []


@pytest.mark.parametrize(
    "name", ["deferred", pytest.param("deferred_host_sum", marks=pytest.mark.thorough)]
)
def test_a_loss_above_the_limit_is_skipped_like_a_nonfinite_norm(name):
    rows = batches(2)
    with start(**RUNS[name]) as it:
        losses = [it.evaluate(batch)[0] for batch in rows]
    low, high = (rows[number] for number in np.argsort(losses))
    with start(max_loss=float(np.mean(losses)), on_nonfinite="skip", **RUNS[name]) as it:
        before = everything(it)
        assert it.step(high).skipped
        it.wait()
        assert differing(everything(it), before) == []
        assert not it.step(low).skipped


@pytest.mark.parametrize(("name", "left"), [("deferred", "No parameter"), ("eager", "already")])
def test_a_loss_above_the_limit_stops(name, left):
    with start(max_loss=0.5, **RUNS[name]) as it:
        figures = it.step(batches()[0])
        with pytest.raises(TrainingStopped, match=r"above max_loss=0\.5\..*" + left):
            _ = figures.grad_norm
