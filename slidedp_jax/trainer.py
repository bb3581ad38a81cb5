"""The script API: one object that owns the host state and runs steps on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from slidedp_jax import host_watch
from slidedp_jax.assembly import Settings, StepPrograms, assemble, step_programs
from slidedp_jax.checkpoint.save_beside import SaveBeside, SaveMemory
from slidedp_jax.checkpoint.save_restore import (
    Restored,
    newest,
    restore,
    save,
    save_beside,
)
from slidedp_jax.checkpoint.save_together import Together, save_together
from slidedp_jax.errors import UserError
from slidedp_jax.hosts import Hosts
from slidedp_jax.models.streamed import StreamedModel
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.process import current_setup
from slidedp_jax.state.model_chunks import trained_shapes
from slidedp_jax.state.starting_state import Parameters, check_parameters
from slidedp_jax.state.weight_rounding import (
    DEFAULT_ROUNDING,
    Rounding,
    WeightRounding,
    check_rounding,
)
from slidedp_jax.step.metrics import StepMetrics, hosts_differ, loss_sum, mean_loss
from slidedp_jax.step.passes import Passes
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.routes import SentSlices, gradients_by_name
from slidedp_jax.update.kernel_form import KernelForm, check_form
from slidedp_jax.update.other_weights import other_weights
from slidedp_jax.update.state_gate import free_dropped
from slidedp_jax.update.state_meaning import numbered
from slidedp_jax.update.step_guard import NonfinitePolicy, StepEnd, StepGuard
from slidedp_jax.update.treatments import Treatments
from slidedp_jax.update.update_thread import check_policy

_LOG = logging.getLogger(__name__)

SAME_SCRIPT = "All hosts run the same script with the same settings"


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
      weight_rounding: how fp32 masters become the bf16 weights that compute. "dither" rounds each
        up or down by a fixed threshold of its own, so that steps far below a bf16 digit count at
        once; "nearest" as mixed precision elsewhere (`state.weight_rounding`). None: "dither", and
        a restored checkpoint's. A checkpoint holds masters: with another one stated, training goes
        on from it with that. In fp32 compute it decides exports alone.
      seed: of the starting weights where `parameters` is None, of dropout, and of the dither; there
        a restored checkpoint's.
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
      programs: what `make_step_programs` has made of the same model, optimizer and strategy, for
        this trainer alone: what has been compiled of them is not compiled again. None: made here.
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
        weight_rounding: Rounding | None = None,
        seed: int = 0,
        max_grad_norm: float | None = 1.0,
        on_nonfinite: NonfinitePolicy = "stop",
        max_loss: float | None = None,
        max_consecutive_skips: int = 10,
        documents_per_row: int = 1,
        kernel_form: KernelForm | None = None,
        num_devices: int | None = None,
        inference_only: bool = False,
        programs: StepPrograms | None = None,
        tracer: Tracer | None = None,
    ):
        guard = StepGuard(
            on_nonfinite=on_nonfinite,
            max_loss=max_loss,
            max_consecutive_skips=max_consecutive_skips,
        )
        check_policy(strategy.update_policy, max_grad_norm, guard)
        check_parameters(parameters)
        check_form(kernel_form)
        if weight_rounding is not None:
            check_rounding(weight_rounding)
        self.model = model
        self.strategy = strategy
        self._inference_only = inference_only
        self._saving: SaveBeside | None = None
        self._tracer = tracer or Tracer()
        self.seed = seed
        devices, host_devices = current_setup().devices()
        self._hosts = current_setup().hosts
        _check_hosts(self._hosts, strategy, num_devices)
        self._devices = _first(devices, num_devices)
        if programs is None:
            programs = make_step_programs(
                model,
                optimizer,
                strategy=strategy,
                frozen=frozen,
                ema_decay=ema_decay,
                num_devices=num_devices,
            )
        else:
            _check_made_for(
                programs, model, strategy, self._devices, _given(optimizer, frozen, ema_decay)
            )
        programs.taken.append(True)
        _warn_of_whole_parameters(programs.treatments)
        settings = Settings(
            parameters=parameters,
            rounding=WeightRounding.of(weight_rounding or DEFAULT_ROUNDING, seed),
            rounding_is_stated=weight_rounding is not None,
            seed=seed,
            max_grad_norm=max_grad_norm,
            guard=guard,
            kernel_form=kernel_form,
            ema_decay=ema_decay,
            inference_only=inference_only,
            tracer=self._tracer,
        )
        if self._hosts.num_hosts > 1:
            stated = {
                "strategy": strategy,
                "ema_decay": ema_decay,
                "weight_rounding": weight_rounding,
                "seed": seed,
                "max_grad_norm": max_grad_norm,
                "on_nonfinite": on_nonfinite,
                "max_loss": max_loss,
                "max_consecutive_skips": max_consecutive_skips,
                "documents_per_row": documents_per_row,
                "kernel_form": kernel_form,
            }
            _check_alike(model, programs.treatments, stated)
        parts = assemble(programs, host_devices, settings)
        self.store, self.weights, self.gate = parts.store, parts.weights, parts.gate
        self._save_memory = SaveMemory(self.store.owned_bytes)
        self._fences, self._updates, self._gradients = parts.fences, parts.updates, parts.gradients
        self._programs, self._pipeline = parts.programs, parts.pipeline
        self.passes = Passes(
            model,
            strategy,
            seed=seed,
            documents_per_row=documents_per_row,
            mesh=parts.mesh,
            gate=parts.gate,
            weights=parts.weights,
            pipeline=parts.pipeline,
            programs=parts.programs,
            gradients=parts.gradients,
            layouts=parts.store.layouts,
        )
        # A trainer that is dropped without `close` leaves neither thread nor page locks behind.
        self._dropped = weakref.finalize(
            self, free_dropped, parts.updates, parts.weights, parts.store, parts.fences
        )
        self._dropped.atexit = False

    def step(self, batch: Mapping[str, np.ndarray], *, stop: bool = False) -> StepMetrics:
        """One optimizer step on a batch of rows (see `slidedp_jax.step.batch`).

        Of several hosts, each is given the same batch, whole, and takes its devices' rows. `stop`
        says to all of them that this one was asked to stop (`StepMetrics.stop`).

        Returns as soon as everything has been issued; updates run on beside the next step.

        Raises:
          UserError: the batch does not fit the model or has more rows than the strategy was planned
            for, or the trainer is for inference only.
          TrainingStopped: an update failed or a gradient was not finite.
          OSError: a save beside the steps has failed; said once, and no step was taken.
        """
        self._check_may_train()
        if self._saving is not None:
            self._saving.say_failure()
        with self.gate.turn:
            self.gate.check_own()
            prepared = self.passes.prepare(batch, training=True)
            step = self.gate.version + 1
            self.weights.require(self.gate.version)
            try:  # until its end is handed over, only a failure would end the step's updates
                outputs = self.passes.forward_backward(
                    self.weights,
                    prepared,
                    lambda chunk, wires: self._updates.submit(
                        step, chunk, self.passes.send(chunk, wires)
                    ),
                    stop=stop,
                )
                loss = functools.partial(mean_loss, outputs.losses, prepared.num_supervised)
                end = StepEnd(squares=outputs.squares, loss=loss, row_ids=prepared.row_ids)
                if outputs.flags is not None:
                    differ = functools.partial(hosts_differ, outputs.flags)
                    end = dataclasses.replace(end, hosts_differ=differ)
                self.gate.version = step
                update = self._updates.end_backward(step, end)
            except BaseException as error:
                self._fences.fail(error)
                raise
        return StepMetrics(
            step=step,
            losses=outputs.losses,
            aux=outputs.aux,
            figures=outputs.figures,
            num_supervised=prepared.num_supervised,
            num_tokens=prepared.num_tokens,
            update=update,
            flags=outputs.flags,
        )

    def gradients(
        self, batch: Mapping[str, np.ndarray], names: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Gradients of a batch's mean loss under the current weights, before any clip.

        They are what `step` would get from this batch, and change nothing.

        Args:
          batch: as for `step`; a model that draws random numbers draws those of the next step.
          names: full names; None: all trained parameters, 4 bytes of host memory each.

        Returns:
          float32 arrays by full name.

        Raises:
          UserError: the batch does not fit, or a name is no trained parameter's.
        """
        self._check_may_train()
        self._check_single_host("gradients")
        wanted = None if names is None else set(names)
        found: dict[str, np.ndarray] = {}

        def sink(chunk: int, wires: Sequence[jax.Array | SentSlices]) -> None:
            gradient = self.passes.send(chunk, wires)
            gradient.wait()
            for name, values in gradients_by_name(self.store.layouts[chunk], gradient).items():
                if wanted is None or name in wanted:
                    found[name] = values.copy()

        trained = {
            slot.name
            for layout in self.store.layouts
            for part in layout.trained_parts
            for slot in part.slots
        }
        if unknown := sorted((wanted or set()) - trained):
            raise UserError(
                f"{unknown[:5]} are no trained parameters; names are like {min(trained)}"
            )
        with self.gate.passing(self.weights):
            prepared = self.passes.prepare(batch, training=True)
            self.passes.forward_backward(self.weights, prepared, sink)
        return found

    def evaluate(
        self, batches: Mapping[str, np.ndarray] | Iterable[Mapping[str, np.ndarray]]
    ) -> tuple[float, int]:
        """Mean loss of the supervised tokens under the current weights, and their number.

        What is computed is what a step computes, by the same programs: as `StepMetrics.loss`, the
        mean has the layers' own losses in it, if any, and a step's batch gives that step's loss
        (but for random numbers: none are drawn here).

        Args:
          batches: one batch, or several, over all of which each token weighs the same. Any number
            of rows: as many as the strategy was planned for pass the model at a time.

        Raises:
          UserError: a batch does not fit the model, or there is none. The trainer is as it was, as
            after any failure or interrupt.
        """
        total, count = 0.0, 0
        with self.gate.turn:
            self.gate.check()
            for batch in [batches] if isinstance(batches, Mapping) else batches:
                with self.gate.passing(self.weights):
                    prepared = self.passes.prepare(batch)
                    losses = self.passes.losses(prepared)
                total, count = total + loss_sum(losses), count + prepared.num_supervised
        if not count:
            raise UserError("there is nothing to evaluate: no batch was given")
        return total / count, count

    @property
    def num_devices(self) -> int:
        """Compute devices in use."""
        return len(self._devices)

    @property
    def step_count(self) -> int:
        """Optimizer steps done, those of a restored checkpoint included."""
        return self.gate.version

    @property
    def kernel_form(self) -> KernelForm:
        """Form of the update kernel in use."""
        return self.gate.kernel_form

    @property
    def weight_rounding(self) -> WeightRounding:
        """How masters become the weights that compute."""
        return self.gate.rounding

    @property
    def hyperparameters(self) -> dict[str, float]:
        """What `optax.inject_hyperparams` keeps, by name (`learning_rate`), schedules' left out."""
        with self.gate.reading() as reader:
            places = self.gate.meaning.hyperparameters
            return {name: float(reader.shared[place]) for name, place in places.items()}

    def set_hyperparameters(self, **values: float) -> None:
        """Change hyperparameters from the next step on; pending updates are waited for.

        Names that have a label in front (`fast.learning_rate`, of `multi_transform`) are given as
        `**{"fast.learning_rate": 1e-5}`. What changes by a rule is better an optax schedule, which
        waits for nothing.

        Raises:
          UserError: the optimizer keeps no such hyperparameter, or a schedule sets it.
        """
        host_watch.agree_on(
            {name: repr(float(value)) for name, value in values.items()}, advice=SAME_SCRIPT
        )
        self.gate.set_hyperparameters(values)

    def optimizer_state(self, name: str) -> dict[str, np.ndarray]:
        """A parameter's optimizer state by what it is (`ScaleByAdamState.mu`), fresh arrays.

        Waits for pending updates. Several arrays of one meaning are numbered: `mu[0]`, `mu[1]`.

        Raises:
          UserError: there is no such parameter.
        """
        with self.gate.reading() as reader:
            if name not in self.gate.shapes:
                raise UserError(
                    f"no parameter {name!r}; names are like {self.gate.parameter_names[0]}"
                )
            meanings = self.gate.meaning.names.get(name, ())
            return {
                key: reader.read_state(name, number)
                for number, key in enumerate(numbered(meanings[: len(reader.state_specs(name))]))
            }

    def evaluating(
        self, weights: Mapping[str, np.ndarray] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Other weights in the trained ones' place, for `evaluate`, `generate` and `parameters`.

            with trainer.evaluating():
                loss, _ = trainer.evaluate(batch)

        Afterwards the trained weights are back, in every bit; meanwhile there is no step and no
        checkpoint. Each way takes a pass over the host state.

        Args:
          weights: arrays by full name, for any of the parameters, such as what
            `optax.contrib.schedule_free_eval_params` would give; those that they replace are kept
            in host memory, 4 bytes each. None: the moving averages of all (`ema_decay`), which
            change places with the weights and take no memory.

        Raises:
          UserError: the weights do not fit, or no average is kept.
        """
        return other_weights(self.gate, weights)

    def parameters(self) -> dict[str, np.ndarray]:
        """All master weights, float32 copies by full name; waits for pending updates."""
        with self.gate.reading() as reader:
            return {name: reader.read(name) for name in self.gate.parameter_names}

    def averaged_parameters(self) -> dict[str, np.ndarray]:
        """Moving averages of all parameters, as `parameters`; needs `ema_decay`."""
        with self.gate.reading() as reader:
            return {name: reader.read_average(name) for name in self.gate.parameter_names}

    def save(
        self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
    ) -> pathlib.Path:
        """Write a checkpoint `folder/step_N`; pending updates are waited for.

        Several hosts call it together, with one folder that all of them see.

        Args:
          folder: where checkpoints live; made if absent.
          extra: JSON-able values to keep beside the state, which `restore` returns.

        Returns:
          The checkpoint's folder. One that holds this very state is left as it is.

        Raises:
          UserError: there is a checkpoint of another state with the same number of steps.
          OSError: the file system refuses; no `step_N` is left behind.
        """
        self.gate.check_own()
        self.finish_save()
        if (together := self.together) is not None:
            return save_together(self.gate, self.model, pathlib.Path(folder), extra or {}, together)
        return save(self.gate, self.model, pathlib.Path(folder), extra or {})

    def save_beside(
        self,
        folder: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        buffer_bytes: int | None = None,
    ) -> SaveBeside:
        """Begin to write a checkpoint `folder/step_N` of this step while later steps go on.

        It is the checkpoint that `save` would write, in every bit. Each chunk is copied when its
        update is committed, and written behind that; what does not fit the buffer is copied as the
        disk takes the rest, and its next update waits. With S bytes of state, a buffer of B and a
        disk that takes R per second, steps of t seconds are held up for (S - B) / R - t in all
        (`planner.disk.stall_s`, which counts copying as well). A save that is under way is waited
        for first.

        Args:
          folder: where checkpoints live; made if absent.
          extra: JSON-able values to keep beside the state, which `restore` returns.
          buffer_bytes: most host memory for what has been copied and is not written yet, 512 MiB
            at least; None: what `prepare_save` was told, or four fifths of what is free.

        Returns:
          The save; its `result()` waits for it. If it fails, the next `step`, `save` or `close`
          says so.

        Raises:
          UserError: there is a checkpoint of another state with the same number of steps.
          OSError: the save before this one has failed, which nobody was told.
        """
        self._check_single_host("save_beside")
        self.gate.check_own()
        self.finish_save()
        self._saving = save_beside(
            self.gate,
            self.model,
            pathlib.Path(folder),
            extra or {},
            buffer=self._save_memory.take(buffer_bytes),
            tracer=self._tracer,
        )
        return self._saving

    def prepare_save(self, *, buffer_bytes: int | None = None) -> None:
        """Have the memory of the next `save_beside` found while steps go on, if time allows.

        The first touch of memory takes longer than copying into it, for which updates would wait.
        Worth calling some seconds before a save (a second per GB of state).

        Args:
          buffer_bytes: as `save_beside` will be given.

        Raises:
          UserError, TrainingStopped: there is nothing to save.
        """
        self._check_single_host("prepare_save")
        self.gate.check()
        self._save_memory.make_ahead(buffer_bytes)

    def finish_save(self) -> None:
        """Wait for a save beside the steps, if there is one.

        Raises:
          OSError: it has failed, which nobody was told.
          TrainingStopped: so it has, by a step that failed.
        """
        if self._saving is not None:
            self._saving.wait()
            self._saving.say_failure()

    def restore(self, folder: str | os.PathLike[str]) -> Restored:
        """Go on from a checkpoint, whatever devices and chunking it was saved with.

        Everything is judged before anything is changed. Several hosts call it together.

        Args:
          folder: a checkpoint `step_N`, or a folder of them: then the newest.

        Raises:
          UserError: there is none, it is damaged, or of another model or optimizer.
        """
        self.gate.check_open()
        self.gate.check_own()
        if self._saving is not None:
            self._saving.wait()
        if (together := self.together) is not None:
            return self._restore_together(pathlib.Path(folder), together)
        return restore(self.gate, self.model, newest(pathlib.Path(folder)))

    def _restore_together(self, folder: pathlib.Path, together: Together) -> Restored:
        """Every host reads all of the checkpoint, and keeps its share."""
        found: list[Restored] = []

        def read() -> str:
            found.append(restore(self.gate, self.model, newest(folder)))
            return str(found[0].step)

        steps = together.each(read)
        if len(set(steps)) > 1:
            raise UserError(
                f"hosts have restored other steps than each other ({', '.join(steps)}) from "
                f"{folder}: it must be one folder that all of them see"
            )
        return found[0]

    @property
    def together(self) -> Together | None:
        """What several hosts do together; None for a single one."""
        watch = host_watch.watch()
        if self._hosts.num_hosts == 1 or watch is None:
            return None
        return Together(watch=watch, is_first=self._hosts.is_first)

    def wait(self) -> None:
        """Block until every update of the steps so far is committed."""
        self.gate.wait()

    def close(self) -> None:
        """Finish pending updates and saves, end the update thread and free the host state.

        Raises:
          OSError: a save beside the steps has failed, which nobody was told.
          TrainingStopped: so it has, by a step that failed.
        """
        self.gate.close(self.weights)
        self._dropped.detach()
        self._save_memory.drop()
        self.finish_save()

    def __enter__(self) -> Trainer:
        self.gate.check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:  # any, since another may be on its way
            if kind is None:
                raise
            _LOG.error("a checkpoint was not written: %s", error)  # the other error is on its way

    def _check_single_host(self, what: str) -> None:
        if self._hosts.num_hosts > 1:
            raise UserError(
                f"{what} is for a single host as yet, and this run has {self._hosts.num_hosts}"
            )

    def _check_may_train(self) -> None:
        self.gate.check_open()
        if self._inference_only:
            raise UserError("the trainer was made with inference_only=True, so it cannot train")


def make_step_programs(
    model: StreamedModel,
    optimizer: optax.GradientTransformation,
    *,
    strategy: Strategy,
    frozen: Sequence[str] = (),
    ema_decay: float | None = None,
    num_devices: int | None = None,
) -> StepPrograms:
    """What a trainer's steps will run on the devices, before there is any state.

    Args:
      model: as for `Trainer`, and so on.
      optimizer: the same.
      strategy: the same.
      frozen: the same.
      ema_decay: the same.
      num_devices: the same.

    Raises:
      UserError: as `Trainer`, for all that its weights have no part in.
    """
    devices, host_devices = current_setup().devices()
    treatments = Treatments(optimizer, trained_shapes(model, frozen), ema_decay=ema_decay)
    return step_programs(
        model,
        treatments,
        strategy,
        _first(devices, num_devices),
        host_devices,
        _given(optimizer, frozen, ema_decay),
    )


def _given(
    optimizer: optax.GradientTransformation, frozen: Sequence[str], ema_decay: float | None
) -> tuple[Any, ...]:
    """What treatments are made of."""
    return optimizer, tuple(frozen), ema_decay


def _check_made_for(
    programs: StepPrograms,
    model: StreamedModel,
    strategy: Strategy,
    devices: Sequence[jax.Device],
    given: tuple[Any, ...],
) -> None:
    if programs.taken:
        raise UserError("another trainer runs these programs; make some for each")
    for what, same in (
        ("model", programs.model is model),
        ("strategy", programs.strategy == strategy),
        ("optimizer, frozen or ema_decay", programs.given == given),
        ("devices", list(programs.mesh.devices.flat) == list(devices)),
    ):
        if not same:
            raise UserError(
                f"the programs were made for other {what} than the trainer's; give "
                "make_step_programs what the trainer is given"
            )


def _warn_of_whole_parameters(treatments: Treatments) -> None:
    if whole := treatments.whole_parameters:
        _LOG.warning(
            "%d of %d parameters (such as %s) are updated as a whole on the host, because the "
            "optimizer is not element-wise; that is much slower than AdamW",
            len(whole),
            len(treatments.kinds),
            whole[0],
        )


def _check_alike(model: StreamedModel, treatments: Treatments, stated: Mapping[str, Any]) -> None:
    """Whether all hosts make the same trainer; of starting weights each reads its own."""
    found = {name: repr(value) for name, value in stated.items()}
    found |= {
        "the model's configuration": repr(model.configuration),
        "frozen": repr(sorted(treatments.kinds)),
        "the optimizer": treatments.text(),
    }
    host_watch.agree_on(found, advice=SAME_SCRIPT)


def _check_hosts(hosts: Hosts, strategy: Strategy, num_devices: int | None) -> None:
    if strategy.num_hosts != hosts.num_hosts:
        raise UserError(
            f"the strategy is for {strategy.num_hosts} hosts, and this process is one of "
            f"{hosts.num_hosts} ({hosts.found_in}); plan again, or start as many"
        )
    if hosts.num_hosts > 1 and num_devices is not None:
        raise UserError(
            f"num_devices={num_devices} with {hosts.num_hosts} hosts; state it in configure(), for "
            "each of them"
        )


def _first(devices: list[jax.Device], count: int | None) -> list[jax.Device]:
    if count is not None and not 1 <= count <= len(devices):
        raise UserError(
            f"num_devices={count}, but this process was configured for {len(devices)} compute "
            "devices; pass a number from 1 to that, or configure more"
        )
    return devices[:count]
