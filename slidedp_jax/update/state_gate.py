"""The one way to the training state at rest: everything outside a step reads and writes through it.

Version n is the state after n steps. A reader holds one version: updates of later steps wait until
it lets go, those that lead to it go on. The writer has the state to itself: there is nothing to use
until all of it has been written. What only reads leaves the state as it was, however it ends; what
fails while it writes leaves a gate that says so, until something is restored; a failed step is
said for good.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from slidedp_jax.errors import UserError
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.split_float import rounded
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.transfer.host_gather import HostGather
from slidedp_jax.transfer.weight_window import StreamedWeights
from slidedp_jax.update.kernel_form import KernelForm
from slidedp_jax.update.part_updates import PartUpdates
from slidedp_jax.update.state_meaning import StateMeaning
from slidedp_jax.update.state_snapshot import StateSnapshot
from slidedp_jax.update.update_thread import HostOptimizer

_LOG = logging.getLogger(__name__)

TO_RESTORE = (
    "the trainer was made with TO_BE_RESTORED and has no weights yet; restore a checkpoint first"
)
_HALF_WRITTEN = (
    "restoring a checkpoint failed after everything had been judged, so the state is of neither "
    "step; restore a checkpoint again"
)


class StateGate:
    """Versions of the state, and who may use it.

    Args:
      store: the state.
      fences: versions of its chunks.
      updates: the update thread, and the optimizer state that no parameter owns.
      part_updates: the compiled updates.
      meaning: what the optimizer's state arrays are.
      ema_decay: of the moving average that is the last state array, None for none.
      form_is_stated: the form of the update kernel was asked for by name.
      rounding_is_stated: so was the rounding of weights.
      lacking: why there is nothing to use yet; empty: the state is there.
      gather: brings together what lies on several hosts; None: there is one.

    Attributes:
      version: steps done, all of whose updates have been submitted.
      lent: why the weights are not those of training just now; empty: they are.
      turn: held by whoever uses the devices or the state; one at a time.
    """

    def __init__(
        self,
        store: HostStore,
        fences: Fences,
        updates: HostOptimizer,
        part_updates: PartUpdates,
        meaning: StateMeaning,
        *,
        ema_decay: float | None,
        form_is_stated: bool,
        rounding_is_stated: bool,
        lacking: str = "",
        gather: HostGather | None = None,
    ):
        self.version = 0
        self.lent = ""
        self.turn = threading.RLock()
        self.meaning = meaning
        self.ema_decay = ema_decay
        self._store = store
        self._fences = fences
        self._updates = updates
        self._part_updates = part_updates
        self._form_is_stated = form_is_stated
        self._rounding_is_stated = rounding_is_stated
        self._lacking = lacking
        self._gather = gather
        self._closed = False

    @property
    def parameter_names(self) -> list[str]:
        """All parameters, in forward order."""
        return self._store.parameter_names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return self._store.shapes

    def state_specs(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each optimizer state array of a parameter."""
        return self._store.state_specs(name)

    def is_resident(self, name: str) -> bool:
        """Whether a parameter's state stays on the compute devices."""
        return self._store.is_resident(name)

    def is_updated_whole(self, name: str) -> bool:
        """Whether a parameter's optimizer state is kept in its own shapes, not flat."""
        return name in self._store.whole_state

    @property
    def shared(self) -> list[np.ndarray]:
        """Optimizer state that no parameter owns, as far as updates have been made."""
        return [np.asarray(leaf) for leaf in self._updates.shared]

    @property
    def kernel_form(self) -> KernelForm:
        """Form of the update kernel in use."""
        return self._part_updates.form

    @property
    def rounding(self) -> WeightRounding:
        """How masters become the weights that compute."""
        return self._store.rounding

    @property
    def holds_weights(self) -> bool:
        """Whether there is a state, which a failed restore would lose."""
        return not self._lacking

    def check_open(self) -> None:
        """Raise if the trainer is closed.

        Raises:
          UserError: it is.
        """
        if self._closed:
            raise UserError("the trainer is closed, and its host state with it")

    def check(self) -> None:
        """Raise unless there is a state to use.

        Raises:
          UserError: the trainer is closed, or a checkpoint has to be restored first.
          TrainingStopped: a step has failed.
        """
        self.check_open()
        if self._lacking:
            raise UserError(self._lacking)
        self._fences.check()

    def check_own(self) -> None:
        """Raise unless the weights are those of training.

        Raises:
          UserError: others are in their place.
        """
        if self.lent:
            raise UserError(self.lent)

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        """Change shared optimizer state by the names of `StateMeaning.hyperparameters`.

        Raises:
          UserError: there is no such hyperparameter, or a schedule sets it.
        """
        self.check_open()
        known = self.meaning.hyperparameters
        for name in values.keys() - known.keys():
            if name in self.meaning.scheduled:
                raise UserError(
                    f"{name} follows a schedule of the optimizer, which would set it again; give "
                    "inject_hyperparams a number to begin with instead"
                )
            raise UserError(
                f"the optimizer keeps no hyperparameter {name!r}; it keeps {sorted(known)}. Wrap "
                "the transformation, such as optax.inject_hyperparams(optax.adamw)("
                "learning_rate=1e-5), and what it is given can change between steps"
            )
        with self.turn:
            self.check()
            self.wait()
            self._fences.wait_snapshots()
            shared = self.shared
            for name, value in values.items():
                old = shared[known[name]]
                shared[known[name]] = np.asarray(value, old.dtype).reshape(old.shape)
            self._updates.resume(shared)

    def wait(self) -> None:
        """Block until every update of the steps so far is committed, and the steps judged.

        Raises:
          TrainingStopped: one has failed.
        """
        self.check_open()
        for chunk in range(len(self._fences)):
            self._fences.wait_committed(chunk, self.version)
        self._updates.wait_judged(self.version)

    def settle(self) -> None:
        """Block until no update and no copy of a snapshot uses the devices.

        Raises:
          TrainingStopped: a step has failed.
        """
        self.wait()
        self._fences.wait_snapshots()

    @contextlib.contextmanager
    def reading(self) -> Iterator[StateReader]:
        """The state of the present version, which stays as it is meanwhile.

        Raises:
          UserError, TrainingStopped: there is none to read.
        """
        with self.turn:
            self.check()
            version = self.version
            self._fences.hold(version)
            try:
                self.wait()
                yield StateReader(
                    self._store, self._updates.shared, version, self.ema_decay, self._gather
                )
            finally:
                self._fences.let_go(version)

    def snapshot(self) -> StateSnapshot:
        """The state of the present version, to be copied chunk by chunk while steps go on.

        Raises:
          UserError, TrainingStopped: there is none to read.
        """
        with self.turn:
            self.check()
            self._fences.wait_snapshots()
            return StateSnapshot(self._store, self._fences, self._updates, self.version)

    @contextlib.contextmanager
    def writing(self, rounding: WeightRounding | None = None) -> Iterator[StateWriter]:
        """The state, to be written as a whole; ends with `StateWriter.finish`.

        `rounding`: how masters become the weights that compute, from now on; None: as before.

        Raises:
          UserError, TrainingStopped: the trainer is closed, or has failed for good.
        """
        with self.turn:
            self.wait()
            self._fences.wait_snapshots()
            self._lacking = self._lacking or _HALF_WRITTEN
            if rounding not in (None, self.rounding):  # which no weight of before can be read by
                self._part_updates.use_rounding(rounding)
            writer = StateWriter(self._store, self.ema_decay)
            yield writer
            step, shared = writer.finished
            self._updates.resume(shared)
            self._fences.reset(step)
            self.version = step
            self._lacking = ""

    @contextlib.contextmanager
    def passing(self, weights: StreamedWeights) -> Iterator[None]:
        """A pass of the devices under the present weights that changes nothing."""
        with self.turn:
            self.check()
            weights.require(self.version)
            try:
                yield
            except BaseException:
                weights.abandon()
                raise

    def take_kernel_form(self, form: KernelForm) -> None:
        """Go on with the form that a checkpoint was made with.

        Raises:
          UserError: another one was stated.
        """
        if form == self.kernel_form:
            return
        if self._form_is_stated:
            raise UserError(
                f"the checkpoint was made with the update kernel {form!r}, this trainer was told "
                f"to use {self.kernel_form!r}, whose results differ in the last bit; leave "
                "kernel_form out"
            )
        self.wait()
        self._part_updates.use_form(form)

    def rounding_to_go_on_with(self, recorded: WeightRounding) -> WeightRounding:
        """That of a checkpoint, unless another one was stated: masters know of none."""
        stated = self._rounding_is_stated and self.rounding.rounding != recorded.rounding
        if not stated:
            return recorded
        _LOG.warning(
            "the checkpoint was made with weight_rounding=%r and this trainer goes on with %r, as "
            "it was told: what follows differs from what would have followed there",
            *(recorded.rounding, self.rounding.rounding),
        )
        return self.rounding

    def close(self, weights: StreamedWeights) -> None:
        """Finish pending updates, end the update thread and free the state; twice is once."""
        with self.turn:
            self._closed = True
            free(self._updates, weights, self._store, self._fences)


def free(
    updates: HostOptimizer, weights: StreamedWeights, store: HostStore, fences: Fences
) -> None:
    """End the update thread and free the state, which nothing may be copied from any more."""
    updates.close()
    fences.wait_copied()
    weights.abandon()  # after a failed step, uploads may be under way
    store.close()


def free_dropped(
    updates: HostOptimizer, weights: StreamedWeights, store: HostStore, fences: Fences
) -> None:
    """`free` for the trainer that nobody refers to any more.

    Any thread may collect it, one that updates or copies this state, too, which cannot wait for its
    own end. So only the main thread waits.
    """
    arguments = (updates, weights, store, fences)
    if threading.current_thread() is threading.main_thread():
        free(*arguments)
    else:
        threading.Thread(target=free, args=arguments, name="free", daemon=True).start()


class StateReader:
    """The state of one version, while it is held.

    Of several hosts, `read` and its like bring a parameter together, so all hosts call them in the
    same order; what ends in `_into` reads what lies on this host.

    Attributes:
      version: steps done.
      shared: optimizer state that no parameter owns.
    """

    def __init__(
        self,
        store: HostStore,
        shared: Sequence[np.ndarray],
        version: int,
        ema_decay: float | None,
        gather: HostGather | None = None,
    ):
        self.version = version
        self.shared = list(shared)
        self._store = store
        self._ema_decay = ema_decay
        self._gather = gather

    def read(self, name: str) -> np.ndarray:
        """The fp32 master weights of a parameter, a fresh array of its shape."""
        if self._gather is None:
            return self._store.read(name)
        return self._gathered(name, np.float32, lambda *own: self._store.read_into(name, *own))

    def _gathered(
        self, name: str, dtype: Any, read_into: Callable[[int, np.ndarray], None]
    ) -> np.ndarray:
        """From all hosts: `read_into` is given where this one's elements begin, and an array."""
        assert self._gather is not None
        hosts = range(self._store.share.num_hosts)
        ranges = [self._store.owned(name, host) for host in hosts]
        own = ranges[self._store.share.index]
        values = np.empty(own.stop - own.start, dtype)
        if len(values):
            read_into(own.start, values)
        whole = self._gather.gather(values, [found.stop - found.start for found in ranges])
        return whole.reshape(self._store.shapes[name])

    def owned(self, name: str, host: int | None = None) -> slice:
        """Elements of a flattened parameter that lie on a host; None: on this one."""
        return self._store.owned(name, host)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Elements of the flattened parameter, from `start` on, as many as float32 `out`."""
        self._store.read_into(name, start, out)

    def read_state_into(self, name: str, number: int, start: int, out: np.ndarray) -> None:
        """Elements of the flattened state array, as `read_into`; not where it is not flat."""
        self._store.read_state_into(name, number, start, out)

    def read_rounded(
        self, name: str, rounding: WeightRounding, *, averaged: bool = False
    ) -> np.ndarray:
        """The weights of a parameter in bf16, a fresh array of its shape.

        With the trainer's own rounding, the very weights that its devices compute with in bf16.

        Args:
          name: of the parameter.
          rounding: how.
          averaged: the moving average instead.
        """
        if rounding == self._store.rounding and not averaged:
            if self._gather is None:
                return self._store.read_rounded(name)
            bf16 = ml_dtypes.bfloat16
            return self._gathered(
                name, bf16, lambda *own: self._store.read_rounded_into(name, *own)
            )
        values = self.read_average(name) if averaged else self.read(name)
        return rounded(values, rounding, name)

    def read_state(self, name: str, number: int) -> np.ndarray:
        """The `number`-th optimizer state array of a parameter, a fresh array."""
        if self._gather is None:
            return self._store.read_state(name, number)
        dtype = self._store.state_specs(name)[number].dtype
        return self._gathered(
            name, dtype, lambda *own: self._store.read_state_into(name, number, *own)
        )

    def state_specs(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each of them."""
        return self._store.state_specs(name)

    def read_average(self, name: str) -> np.ndarray:
        """Moving average of a parameter, float32; of a frozen one, the parameter.

        Raises:
          UserError: no average is kept.
        """
        if self._ema_decay is None:
            raise UserError("no average is kept; pass ema_decay, such as 0.999, to the Trainer")
        kept = len(self._store.state_specs(name))
        return self.read_state(name, kept - 1) if kept else self.read(name)


class StateWriter:
    """The state, to be written as a whole; what is not written stays."""

    def __init__(self, store: HostStore, ema_decay: float | None):
        self._store = store
        self._ema_decay = ema_decay
        self._finished: tuple[int, list[np.ndarray]] | None = None

    def write(self, name: str, values: np.ndarray) -> None:
        """Set a parameter's master weights."""
        self._store.write(name, values)

    def write_at(self, name: str, start: int, values: np.ndarray) -> None:
        """Set elements of the flattened parameter, from `start` on."""
        self._store.write_at(name, start, values)

    def write_state(self, name: str, number: int, values: np.ndarray) -> None:
        """Set the `number`-th optimizer state array of a parameter."""
        self._store.write_state(name, number, values)

    def write_state_at(self, name: str, number: int, start: int, values: np.ndarray) -> None:
        """Set elements of the flattened state array, from `start` on; not where it is not flat."""
        self._store.write_state_at(name, number, start, values)

    def state_specs(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each of them."""
        return self._store.state_specs(name)

    def swap_averages(self) -> None:
        """Exchange weights and moving averages, a chunk at a time, in every bit."""
        for layout in self._store.layouts:
            names = [slot.name for slot in layout.slots if self._store.state_specs(slot.name)]
            pairs = {}
            for name in names:
                place, own = len(self._store.state_specs(name)) - 1, self._store.owned(name)
                weights, average = (np.empty(own.stop - own.start, np.float32) for _ in range(2))
                self._store.read_into(name, own.start, weights)
                if name in self._store.whole_state:
                    average[:] = self._store.read_state(name, place).reshape(-1)
                else:
                    self._store.read_state_into(name, place, own.start, average)
                pairs[name] = place, own.start, weights, average
            for name, (place, start, weights, average) in pairs.items():
                self._store.write_at(name, start, average)
                if name in self._store.whole_state:
                    shape = self._store.shapes[name]
                    self._store.write_state(name, place, weights.reshape(shape))
                else:
                    self._store.write_state_at(name, place, start, weights)

    def finish(self, step: int, shared: Sequence[np.ndarray]) -> None:
        """Everything is written: it is the state after `step` steps, with `shared`."""
        self._finished = step, list(shared)

    @property
    def finished(self) -> tuple[int, list[np.ndarray]]:
        """Step and shared state that `finish` was given."""
        assert self._finished is not None, "the writer has not finished"
        return self._finished
