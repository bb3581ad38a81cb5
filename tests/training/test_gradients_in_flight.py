"""How many gradients are on their way off the devices where copies are slower than backward."""

import contextlib
import functools

import pytest
from streamed_training import assert_bitwise_equal
from test_fences import RUNS, batches, run, start

from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer import routes
from slidedp_jax.transfer.routes import ArrivingGradient, GradientPath


class SlowLink(Tracer):
    """Copies that arrive when somebody waits for them and not before; counts those on their way.

    Attributes:
      at_backward: on their way when a chunk's backward is issued, for every chunk of every step.
      at_send: the same when a gradient has been sent, that one included.
    """

    def __init__(self, monkeypatch):
        self.at_backward, self.at_send = [], []
        self._sent, self._arrived = [], 0
        wait, link = ArrivingGradient.wait, self

        def begin(gradient, **fields):
            fill(gradient, **fields)
            link._sent.append(gradient)

        def waited(gradient):
            wait(gradient)
            place = link._place(gradient)
            link._arrived = max(link._arrived, place + 1)  # copies end in order

        fill = ArrivingGradient.__init__
        monkeypatch.setattr(ArrivingGradient, "__init__", begin)
        monkeypatch.setattr(ArrivingGradient, "wait", waited)
        monkeypatch.setattr(
            ArrivingGradient, "has_arrived", lambda gradient: link._place(gradient) < link._arrived
        )

    def _place(self, gradient):
        return next(n for n, other in enumerate(self._sent) if other is gradient)

    @contextlib.contextmanager
    def span(self, lane, name):
        if name.startswith("backward") or name == "head and loss":
            self.at_backward.append(len(self._sent) - self._arrived)
        yield
        if name.startswith("download"):
            self.at_send.append(len(self._sent) - self._arrived)


def few_rows():
    """As many as two microbatches of one row on one device."""
    return {name: array[:2] for name, array in batches()[0].items()}


@pytest.fixture(scope="module")
def undisturbed():
    return functools.cache(lambda name: run(**RUNS[name]))


@pytest.mark.parametrize(
    "name",
    [
        "deferred",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("deferred_host_sum", "eager", "tied", "eager_host_sum")
        ),
    ],
)
def test_no_more_gradients_leave_than_the_planner_counts(name, undisturbed, monkeypatch):
    link = SlowLink(monkeypatch)
    assert_bitwise_equal(run(tracer=link, **RUNS[name]), undisturbed(name))
    assert len(link.at_backward) == 4 * 6
    assert max(link.at_backward) <= GRADIENTS_IN_FLIGHT - 1
    assert max(link.at_send) <= GRADIENTS_IN_FLIGHT
    if "eager" not in name:  # whose update thread waits for gradients at the same time
        assert max(link.at_send) == GRADIENTS_IN_FLIGHT


@pytest.mark.parametrize("limit", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_another_limit_is_kept_too(limit, monkeypatch):
    monkeypatch.setattr(routes, "GRADIENTS_IN_FLIGHT", limit)
    link = SlowLink(monkeypatch)
    run(tracer=link, **RUNS["deferred"])
    assert (max(link.at_backward), max(link.at_send)) == (limit - 1, limit)


@pytest.mark.parametrize("num_devices", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_without_the_bound_all_gradients_of_a_step_pile_up(num_devices, monkeypatch):
    """The checks above can fail."""
    link = SlowLink(monkeypatch)
    monkeypatch.setattr(GradientPath, "make_room", lambda self: None)
    with start(tracer=link, num_devices=num_devices) as it:
        it.step(few_rows())
        num_chunks = len(it.store.layouts)
    assert max(link.at_send) == num_chunks


def test_one_device_keeps_the_bound(monkeypatch):
    """Its gradients are packed by programs of their own."""
    link = SlowLink(monkeypatch)
    with start(tracer=link, num_devices=1) as it:
        for _ in range(2):
            it.step(few_rows())
    assert max(link.at_backward) == GRADIENTS_IN_FLIGHT - 1
    assert max(link.at_send) == GRADIENTS_IN_FLIGHT
