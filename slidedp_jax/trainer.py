"""The script API: one object that owns the host state and runs steps on it."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Cache, CachedFn, StreamedModel
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.process import current_setup
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.state.model_chunks import chunks_of, trained_shapes
from slidedp_jax.state.starting_state import (
    Parameters,
    ToBeRestored,
    check_host_devices,
    check_parameters,
    make_state,
)
from slidedp_jax.step.batch import PreparedBatch, prepare
from slidedp_jax.step.metrics import StepMetrics, mean_loss
from slidedp_jax.step.pipeline import GradientSink, Pipeline, StepOutputs
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.device_map import DeviceMap
from slidedp_jax.transfer.routes import DATA_AXIS, Gradient, GradientPath, weight_path
from slidedp_jax.transfer.weight_window import StreamedWeights, WeightSource
from slidedp_jax.transfer.wire_programs import WirePrograms
from slidedp_jax.update.kernel_form import KernelForm, check_form
from slidedp_jax.update.part_updates import PartUpdates
from slidedp_jax.update.step_guard import NonfinitePolicy, StepEnd, StepGuard
from slidedp_jax.update.treatments import Treatments
from slidedp_jax.update.update_thread import HostOptimizer, check_policy

_LOG = logging.getLogger(__name__)


_TO_RESTORE = (
    "the trainer was made with TO_BE_RESTORED and has no weights yet; restore a checkpoint first"
)
_HALF_RESTORED = (
    "restoring a checkpoint failed after everything had been judged, so the state is of neither "
    "step; restore a checkpoint again"
)


class Trainer:
    """Full-parameter training of a model whose state lives in host memory.

    Args:
      model: the decoder, `models.decoder.build(config)`, or a model of the user's own,
        `slidedp_jax.adapt(...).model`.
      optimizer: an optax transformation that updates each parameter by itself, without a global
        clip (`optax.adamw(1e-5)`); it sees the trained parameters as a flat dict from full name to
        array.
      strategy: chunking, routes and policies, as planned by `slidedp_jax.this_machine`.
      parameters: starting weights: a mapping from full name to array, a function that is called
        with `write(name, array)` and writes all of them, None for `model.initial_value`, or
        `slidedp_jax.TO_BE_RESTORED` where a checkpoint is restored next.
      frozen: shell-style patterns of full names (`model.embed_tokens.*`); these parameters stay as
        they are and have no gradients, no optimizer state and no part in the norm.
      ema_decay: keep a moving average of the weights in host memory, 4 bytes per parameter
        (`slidedp_jax.update.average`); None for none.
      seed: of the starting weights where `parameters` is None, and of dropout.
      max_grad_norm: limit of the global gradient norm, exact; None for none.
      on_nonfinite: "stop" at a step with a non-finite gradient norm, or "skip" it.
      max_loss: steps with a larger loss are treated in the same way; None for no limit.
      max_consecutive_skips: bad steps in a row that are skipped; the next one stops training.
      documents_per_row: most documents that any packed row will hold; fewer than occur costs
        compilations, not correctness.
      kernel_form: form of the update kernel (`update.kernel_form`), which decides the last bit of
        results; None: the one known to be fastest, and a restored checkpoint's.
      num_devices: compute devices to use, the first ones of this process; None means all.
      inference_only: `step` will not be called, so no memory is page-locked for gradients.
      tracer: takes note of what each lane does.

    Raises:
      UserError: the update of a parameter depends on others, a pattern of `frozen` fits nothing, or
        the strategy does not fit the devices.
      RuntimeError: `slidedp_jax.configure()` has not been called.
    """

    def __init__(
        self,
        model: StreamedModel,
        optimizer: optax.GradientTransformation,
        *,
        strategy: Strategy,
        parameters: Parameters | None = None,
        frozen: Sequence[str] = (),
        ema_decay: float | None = None,
        seed: int = 0,
        max_grad_norm: float | None = 1.0,
        on_nonfinite: NonfinitePolicy = "stop",
        max_loss: float | None = None,
        max_consecutive_skips: int = 10,
        documents_per_row: int = 1,
        kernel_form: KernelForm | None = None,
        num_devices: int | None = None,
        inference_only: bool = False,
        tracer: Tracer | None = None,
    ):
        self.strategy = strategy
        self.model = model
        self.step_count = 0
        guard = StepGuard(
            on_nonfinite=on_nonfinite,
            max_loss=max_loss,
            max_consecutive_skips=max_consecutive_skips,
        )
        check_policy(strategy.update_policy, max_grad_norm, guard)
        check_parameters(parameters)
        check_form(kernel_form)
        self._closed = False
        self._lacking = _TO_RESTORE if isinstance(parameters, ToBeRestored) else ""
        self._inference_only = inference_only
        self._documents_per_row = documents_per_row
        self._seed = seed
        self._tracer = tracer or Tracer()
        devices, host_devices = current_setup().devices()
        self._devices = _first(devices, num_devices)
        check_host_devices(strategy, len(host_devices), len(self._devices))
        self._mesh = Mesh(
            np.array(self._devices), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
        )
        self._device_sharding = NamedSharding(self._mesh, PartitionSpec(DATA_AXIS))
        treatments = Treatments(optimizer, trained_shapes(model, frozen), ema_decay=ema_decay)
        self.ema_decay = ema_decay
        _warn_of_whole_parameters(treatments)
        layouts, layer_fns = chunks_of(
            model,
            strategy,
            groups=treatments.groups,
            kinds=treatments.kinds,
            whole=treatments.whole_parameters,
        )
        frozen_chunks = [n for n, layout in enumerate(layouts) if not layout.trained_parts]
        self._fences = Fences(len(layouts), frozen=frozen_chunks)
        self.store = make_state(
            model,
            layouts,
            [optimizer.state_dtypes for optimizer in treatments.optimizers],
            strategy,
            host_devices[: strategy.num_host_devices],
            self._device_sharding,
            parameters=parameters,
            seed=seed,
            for_training=not inference_only,
        )
        try:
            self._start_updates(treatments, kernel_form)
            self._make_pipeline(layouts, layer_fns)
            self._updates = HostOptimizer(
                self.store,
                self._fences,
                self._part_updates,
                treatments.initial_shared(),
                policy=strategy.update_policy,
                max_grad_norm=max_grad_norm,
                guard=guard,
                sums_on_host=self._gradients.sums_on_host,
                tracer=self._tracer,
            )
        except BaseException:
            self.store.close()
            raise
        # A trainer that is dropped without `close` leaves neither thread nor page locks behind.
        self._free = weakref.finalize(self, _free, self._updates, self.store)
        self._free.atexit = False

    def _start_updates(self, treatments: Treatments, kernel_form: KernelForm | None) -> None:
        """The compiled updates; every part's optimizer state is initialised."""
        self.optimizer_state = treatments.state
        self._form_is_stated = kernel_form is not None
        self._part_updates = PartUpdates(
            treatments,
            self.store,
            device_sharding=self._device_sharding,
            block_size=self.strategy.block_size,
            form=kernel_form,
        )
        for part in self.store.parts:
            self._part_updates.init(part)

    def _make_pipeline(self, layouts: Sequence[ChunkLayout], layer_fns: Sequence[Any]) -> None:
        """What moves weights and gradients, and the programs and order of the devices' work."""
        strategy, dtype = self.strategy, jnp.dtype(self.strategy.compute_dtype)
        route = weight_path(strategy.weight_route, self._mesh)
        self._gradients = GradientPath(
            strategy.gradient_route, self._mesh, self.store.sharding, dtype
        )
        on_devices = DeviceMap(self._mesh, dtype)
        wire = WirePrograms(on_devices, route, self._gradients)
        self._programs = ComputePrograms(
            self.model,
            on_devices,
            wire,
            loss_chunk_tokens=strategy.loss_chunk_tokens,
            embed_trained=layouts[0].trained,
            head_trained=layouts[-1].trained,
        )
        self.weights = StreamedWeights(
            self.store,
            self._fences,
            route,
            wire.unpack,
            with_low=strategy.compute_dtype == "float32",
            tracer=self._tracer,
        )
        self._pipeline = Pipeline(
            layouts,
            layer_fns,
            tied=self.model.tied,
            programs=self._programs,
            prefetch_depth=strategy.prefetch_depth,
            kept_chunks=strategy.kept_chunks,
            sums_beside=self._gradients.sums_on_devices,
            tracer=self._tracer,
        )

    def step(self, batch: Mapping[str, np.ndarray]) -> StepMetrics:
        """One optimizer step on a batch of rows (see `slidedp_jax.step.batch`).

        Returns as soon as everything has been issued; updates run on beside the next step.

        Raises:
          UserError: the batch does not fit the model or has more rows than the strategy was planned
            for, or the trainer is for inference only.
          TrainingStopped: an update failed or a gradient was not finite.
        """
        if self._inference_only:
            raise UserError("the trainer was made with inference_only=True, so it cannot train")
        prepared = self.prepare(batch, training=True)
        step = self.step_count + 1
        self.weights.require(self.step_count)
        try:  # until its end is handed over, nothing but a failure would end the step's updates
            outputs = self.forward_backward(
                self.weights,
                prepared,
                lambda chunk, wires: self._updates.submit(step, chunk, self.send(chunk, wires)),
            )
            loss = functools.partial(mean_loss, outputs.losses, prepared.num_supervised)
            end = StepEnd(squares=outputs.squares, loss=loss, row_ids=prepared.row_ids)
            self.step_count = step
            update = self._updates.end_backward(step, end)
        except BaseException as error:
            self._fences.fail(error)
            raise
        return StepMetrics(
            step=step,
            losses=outputs.losses,
            num_supervised=prepared.num_supervised,
            num_tokens=prepared.num_tokens,
            update=update,
        )

    def forward_backward(
        self, weights: WeightSource, prepared: PreparedBatch, sink: GradientSink
    ) -> StepOutputs:
        """One pass without an update: weights from `weights`, gradients to `sink`."""
        assert len(prepared.microbatches) <= self.strategy.num_microbatches
        microbatches = self._place(prepared.microbatches)
        return self._pipeline.step(
            weights, microbatches, self._scalar(1 / prepared.num_supervised), sink
        )

    def send(self, chunk: int, wires: Sequence[jax.Array]) -> Gradient:
        """Start the copy of a chunk's gradient to the host."""
        return self._gradients.send(wires, self.store.layouts[chunk])

    def evaluate(self, batch: Mapping[str, np.ndarray]) -> tuple[float, int]:
        """Mean loss of a batch's supervised tokens under the current weights, and their number.

        Any number of rows: as many as the strategy was planned for pass the model at a time. If it
        fails or is interrupted, the trainer is as it was.
        """
        prepared, at_once = self.prepare(batch), self.strategy.num_microbatches
        losses: list[jax.Array] = []
        with self._reading_weights():
            for first in range(0, len(prepared.microbatches), at_once):
                some = self._place(prepared.microbatches[first : first + at_once])
                losses += self._pipeline.losses(self.weights, some)
        return mean_loss(losses, prepared.num_supervised), prepared.num_supervised

    @contextlib.contextmanager
    def _reading_weights(self) -> Iterator[None]:
        """A pass under the current weights that changes nothing, not even when it fails."""
        self.require_weights()
        self.weights.require(self.step_count)
        try:
            yield
        except BaseException:
            self.weights.abandon()
            raise

    def next_logits(
        self,
        layer_fns: Sequence[CachedFn],
        batch: Mapping[str, np.ndarray],
        last: np.ndarray,
        caches: list[Cache],
    ) -> np.ndarray:
        """One pass of generation under the current weights; see `slidedp_jax.generate`.

        Args:
          layer_fns: `prefill_fns` or `decode_fns` of the model's cached form.
          batch: what those read and `input_ids`, arrays [R, ...], R a multiple of the devices.
          last: index in `batch` of each row's last token, int32 [R].
          caches: from `init_caches`; replaced by what the pass leaves.

        Returns:
          Logits of the token after the last one, float32 [R, V].
        """
        rows = NamedSharding(self._mesh, PartitionSpec(DATA_AXIS))
        with self._reading_weights():
            batch, last = jax.device_put((dict(batch), last), rows)
            logits = self._pipeline.next_logits(self.weights, layer_fns, batch, last, caches)
        return np.asarray(logits)

    def init_caches(self, num_rows: int, capacity: int) -> list[Cache]:
        """Empty caches of all layers, rows spread over the compute devices."""
        assert self.model.cached is not None
        rows = NamedSharding(self._mesh, PartitionSpec(DATA_AXIS))
        # The same function object every time, so it is compiled once per size.
        make = jax.jit(self.model.cached.init_cache, static_argnums=(0, 1, 2), out_shardings=rows)
        dtype = self._programs.compute_dtype
        return [make(num_rows, capacity, dtype) for _ in self.model.layers]

    @property
    def num_devices(self) -> int:
        """Compute devices in use."""
        return len(self._devices)

    def parameters(self) -> dict[str, np.ndarray]:
        """All master weights, float32 copies by full name; waits for pending updates."""
        self.require_weights()
        self.wait()
        return {name: self.store.read(name) for name in self.store.parameter_names}

    def read_average(self, name: str) -> np.ndarray:
        """Moving average of a parameter, float32; of a frozen one, the parameter.

        Pending updates must have been waited for. Raises UserError without `ema_decay`.
        """
        if self.ema_decay is None:
            raise UserError("no average is kept; pass ema_decay, such as 0.999, to the Trainer")
        kept = len(self.store.state_specs(name))
        return self.store.read_state(name, kept - 1) if kept else self.store.read(name)

    def averaged_parameters(self) -> dict[str, np.ndarray]:
        """Moving averages of all parameters, as `parameters`."""
        self.wait()
        return {name: self.read_average(name) for name in self.store.parameter_names}

    @property
    def shared_optimizer_state(self) -> list[np.ndarray]:
        """Optimizer state that no parameter owns (step counts), after all committed updates."""
        return list(self._updates.shared)

    def resume_at(self, step: int, shared: Sequence[np.ndarray]) -> None:
        """Declare that the store now holds the state after `step` steps (a restored checkpoint)."""
        self.wait()
        self._updates.resume(shared)
        self._fences.reset(step)
        self.step_count = step
        self._lacking = ""

    @contextlib.contextmanager
    def replacing_state(self) -> Iterator[None]:
        """For whoever writes all of the state; unless that ends well, there are no weights."""
        self.wait()
        self._lacking = self._lacking or _HALF_RESTORED
        yield
        self._lacking = ""

    @property
    def kernel_form(self) -> KernelForm:
        """Form of the update kernel in use."""
        return self._part_updates.form

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

    def wait(self) -> None:
        """Block until every update of the steps so far is committed."""
        self._check_open()
        for chunk in range(len(self._fences)):
            self._fences.wait_committed(chunk, self.step_count)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("the trainer is closed, and its host state with it")

    def require_weights(self) -> None:
        """Raise unless there is a state to use.

        Raises:
          UserError: the trainer is closed, or a checkpoint has to be restored first.
        """
        self._check_open()
        if self._lacking:
            raise UserError(self._lacking)

    @property
    def holds_weights(self) -> bool:
        """Whether there are weights, which a failed restore would lose."""
        return not self._lacking

    def close(self) -> None:
        """Finish pending updates, end the update thread and free the host state."""
        self._closed = True
        self._free()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, batch: Mapping[str, np.ndarray], *, training: bool = False) -> PreparedBatch:
        """Validate a batch and split it into this trainer's microbatches.

        For training there may be no more than the strategy was planned for, and the rows of a model
        that draws random numbers carry the next step's seeds.
        """
        self.require_weights()
        draws = training and self.model.random
        return prepare(
            batch,
            vocab_size=self.model.vocab_size,
            num_devices=len(self._devices),
            rows_per_microbatch=self.strategy.rows_per_microbatch,
            most_microbatches=self.strategy.num_microbatches if training else None,
            documents_per_row=self._documents_per_row,
            seed_and_step=(self._seed, self.step_count + 1) if draws else None,
            token_arrays=self.model.token_arrays,
        )

    def _place(self, microbatches: Sequence[Mapping[str, Any]]) -> list[dict[str, jax.Array]]:
        rows = NamedSharding(self._mesh, PartitionSpec(DATA_AXIS))
        return [jax.device_put(arrays, rows) for arrays in microbatches]

    def _scalar(self, value: float) -> jax.Array:
        return jax.device_put(np.float32(value), NamedSharding(self._mesh, PartitionSpec()))


def _free(updates: HostOptimizer, store: HostStore) -> None:
    updates.close()
    store.close()


def _warn_of_whole_parameters(treatments: Treatments) -> None:
    if whole := treatments.whole_parameters:
        _LOG.warning(
            "%d of %d parameters (such as %s) are updated as a whole on the host, because the "
            "optimizer is not element-wise; that is much slower than AdamW",
            len(whole),
            len(treatments.kinds),
            whole[0],
        )


def _first(devices: list[jax.Device], count: int | None) -> list[jax.Device]:
    if count is not None and not 1 <= count <= len(devices):
        raise UserError(
            f"num_devices={count}, but this process was configured for {len(devices)} compute "
            "devices; pass a number from 1 to that, or configure more"
        )
    return devices[:count]
