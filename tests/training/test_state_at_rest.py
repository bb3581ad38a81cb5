"""What happens to the state beside steps: restoring, saving, evaluating, failing to start."""

import contextlib
import dataclasses
import gc
import itertools
import json
import shutil
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import differing, small_config, strategy, trainer
from test_fences import batches, everything, start

import slidedp_jax
from slidedp_jax import TrainingStopped, UserError
from slidedp_jax.checkpoint.record import form_to_go_on_with, read_record
from slidedp_jax.checkpoint.retention import list_steps
from slidedp_jax.models import decoder
from slidedp_jax.state import device_state
from slidedp_jax.state.device_state import DevicePartState, cut
from slidedp_jax.state.layout import FlatLayout
from slidedp_jax.state.model_chunks import chunks_of
from slidedp_jax.state.pinned_memory import PageLock
from slidedp_jax.tracer import Tracer
from slidedp_jax.update.treatments import Treatments

pytestmark = pytest.mark.timeout(120)


class SlowUpdates(Tracer):
    """Updates that take a while, as those of large chunks do."""

    @contextlib.contextmanager
    def span(self, lane, name):
        if lane == "host_update":
            time.sleep(0.03)
        yield


# Restoring


def test_a_restore_waits_for_updates_under_way(tmp_path):
    with start(tracer=SlowUpdates()) as it:
        for batch in batches(2):
            it.step(batch)
        saved = it.save(tmp_path)
        expected = everything(it)
        figures = it.step(batches(3)[2])
        assert it.restore(saved).step == 2
        assert differing(everything(it), expected) == []
        repeated = it.step(batches(3)[2])
        assert (repeated.step, repeated.loss) == (3, figures.loss)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    with start() as it:
        it.step(batches(1)[0])
        return it.save(tmp_path_factory.mktemp("saved"), {"note": 1})


@pytest.fixture
def saved(saved_once, tmp_path):
    """A checkpoint of step 1 that a test may damage."""
    return shutil.copytree(saved_once, tmp_path / "run" / saved_once.name)


def flip_a_byte(path):
    data = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 4
    data.write_bytes(raw)


def cut_files(path):
    for data in path.rglob("0*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


DAMAGES = {
    "a byte of the last item": lambda path: flip_a_byte(path / "head"),
    "a cut item": lambda path: cut_files(path / "model.layers.2"),
    "a lost item": lambda path: shutil.rmtree(path / "head"),
    "lost arrays": lambda path: shutil.rmtree(next((path / "head").glob("*.master"))),
    "a number in the record": lambda path: (path / "trainer.json").write_text(
        (path / "trainer.json").read_text().replace('"step": 1', '"step": 7')
    ),
    "half a record": lambda path: (path / "trainer.json").write_bytes(
        (path / "trainer.json").read_bytes()[:-100]
    ),
    "no text": lambda path: (path / "trainer.json").write_bytes(b"\xff\xfe\x00"),
}


# Reads of TensorStore that fail answer after Orbax has closed the event loop that they came from.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "damage",
    [
        damage
        if damage in ("a byte of the last item", "half a record")
        else pytest.param(damage, marks=pytest.mark.thorough)
        for damage in DAMAGES
    ],
)
def test_a_refused_restore_changes_nothing(damage, saved):
    DAMAGES[damage](saved)
    with start() as it:
        for batch in batches(2):
            it.step(batch)
        it.wait()
        before, shared = everything(it), it.gate.shared
        with pytest.raises(UserError, match=r"damaged|has no head"):
            it.restore(saved)
        assert differing(everything(it), before) == []
        assert it.gate.shared == shared
        assert it.step(batches(3)[2]).step == 3


OTHERS = {
    "a schedule": (optax.adamw(optax.linear_schedule(1e-2, 0, 9)), {}, "shared optimizer state"),
    "adabelief": (optax.adabelief(1e-2), {}, r"ScaleByAdamState\.count.*ScaleByBeliefState"),
    "adamax": (optax.adamax(1e-2), {}, "in another way"),
    "no moments": (optax.sgd(1e-2), {}, "shared optimizer state|holds optimizer state"),
    "an average": (optax.adamw(1e-2), {"ema_decay": 0.9}, "holds optimizer state"),
}


@pytest.mark.parametrize(
    "other",
    [
        other
        if other in ("a schedule", "adabelief")
        else pytest.param(other, marks=pytest.mark.thorough)
        for other in OTHERS
    ],
)
def test_the_state_of_another_optimizer_is_refused(other, saved):
    optimizer, options, said = OTHERS[other]
    with trainer(small_config(), optimizer, strategy(), **options) as it:
        before = it.parameters()
        with pytest.raises(UserError, match=said):
            it.restore(saved)
        for name, values in it.parameters().items():
            np.testing.assert_array_equal(values, before[name])


def test_another_decay_of_the_average_is_refused(tmp_path):
    config = small_config(layers=1)
    with trainer(config, optax.adamw(1e-2), strategy(), ema_decay=0.9) as it:
        path = it.save(tmp_path)
    with (
        trainer(config, optax.adamw(1e-2), strategy(), ema_decay=0.99) as it,
        pytest.raises(UserError, match=r"ema_decay=0\.9, this trainer has ema_decay=0\.99"),
    ):
        it.restore(path)


def test_rates_and_masks_may_change(saved):
    other = optax.adamw(3e-3, b2=0.9, weight_decay=0.2, mask=lambda p: jax.tree.map(jnp.ndim, p))
    with trainer(small_config(), other, strategy()) as it:
        assert it.restore(saved).step == 1


def test_another_configuration_is_refused_by_the_names_of_its_fields(saved):
    config = small_config()
    rope = dataclasses.replace(config.rope_parameters, rope_theta=5e5)
    other = dataclasses.replace(config, rope_parameters=rope, rms_norm_eps=1e-5)
    with (
        trainer(other, optax.adamw(1e-2), strategy()) as it,
        pytest.raises(UserError, match=r"rms_norm_eps was .*; rope_parameters\.rope_theta was"),
    ):
        it.restore(saved)


@pytest.mark.thorough
def test_the_kernel_form_of_the_checkpoint_is_taken(tmp_path):
    def run(form, steps, path=None):
        options = {} if form is None else {"kernel_form": form}
        with slidedp_jax.Trainer(
            decoder.build(small_config()),
            optax.adamw(1e-2),
            strategy=strategy(),
            parameters=initial_parameters(small_config()),
            **options,
        ) as it:
            if path is not None:
                it.restore(path)
            for batch in steps:
                it.step(batch)
            return it.save(tmp_path / str(form)), it.kernel_form, it.parameters()

    rows = [random_batch(small_config(), 4, 12, packed=True, seed=i) for i in range(4)]
    half, _, _ = run("blocked", rows[:2])
    _, _, expected = run("blocked", rows)
    with pytest.raises(UserError, match="told to use 'whole'"):
        run("whole", rows[2:], half)
    _, form, resumed = run(None, rows[2:], half)
    assert form == "blocked"
    for name, values in expected.items():
        np.testing.assert_array_equal(resumed[name], values, err_msg=name)


def test_a_refused_checkpoint_leaves_the_kernel_form(tmp_path):
    def run(form):
        return trainer(small_config(), optax.sgd(1e-2), strategy(), num_devices=1, kernel_form=form)

    with run(None) as it:
        usual = it.kernel_form
    with run("fused" if usual != "fused" else "blocked") as it:
        path = it.save(tmp_path)
    data = next(path.rglob("0*"))
    raw = bytearray(data.read_bytes())
    raw[0] ^= 1
    data.write_bytes(raw)
    with run(None) as it:
        with pytest.raises(UserError, match="damaged"):
            it.restore(path)
        assert it.kernel_form == usual


def test_under_another_jax_the_form_is_todays(caplog):
    record = {"kernel_form": "blocked", "versions": {"jax": "0.3.7"}}
    assert form_to_go_on_with(record) != "blocked" or jax.__version__ >= "0.12"
    assert "JAX 0.3.7" in caplog.text or jax.__version__ >= "0.12"
    assert form_to_go_on_with({"kernel_form": "blocked"}) == "blocked"  # of before versions


# Starting from a checkpoint


def test_a_trainer_to_be_restored_refuses_until_it_is(saved, tmp_path):
    with start() as it:
        it.restore(saved)
        expected = everything(it)
    with start(parameters=slidedp_jax.TO_BE_RESTORED) as it:
        batch = batches(1)[0]
        calls = [
            lambda: it.step(batch),
            lambda: it.evaluate(batch),
            it.parameters,
            lambda: it.save(tmp_path),
        ]
        for call in calls:
            with pytest.raises(UserError, match="restore a checkpoint first"):
                call()
        broken = shutil.copytree(saved, tmp_path / "broken")
        flip_a_byte(broken / "head")
        with pytest.raises(UserError, match="damaged"):
            it.restore(broken)
        with pytest.raises(UserError, match="restore a checkpoint"):
            it.step(batch)
        it.restore(saved)
        assert differing(everything(it), expected) == []
        assert it.step(batch).step == 2


# Saving


def test_a_checkpoint_of_the_same_step_is_kept_only_if_it_holds_the_same(saved):
    with start() as it:
        it.step(batches(1)[0])
        stamp = (saved / "trainer.json").stat().st_mtime_ns
        assert it.save(saved.parent, {"note": 1}) == saved
        assert (saved / "trainer.json").stat().st_mtime_ns == stamp
        with pytest.raises(UserError, match="another state of step 1"):
            it.save(saved.parent, {"note": 2})
    with start() as it:
        it.step(batches(2)[1])
        with pytest.raises(UserError, match="Nothing was written: give another folder"):
            it.save(saved.parent, {"note": 1})
        assert list_steps(saved.parent) == [saved]
        it.save(saved.parent.parent / "other", {"note": 1})


def test_records_of_earlier_versions_are_read(saved):
    record = read_record(saved)
    for name in ("versions", "configuration", "optimizer_state_names", "optimizer_programs"):
        del record[name]
    del record["shared_optimizer_state_names"]
    (saved / "trainer.json").write_text(json.dumps(record))
    with start() as it:
        assert it.restore(saved).step == 1


# Evaluating


class Broken:
    """Fails in one pass, at its `number`-th call."""

    def __init__(self, error, number):
        self._error, self._left = error, number

    def around(self, function):
        def call(*arguments, **options):
            self._left -= 1
            if self._left == 0:
                raise self._error
            return function(*arguments, **options)

        return call


@pytest.fixture(scope="module")
def without_evaluation():
    """Losses of five steps, and the state behind them."""
    with start() as it:
        losses = [it.step(batch).loss for batch in batches(5)]
        it.wait()
        return losses, everything(it)


FAILING_CALLS = [
    *itertools.product(("upload", "unpack"), (1, 3, 6)),
    *(("loss", number) for number in (1, 2)),  # of two microbatches
]
OFTEN = (("upload", 3), ("unpack", 6), ("loss", 2))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("RESOURCE_EXHAUSTED: ..."),
        pytest.param(KeyboardInterrupt(), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    ("where", "number"),
    [
        call if call in OFTEN else pytest.param(*call, marks=pytest.mark.thorough)
        for call in FAILING_CALLS
    ],
)
def test_an_evaluation_that_fails_leaves_the_trainer_as_it_was(
    where, number, error, monkeypatch, without_evaluation
):
    rows = batches(5)
    expected, wanted = without_evaluation
    with start() as it:
        losses = [it.step(rows[0]).loss]
        broken = Broken(error, number)
        owner, name = {
            "upload": (slidedp_jax.transfer.routes, "upload"),
            "unpack": (it.weights, "_unpack"),
            "loss": (it._programs, "loss"),
        }[where]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken.around(getattr(owner, name)))
            with pytest.raises(type(error)):
                it.evaluate(rows[1])
        losses += [it.step(batch).loss for batch in rows[1:]]
        assert losses == expected
        it.wait()
        assert differing(everything(it), wanted) == []


def test_an_interrupt_when_a_step_ends_hangs_nobody(monkeypatch):
    with start() as it:
        it.step(batches(1)[0])

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(it._updates, "end_backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.step(batches(2)[1])
        with pytest.raises(TrainingStopped, match="a step failed: KeyboardInterrupt"):
            it.parameters()


# Starting


WRONG = {
    "eager with a clip": ({"update_policy": "eager"}, {"max_grad_norm": 1.0}),
    "a limit below zero": ({}, {"max_grad_norm": -1.0}),
    "a policy": ({}, {"on_nonfinite": "hope"}),
    "a loss limit": ({}, {"max_loss": 0}),
    "skips": ({}, {"max_consecutive_skips": 0}),
    "a form": ({}, {"kernel_form": "fast"}),
    "an average": ({}, {"ema_decay": 1.5}),
    "devices": ({}, {"num_devices": 3}),
    "frozen": ({}, {"frozen": ["no.such.*"]}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused_before_weights_are_read(wrong):
    changes, options = WRONG[wrong]
    read = []
    with pytest.raises((ValueError, UserError)):
        slidedp_jax.Trainer(
            decoder.build(small_config()),
            optax.adamw(1e-2),
            strategy=strategy(**changes),
            parameters=lambda write: read.append(write),
            **options,
        )
    assert read == []


def test_starting_weights_of_no_known_kind_are_refused():
    with pytest.raises(UserError, match="pass a mapping from full name to array, a function"):
        start(parameters="model.safetensors").__enter__()


@pytest.mark.parametrize("left_out", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_function_that_writes_only_some_weights_is_refused(left_out):
    values = initial_parameters(small_config())

    def write_some(write):
        for name, value in values.items():
            if name != left_out:
                write(name, value)

    with pytest.raises(UserError, match=f"lack 1 parameters .such as {left_out}"):
        start(parameters=write_some).__enter__()


class Driver:
    """Counts what is registered, as the GPU client's `dma_map` does."""

    def __init__(self, fail_at=None):
        self.mapped, self._fail_at = {}, fail_at

    def dma_map(self, pointer, num_bytes):
        if len(self.mapped) == self._fail_at:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        assert pointer not in self.mapped
        self.mapped[pointer] = num_bytes

    def dma_unmap(self, pointer):
        del self.mapped[pointer]


@pytest.fixture
def driver(monkeypatch):
    def use(**options):
        made = Driver(**options)
        device = types.SimpleNamespace(platform="gpu", client=made)
        init = PageLock.__init__
        monkeypatch.setattr(PageLock, "__init__", lambda self, _: init(self, device))
        monkeypatch.setattr("slidedp_jax.state.pinned_memory.SMALLEST_LOCKED_BYTES", 1)
        return made

    return use


def test_no_page_stays_locked_after_a_failed_start(driver, monkeypatch):
    locks = driver()
    with pytest.raises(UserError, match="lack"):
        start(parameters=lambda write: None).__enter__()
    assert locks.mapped == {}
    monkeypatch.setattr(slidedp_jax.assembly, "HostOptimizer", None)
    with pytest.raises(TypeError):
        start().__enter__()
    assert locks.mapped == {}


def test_no_page_stays_locked_where_the_driver_refuses(driver):
    locks = driver(fail_at=5)
    with pytest.raises(RuntimeError, match="page-locking"):
        start().__enter__()
    assert locks.mapped == {}


def test_a_dropped_trainer_leaves_no_thread_and_no_locked_page(driver):
    locks = driver()
    it = start(model=decoder.build(small_config()))
    it.step(batches(1)[0])
    assert locks.mapped
    threads = [thread for thread in threading.enumerate() if thread.name == "host_update"]
    left = weakref.ref(it.store)
    del it
    gc.collect()
    assert left() is None and locks.mapped == {}
    assert not any(thread.is_alive() for thread in threads)


# Beyond 2^31 elements


@pytest.mark.parametrize("start", [0, 1, 63, 64, 200, 2**31 - 1, 2**31 + 12_345, 3 * 2**30 - 700])
def test_a_range_of_a_large_share_is_cut_by_rows(start, monkeypatch):
    """The program is run on a small share and traced on a large one, with the place's own rows."""
    share = jnp.arange(64 * 40, dtype=jnp.float32)
    for place, size in itertools.product((0, 5, 64, 1000, 64 * 40 - 700), (1, 64, 700)):
        np.testing.assert_array_equal(cut(share, place, size, 64), share[place : place + size])
    seen = []
    monkeypatch.setattr(device_state, "_cut_rows", lambda *given: seen.append(given))
    large = type("Large", (), {"__len__": lambda self: 3 * 2**30})()
    cut(large, start, 700, 64)
    _, first, offset, count, size, block_size = seen[0]
    assert first * block_size + offset == start and offset + size <= count * block_size
    assert first + count <= 3 * 2**30 // block_size and max(first, offset, count) < 2**31


@pytest.mark.thorough
def test_state_of_more_than_2_31_elements_on_a_device_is_read():
    """4.3 GB: what lies beyond 2^31 elements of a device's share, and across it."""
    size = 2**31 + 2**20
    layout = FlatLayout(
        name="large", slots=(), block_size=4096, num_pieces=1, block_groups=(0,) * (size // 4096)
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    make = jax.jit(
        lambda: (jnp.arange(size // 4096, dtype=jnp.uint32).repeat(4096) % 251).astype(jnp.uint8),
        out_shardings=sharding,
    )
    state = DevicePartState(layout, [make()])
    for place, number in ((0, 5), (2**31 - 7000, 20_000), (2**31 + 99, 5000), (size - 10, 10)):
        expected = (np.arange(place, place + number) // 4096 % 251).astype(np.uint8)
        np.testing.assert_array_equal(state.read(0, place, number), expected)


def test_pieces_that_the_update_cannot_count_are_refused():
    """Shapes alone: nothing of that size is made."""
    model = decoder.build(small_config())
    large = jax.ShapeDtypeStruct((2**16, 2**16), np.float32)
    layer = model.layers[1]
    shapes = jax.tree.map(lambda leaf: leaf, layer.shapes)
    shapes["mlp"]["up_proj"]["weight"] = large
    model = dataclasses.replace(
        model, layers=(dataclasses.replace(layer, shapes=shapes), *model.layers[1:])
    )
    names = {
        name: tuple(leaf.shape)
        for stage in model.stages()
        for name, leaf in zip(stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True)
    }
    treatments = Treatments(optax.sgd(1e-2), names)
    kinds = {"groups": treatments.groups, "kinds": treatments.kinds}
    with pytest.raises(UserError, match=r"at most 2,147,483,647; use fewer layers_per_chunk"):
        chunks_of(model, strategy(num_host_devices=1), **kinds)
    chunks_of(model, strategy(num_host_devices=3), **kinds)


def test_another_vocabulary_is_named_before_shapes_are_blamed_on_the_optimizer(saved):
    other = dataclasses.replace(small_config(), vocab_size=98)
    with (
        trainer(other, optax.adamw(1e-2), strategy()) as it,
        pytest.raises(UserError, match="another model configuration: vocab_size was 97, now 98"),
    ):
        it.restore(saved)
