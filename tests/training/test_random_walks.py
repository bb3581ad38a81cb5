"""Everything a trainer can be asked to do, in random order, under random delays and failures.

A walk is compared, after every action and bit for bit, with a serial model: a state is known by the
batches that led to it, and what it must be is found by a trainer that does nothing else but take
these steps one at a time (which other tests compare with plain optax).
"""

import contextlib
import dataclasses
import faulthandler
import functools
import random
import shutil
import threading
import time

import numpy as np
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import differing, small_config, strategy
from test_fences import OPTIMIZER, everything

from slidedp_jax import TO_BE_RESTORED, Trainer, TrainingStopped, UserError
from slidedp_jax.checkpoint import save_restore
from slidedp_jax.checkpoint.array_streams import ArrayWriter
from slidedp_jax.generate import generate
from slidedp_jax.models import decoder
from slidedp_jax.tracer import Tracer

pytestmark = pytest.mark.timeout(300)

STATIONS = {
    "deferred": {},
    "eager": {"update_policy": "eager"},
    "host_sum": {"gradient_route": "host_sum"},
    "resident": {"resident_chunks": 2},
}
"""What is different in each kind of walk."""
NUM_BATCHES = 5
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


class Weather(Tracer):
    """Delays on every lane, and a failure at a given number of spans from now on one of them."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._failure = None

    def fail_after(self, spans, error, lanes):
        with self._lock:
            self._failure = [spans, error, lanes]

    def clear_up(self):
        """Whether the failure that was announced has not come; it will not come any more."""
        with self._lock:
            left, self._failure = self._failure, None
            return left is not None

    @contextlib.contextmanager
    def span(self, lane, name):
        with self._lock:
            delay = self._random.choice([0, 0, 0, 0.001, 0.004])
            if self._failure is not None and lane in self._failure[2]:
                self._failure[0] -= 1
                if self._failure[0] < 0:
                    error, self._failure = self._failure[1], None
                    raise error
        time.sleep(delay)
        yield


class Interruption(KeyboardInterrupt):
    """As of Ctrl-C, in the calling thread."""


@functools.cache
def batch(number):
    return random_batch(small_config(), 4, 12, packed=True, seed=number)


def start(kind, **options):
    eager = "update_policy" in STATIONS[kind]
    plan = strategy(
        **{
            "rows_per_microbatch": 1,
            "num_microbatches": 2,
            "prefetch_depth": 2,
            "num_host_devices": 2,
        }
        | STATIONS[kind]
    )
    options = {"parameters": initial_parameters(small_config()), "num_devices": 2} | options
    limit = None if eager else 0.7
    model = decoder.build(small_config())
    return Trainer(
        model, OPTIMIZER, strategy=plan, kernel_form="whole", max_grad_norm=limit, **options
    )


@dataclasses.dataclass(frozen=True)
class Known:
    """What a state must be and do."""

    arrays: object
    loss: float | None
    evaluated: float
    completions: list[list[int]]


@functools.cache
def known(kind, history):
    """By a trainer that takes these steps alone."""
    with start(kind) as it:
        loss = None
        for number in history:
            loss = it.step(batch(number)).loss
            it.wait()
        evaluated, _ = it.evaluate(batch(99))
        completions = generate(it, PROMPTS, max_new_tokens=2)
        return Known(arrays=everything(it), loss=loss, evaluated=evaluated, completions=completions)


class Walk:
    """A trainer, where it must be, and the checkpoints that there are."""

    def __init__(self, kind, seed, folder):
        self.kind, self.folder = kind, folder
        self.chance = random.Random(seed)
        self.weather = Weather(seed)
        self.history = ()
        self.saved = {}
        self.runs = 0
        self.it = start(kind, tracer=self.weather)

    # Actions

    def step(self):
        number = self.chance.randrange(NUM_BATCHES)
        figures = self.it.step(batch(number))
        self.history = (*self.history, number)
        assert figures.step == len(self.history) == self.it.step_count
        if self.chance.random() < 0.3:
            assert figures.loss == self.expected().loss

    def evaluate(self):
        assert self.it.evaluate(batch(99))[0] == self.expected().evaluated

    def generate(self):
        assert generate(self.it, PROMPTS, max_new_tokens=2) == self.expected().completions

    def parameters(self):
        values = self.it.parameters()
        assert not [
            name
            for name, value in self.expected().arrays.parameters.items()
            if value.tobytes() != values[name].tobytes()
        ]

    def compare_all(self):
        self.it.wait()
        assert differing(everything(self.it), self.expected().arrays) == []

    def save(self):
        self.runs += 1
        path = self.it.save(self.folder / str(self.runs), {"history": list(self.history)})
        self.saved[path] = self.history

    def save_again(self):
        if path := self.a_checkpoint():
            there = self.saved.get(path.parent / f"step_{len(self.history):08d}")
            wrong = there is not None and there != self.history
            extra = {"history": list(self.history)}
            with pytest.raises(UserError, match="another state") if wrong else _nothing():
                written = self.it.save(path.parent, extra)
                self.saved[written] = self.history

    def restore(self):
        if path := self.a_checkpoint():
            restored = self.it.restore(path)
            self.history = self.saved[path]
            assert restored.step == len(self.history)
            assert tuple(restored.extra["history"]) == self.history

    def close_and_start_again(self):
        self.it.close()
        self.it.close()
        with pytest.raises(UserError, match="closed"):
            self.it.evaluate(batch(0))
        self.start_again()

    # Failures

    def bad_batch(self):
        with pytest.raises(UserError):
            self.chance.choice([self.it.step, self.it.evaluate])({"input_ids": np.zeros((0, 3))})

    def interrupted(self):
        """What only reads, or has not yet begun to write, is as if it had not been asked."""
        call = self.chance.choice(
            [
                lambda: self.it.evaluate(batch(3)),
                lambda: generate(self.it, PROMPTS, max_new_tokens=2),
            ]
        )
        self.it.wait()  # so that no update meets what is meant for the caller
        self.weather.fail_after(self.chance.randrange(12), Interruption(), ("h2d", "compute"))
        try:
            call()
        except Interruption:
            assert not self.weather.clear_up()
        else:
            assert self.weather.clear_up(), "an interrupt was swallowed"

    def full_disk(self):
        write = ArrayWriter.write
        left = [self.chance.randrange(40)]

        def refuse(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            write(*arguments)

        folder = self.folder / "full"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArrayWriter, "write", refuse)
            with pytest.raises(OSError, match="No space left"):
                self.it.save(folder)
        assert not list(folder.iterdir())

    def damaged_checkpoint(self):
        if path := self.a_checkpoint():
            copy = shutil.copytree(path, self.folder / "damaged" / path.name)
            try:
                item = self.chance.choice([p for p in sorted(copy.iterdir()) if p.is_dir()])
                data = max(
                    (p for p in item.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
                )
                raw = bytearray(data.read_bytes())
                raw[len(raw) // 2] ^= 1
                data.write_bytes(raw)
                with pytest.raises(UserError, match="damaged"):
                    self.it.restore(copy)
            finally:
                shutil.rmtree(self.folder / "damaged")

    def disk_that_fails_while_restoring(self):
        """All has been judged, part is written: nothing goes on until another one is restored."""
        if path := self.a_checkpoint():
            into_state = save_restore.into_state
            left = [self.chance.randrange(40)]

            def refusing(writer):
                use = into_state(writer)

                def refuse(*arguments):
                    left[0] -= 1
                    if left[0] < 0:
                        raise OSError(5, "Input/output error")
                    use(*arguments)

                return refuse

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(save_restore, "into_state", refusing)
                with pytest.raises(OSError, match="Input/output"):
                    self.it.restore(path)
            for call in (self.it.parameters, lambda: self.it.step(batch(0))):
                with pytest.raises(UserError, match="restore a checkpoint again"):
                    call()
            with pytest.raises(UserError, match="restore a checkpoint again"):
                self.it.save(self.folder / "nothing")
            self.history = self.saved[path]
            self.it.restore(path)

    def failed_step(self):
        """In the caller's thread or in the update thread: said for good, by everything."""
        lanes = self.chance.choice([("h2d", "compute", "d2h"), ("host_update",)])
        error = self.chance.choice([Interruption(), MemoryError("no memory"), OSError("gone")])
        self.weather.fail_after(self.chance.randrange(20), error, lanes)
        with contextlib.suppress(TrainingStopped, type(error)):
            figures = self.it.step(batch(1))
            figures.grad_norm  # noqa: B018 - waits
            self.it.wait()
        if self.weather.clear_up():  # it would have come later than the step lasted
            self.history = (*self.history, 1)
            return
        for call in (
            self.it.parameters,
            self.it.wait,
            lambda: self.it.step(batch(0)),
            lambda: self.it.evaluate(batch(0)),
            lambda: generate(self.it, PROMPTS, max_new_tokens=1),
            lambda: self.it.save(self.folder / "nothing"),
        ):
            with pytest.raises(TrainingStopped, match="a step failed"):
                call()
        assert not (self.folder / "nothing").exists()
        self.it.close()
        self.start_again()

    # What they need

    def expected(self):
        return known(self.kind, self.history)

    def a_checkpoint(self):
        return self.chance.choice(sorted(self.saved)) if self.saved else None

    def start_again(self):
        """From the first weights or from a checkpoint."""
        path = self.a_checkpoint()
        self.history = self.saved[path] if path else ()
        weights = {"parameters": TO_BE_RESTORED} if path else {}
        self.it = start(self.kind, tracer=self.weather, **weights)
        if path:
            self.it.restore(path)

    def go(self, actions):
        for _ in range(actions):
            name = self.chance.choices(list(WEIGHTS), WEIGHTS.values())[0]
            threads = threading.active_count()
            try:
                getattr(self, name)()
                if len(self.history) > 4:  # so that few states have to be known
                    self.close_and_start_again()
            except BaseException as error:
                error.add_note(f"in {name}, after batches {self.history}, threads {threads}")
                raise
        self.compare_all()
        self.it.close()


WEIGHTS = {
    "step": 12,
    "evaluate": 3,
    "generate": 1,
    "parameters": 2,
    "compare_all": 2,
    "save": 3,
    "save_again": 2,
    "restore": 3,
    "close_and_start_again": 1,
    "bad_batch": 1,
    "interrupted": 3,
    "full_disk": 1,
    "damaged_checkpoint": 1,
    "disk_that_fails_while_restoring": 1,
    "failed_step": 2,
}


def _nothing():
    return contextlib.nullcontext()


@pytest.fixture(autouse=True)
def watchdog():
    """Says where every thread stands if a walk stands still."""
    faulthandler.dump_traceback_later(240)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        (kind, seed)
        if (kind, seed) == ("resident", 1)
        else pytest.param(kind, seed, marks=pytest.mark.thorough)
        for kind in STATIONS
        for seed in range(1, 12)
    ],
)
def test_a_random_walk_ends_where_a_serial_one_does(kind, seed, tmp_path):
    walk = Walk(kind, seed, tmp_path)
    walk.go(40 if seed == 1 else 120)
    assert [t.name for t in threading.enumerate() if t.name == "host_update"] == []
