"""Order between uploads and updates under any timing, and failures that surface instead of hanging.

The delays are injected through the tracer, whose spans bracket every upload, update and commit.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import (
    Run,
    assert_bitwise_equal,
    differing,
    optimizer_state,
    small_config,
    strategy,
    trainer,
)

from slidedp_jax import Trainer, TrainingStopped
from slidedp_jax.models import decoder
from slidedp_jax.state.fences import Fences
from slidedp_jax.tracer import StepTracer, Tracer
from slidedp_jax.transfer.routes import ArrivingGradient
from slidedp_jax.update.update_kernel import UpdateKernels


class RandomDelays(Tracer):
    """Sleeps up to `longest_s` at the begin and end of spans, differently for every seed."""

    def __init__(self, seed: int, longest_s: float = 0.01):
        self._random = random.Random(seed)
        self._longest_s = longest_s

    def _sleep(self):
        if self._random.random() < 0.5:
            time.sleep(self._random.uniform(0, self._longest_s))

    @contextlib.contextmanager
    def span(self, lane, name):
        self._sleep()
        yield
        self._sleep()


class SlowUpdates(Tracer):
    """Every update and every commit begins late."""

    @contextlib.contextmanager
    def span(self, lane, name):
        if lane == "host_update":
            time.sleep(0.02)
        yield


OPTIMIZER = optax.adamw(1e-2)


def batches(number=4):
    return [random_batch(small_config(), 4, 12, packed=True, seed=i) for i in range(number)]


def start(tied=False, *, policy="deferred", model=None, **options):
    options = {
        "parameters": initial_parameters(small_config(tied=tied)),
        "num_devices": 2,
        "max_grad_norm": None if policy == "eager" else 0.7,
    } | options
    plan = strategy(
        rows_per_microbatch=1,
        num_microbatches=2,
        prefetch_depth=2,
        num_host_devices=2,
        update_policy=policy,
        gradient_route=options.pop("gradient_route", "reduce_scatter"),
    )
    if model is not None:
        return Trainer(model, OPTIMIZER, strategy=plan, kernel_form="whole", **options)
    return trainer(small_config(tied=tied), OPTIMIZER, plan, **options)


def run(tied=False, after_steps=lambda: None, **options) -> Run:
    """Four steps in flow: nothing is waited for between them."""
    with start(tied, **options) as it:
        metrics = [it.step(batch) for batch in batches()]
        after_steps()
        return Run(
            losses=[figures.loss for figures in metrics],
            norms=[figures.grad_norm for figures in metrics],
            parameters=it.parameters(),
            state=optimizer_state(it.store),
        )


RUNS = {
    "deferred": {},
    "deferred_host_sum": {"gradient_route": "host_sum"},
    "tied": {"tied": True},
    "eager": {"policy": "eager"},
    "eager_host_sum": {"policy": "eager", "gradient_route": "host_sum"},
}


@pytest.fixture(scope="module")
def undisturbed():
    return functools.cache(lambda name: run(**RUNS[name]))


OFTEN = [
    name
    if name in ("deferred", "eager_host_sum")
    else pytest.param(name, marks=pytest.mark.thorough)
    for name in RUNS
]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", OFTEN)
def test_random_delays_change_no_bit(undisturbed, name, seed):
    assert_bitwise_equal(run(tracer=RandomDelays(seed), **RUNS[name]), undisturbed(name))


@pytest.mark.parametrize("name", OFTEN)
def test_gradients_that_arrive_late_and_in_any_order_change_no_bit(undisturbed, name, monkeypatch):
    chance = random.Random(0)
    monkeypatch.setattr(ArrivingGradient, "has_arrived", lambda self: chance.random() < 0.3)
    assert_bitwise_equal(run(**RUNS[name]), undisturbed(name))


BROKEN = {"wait_committed": lambda *_: None, "is_committed": lambda *_: True}
WITHOUT_FENCE = """
import conftest, test_fences
test_fences.say_whether_it_differs({fence!r}, {name!r})
"""


def say_whether_it_differs(fence, name):
    expected = run(**RUNS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fences, fence, BROKEN[fence])
        late = run(tracer=SlowUpdates(), after_steps=patch.undo, **RUNS[name])
    print("other bits" if differing(late, expected) else "the same bits")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deferred", "eager", "tied"])
@pytest.mark.parametrize("fence", BROKEN)
def test_a_fence_that_does_not_wait_is_noticed(fence, name):
    """The check above can fail: without either fence, weights of an older version are read.

    In a process of its own, which may end for reading memory that an update is given.
    """
    here = pathlib.Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FENCE.format(fence=fence, name=name)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    moved = "something still holds a view" in done.stderr
    assert done.returncode < 0 or moved or done.stdout == "other bits\n", done


def test_deferred_updates_run_in_the_order_of_the_next_forward(monkeypatch):
    monkeypatch.setattr(ArrivingGradient, "has_arrived", lambda self: True)
    tracer = StepTracer(keep=True)
    with start(tracer=tracer) as it:
        it.step(batches()[0])
        it.wait()
        names = [layout.name for layout in it.store.layouts]
    updates = [span.name for span in tracer.spans if span.name.startswith("update")]
    assert updates == [f"update {name}" for name in names]


def start_thread(target, *arguments) -> threading.Thread:
    """One that does not keep a failed test's process alive."""
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def test_an_update_waits_for_copies_and_a_fetch_for_commits():
    fences = Fences(2)
    log = []

    def wait(name, waiting):
        waiting()
        log.append(name)

    fences.begin_copy(0)
    fences.begin_copy(0)
    threads = [
        start_thread(wait, "update", lambda: fences.wait_readers(0, 1)),
        start_thread(wait, "fetch", lambda: fences.wait_committed(1, 1)),
    ]
    fences.wait_readers(1, 1)
    fences.wait_committed(1, 0)
    fences.end_copy(0)
    time.sleep(0.05)
    assert log == []
    assert not fences.is_committed(1, 1)
    fences.end_copy(0)
    threads[0].join(5)
    assert log == ["update"]
    fences.commit(0, 1)
    time.sleep(0.05)
    assert log == ["update"]
    fences.commit(1, 1)
    threads[1].join(5)
    assert log == ["update", "fetch"]


def test_a_failure_wakes_everyone_who_waits():
    fences = Fences(1)
    fences.begin_copy(0)
    causes = []

    def expect(waiting):
        with pytest.raises(TrainingStopped, match="disk on fire") as caught:
            waiting()
        causes.append(caught.value.__cause__)

    threads = [
        start_thread(expect, lambda: fences.wait_readers(0, 1)),
        start_thread(expect, lambda: fences.wait_committed(0, 1)),
    ]
    cause = OSError("disk on fire")
    fences.fail(cause)
    fences.fail(OSError("a later one"))
    for thread in threads:
        thread.join(5)
    assert causes == [cause, cause]
    with pytest.raises(TrainingStopped):
        fences.is_committed(0, 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", [*OFTEN, pytest.param("deferred_host_sum", marks=pytest.mark.thorough)]
)
def test_a_failed_update_stops_the_step_with_its_cause(name, monkeypatch):
    update, calls = UpdateKernels.start_update, []

    def failing(self, *arguments):
        calls.append(0)
        if len(calls) == 9:
            raise OSError("no memory left")
        return update(self, *arguments)

    monkeypatch.setattr(UpdateKernels, "start_update", failing)
    with start(**RUNS[name]) as it:
        with pytest.raises(TrainingStopped, match="no memory left") as caught:
            for batch in batches(6):
                it.step(batch)
        assert isinstance(caught.value.__cause__, OSError)
        assert it.step_count <= 3
        with pytest.raises(TrainingStopped, match="no memory left"):
            it.parameters()
        with pytest.raises(TrainingStopped, match="no memory left"):
            it.step(batches()[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        "deferred_host_sum",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("deferred", "eager_host_sum")
        ),
    ],
)
def test_the_norm_of_a_failed_step_is_an_error_and_no_hang(name, monkeypatch):
    """Also when the update thread has ended before the step handed over its last gradient."""

    def failing(self, *arguments):
        raise OSError("no memory left")

    monkeypatch.setattr(UpdateKernels, "start_update", failing)
    monkeypatch.setattr(UpdateKernels, "sum_of_squares", failing)
    with start(**RUNS[name]) as it:
        # Eager updates may fail before the step has been handed over, which then says so.
        may_fail = name.startswith("eager")
        figures = None
        with contextlib.suppress(*[TrainingStopped] if may_fail else []):
            figures = it.step(batches()[0])
        if figures is not None:
            np.testing.assert_array_less(0, figures.loss)
        if figures is not None and name != "deferred":  # there the norm comes from the devices
            with pytest.raises((OSError, TrainingStopped), match="no memory left"):
                _ = figures.grad_norm
        with pytest.raises(TrainingStopped, match="no memory left"):
            it.wait()


@functools.cache
def poisoned_model(tied: bool, poison: int = 96):
    """A decoder whose gradient of one weight of layer 2 is NaN when a row begins with `poison`."""
    model = decoder.build(small_config(tied=tied))

    @jax.custom_vjp
    def pass_on(weight, is_bad):
        return weight

    def backward(is_bad, gradient):
        return gradient.at[3, 5].set(jnp.where(is_bad, jnp.nan, gradient[3, 5])), None

    pass_on.defvjp(lambda weight, is_bad: (weight, is_bad), backward)

    def layer(params, x, batch):
        is_bad = (batch["input_ids"][:, 0] == poison).any()
        mlp = dict(params["mlp"])
        mlp["up_proj"] = {"weight": pass_on(mlp["up_proj"]["weight"], is_bad)}
        return model.layer_fns[2]({**params, "mlp": mlp}, x, batch)

    layers = (*model.layer_fns[:2], layer, *model.layer_fns[3:])
    return dataclasses.replace(model, layer_fns=layers), poison


BAD_WEIGHT = "model.layers.2.mlp.up_proj.weight"


def good_and_bad(poison: int):
    good = batches(3)
    for batch in good:
        batch["input_ids"][:, 0] = 0
    bad = batches(1)[0]
    bad["input_ids"][1, 0] = poison
    return good, bad


def everything(it):
    values = {name: it.store.read(name) for name in it.store.parameter_names}
    return Run(losses=[], norms=[], parameters=values, state=optimizer_state(it.store))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["deferred", pytest.param("deferred_host_sum", marks=pytest.mark.thorough)]
)
def test_a_nonfinite_gradient_stops_and_leaves_the_state_as_it_was(name):
    model, poison = poisoned_model(False)
    good, bad = good_and_bad(poison)
    with start(model=model, **RUNS[name]) as it:
        it.step(good[0])
        it.wait()
        before = everything(it)
        figures = it.step(bad)
        with pytest.raises(TrainingStopped, match="step 2: the gradient norm is nan") as caught:
            _ = figures.grad_norm
        assert f"first parameter with a non-finite gradient is {BAD_WEIGHT}." in str(caught.value)
        assert "No parameter was updated" in str(caught.value)
        with pytest.raises(TrainingStopped, match="step 2: the gradient norm is nan"):
            it.step(good[1])
        assert differing(everything(it), before) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["eager", pytest.param("eager_host_sum", marks=pytest.mark.thorough)]
)
def test_eager_updates_stop_at_a_nonfinite_norm_even_if_nobody_reads_it(name):
    model, poison = poisoned_model(False)
    good, bad = good_and_bad(poison)
    with start(model=model, **RUNS[name]) as it:
        it.step(good[0])
        with pytest.raises(TrainingStopped, match="step 2: the gradient norm is nan") as caught:
            for batch in (bad, *good):
                it.step(batch)
        assert "already hold it" in str(caught.value)
        assert it.step_count <= 3


@pytest.mark.parametrize(
    "name", ["deferred", pytest.param("deferred_host_sum", marks=pytest.mark.thorough)]
)
def test_a_skipped_step_is_as_if_it_had_not_been(name):
    """Weights, mu, nu and the count of steps: the following steps are the same, bit for bit."""
    model, poison = poisoned_model(False)
    good, bad = good_and_bad(poison)
    runs = []
    for rows in ([good[0], bad, good[1], good[2]], good):
        with start(model=model, on_nonfinite="skip", **RUNS[name]) as it:
            metrics = [it.step(batch) for batch in rows]
            skipped = [figures.skipped for figures in metrics]
            assert skipped == [batch is bad for batch in rows]
            it.wait()
            runs.append(everything(it))
    assert differing(*runs) == []


def test_a_trainer_that_resumes_at_an_earlier_step_repeats_itself():
    rows = batches(2)
    with start() as it:
        it.step(rows[0])
        it.wait()
        shared = it.gate.shared
        first = everything(it)
        it.step(rows[1])
        it.wait()
        expected = everything(it)
        expected_shared = it.gate.shared
        with it.gate.writing() as writer:
            for name, values in first.parameters.items():
                writer.write(name, values)
                for number, state in enumerate(first.state):
                    writer.write_state(name, number, state[name])
            writer.finish(1, shared)
        it.step(rows[1])
        it.wait()
        assert differing(everything(it), expected) == []
        assert it.gate.shared == expected_shared


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"on_nonfinite": "skip"}], ids=str)
def test_eager_updates_refuse_what_needs_the_norm_first(options):
    with (
        pytest.raises(ValueError, match="update_policy='deferred'"),
        start(policy="eager", **options),
    ):
        pass
