"""One run of the training command, with everything checked: load, train, save, export, report."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import slidedp_jax
from slidedp_jax.checkpoint.record import ROUNDING
from slidedp_jax.interrupts import EXIT_AGAIN, StopAtSignal
from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.report import plan_as_dict
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.process import current_setup
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.changes import starts
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.compiled import Parts, check_record
from slidedp_jax.run.disk import RunDisk
from slidedp_jax.run.evaluations import (
    Measure,
    evaluated,
    has_evaluation,
    loss_terms,
    skipped_text,
)
from slidedp_jax.run.expert_products import expert_products
from slidedp_jax.run.export import export_run, export_text
from slidedp_jax.run.folder import RunFolder
from slidedp_jax.run.forecast import Forecast
from slidedp_jax.run.hardware_profile import profile_record
from slidedp_jax.run.held_out import (
    evaluations_without_gain,
    losses_line,
    losses_record,
    row_fingerprints,
)
from slidedp_jax.run.learning_rate import learning_rate
from slidedp_jax.run.many_hosts import all_say, all_told, together_of
from slidedp_jax.run.metrics_file import MetricsFile
from slidedp_jax.run.overview import step_seconds
from slidedp_jax.run.profile import Profile
from slidedp_jax.run.progress import LoadProgress, Progress
from slidedp_jax.run.record import IN_CHECKPOINT, essential
from slidedp_jax.run.resume import Resumption, planned_for, rounding_to_begin_with, xla_flags
from slidedp_jax.run.same_inputs import base_model_name, fingerprints
from slidedp_jax.run.samples import Samples
from slidedp_jax.run.saving import Saves
from slidedp_jax.run.step_lanes import lane_seconds
from slidedp_jax.run.trackers import Tool, Trackers, make_tools
from slidedp_jax.state.starting_state import TO_BE_RESTORED
from slidedp_jax.state.weight_rounding import Rounding
from slidedp_jax.tracer import StepTracer
from slidedp_jax.trainer import Trainer
from slidedp_jax.wording import counted

EXIT_FAILED = 1


class Run:
    """One training run with everything checked."""

    def __init__(
        self,
        args: TrainArguments,
        folder: RunFolder,
        inputs: RunInputs,
        parts: Parts,
        disk: RunDisk,
        stop: StopAtSignal,
        started: datetime.datetime,
    ):
        self._args = args
        self._folder = folder
        self._inputs = inputs
        self._parts = parts
        self._plan = plan = parts.plan
        self._disk = disk
        self._stop = stop
        self._started = started
        self._schedule = learning_rate(args, inputs.num_steps)
        self._workload = Workload.from_config(inputs.pretrained.config)
        self._tokens_seen = 0
        self._padding_seen = 0
        self._skipped = 0
        self._timed: list[tuple[int, float]] = []
        self._tracer = StepTracer()
        self._to_track: list[dict[str, Any]] = []
        self._forecast = Forecast(plan)
        self._stopped_elsewhere = False
        self._stops: bool | None = None  # what several hosts have agreed on
        self._together = together_of(current_setup().hosts)
        self._measure = Measure(
            rows=row_fingerprints(inputs.evaluation),
            terms=loss_terms(args, inputs.pretrained.config),
        )
        self._saves = Saves(
            args,
            plan,
            folder.checkpoints,
            metrics=folder.metrics,
            measure=self._measure,
            saved=folder.succeeded,
            is_owner=folder.is_owner,
        )
        self._samples = Samples(args, inputs.pretrained.tokenizer, folder.samples)

    @property
    def _exports(self) -> bool:
        """Whether weights are exported: when that is asked for, and when they would be lost."""
        return self._args.export or self._saves.not_saved is not None

    def run(self, resumed: Resumption | None) -> int:
        """Load, train, save, export, report."""
        if resumed is not None and self._inputs.first_step >= self._inputs.num_steps:
            print("all steps are done; reading the checkpoint for what may be left", flush=True)
        with self._trainer(load=resumed is None) as trainer:
            return self._run(trainer, resumed)

    def _run(self, trainer: Trainer, resumed: Resumption | None) -> int:
        first_step = self._inputs.first_step
        if resumed is not None:
            trainer.restore(resumed.checkpoint)
            self._tokens_seen = resumed.extra["tokens_seen"]
            self._padding_seen = resumed.extra.get("padding_seen", 0)
            self._skipped = resumed.extra["skipped_steps"]
            print(f"resuming from {resumed.checkpoint} at step {first_step}")
        self._run_record = self._record(trainer)
        self._folder.begin(self._run_record)
        # Without a checkpoint nothing of an earlier start holds, not even what is of step 0.
        self._folder.drop_metrics_after(-1 if resumed is None else first_step)
        if resumed is not None and self._folder.is_owner:
            for note in self._saves.resumed((self._folder.previous or {}).get("arguments", {})):
                print(f"note: {note}", flush=True)
        self._evaluate_what_was_missed(trainer, first_step)
        if first_step >= self._inputs.num_steps:
            asked = self._inputs.num_steps
            print(f"already complete: {first_step} steps are done, {asked} are asked for")
            self._track_what_was_missed(first_step)
            return self._finish(trainer, complete=True)
        if why := self._nothing_gained(first_step):
            print(why, flush=True)
            self._track_what_was_missed(first_step)
            return self._finish(trainer, complete=True)
        if first_step == 0:
            self._samples.take(trainer, "before training", functools.partial(print, flush=True))
        with self._stop.when_ready(
            "stopping after this step; a checkpoint is written (once more: at once)"
        ):
            complete = self._loop(trainer, first_step)
        if self._stops is None and self._stop.requested and trainer.step_count == self._saves.step:
            complete = False  # it came after the last step; what is left is done by the next start
        return self._finish(trainer, complete=complete)

    def _trainer(self, *, load: bool) -> Trainer:
        args, inputs, parts = self._args, self._inputs, self._parts
        pretrained = inputs.pretrained
        start = time.perf_counter()

        def read_weights(write: Any) -> None:
            pretrained.load_parameters(LoadProgress(write, pretrained.config.num_parameters))

        trainer = Trainer(
            parts.model,
            parts.optimizer,
            strategy=parts.plan.strategy,
            programs=parts.programs,
            parameters=read_weights if load else TO_BE_RESTORED,
            frozen=args.freeze,
            ema_decay=args.ema_decay,
            weight_rounding=self._rounding(load=load),
            seed=args.seed,
            max_grad_norm=args.clip,
            on_nonfinite=args.on_nonfinite,
            max_loss=args.max_loss,
            max_consecutive_skips=args.max_consecutive_skips,
            documents_per_row=inputs.source.documents_per_row,
            tracer=self._tracer,
        )
        what = "weights loaded" if load else "room for the state made"
        store = trainer.store
        elsewhere = store.owned_bytes - store.host_bytes
        where = f"{size_text(store.host_bytes)} on the host"
        where += f", {size_text(elsewhere)} on the devices" if elsewhere else ""
        print(
            f"{what} in {time.perf_counter() - start:.1f} s; training state: {where}",
            flush=True,
        )
        return trainer

    def _rounding(self, *, load: bool) -> Rounding | None:
        """What was asked for; without a checkpoint, what decided bits where they are repeated."""
        if not load:
            return self._args.weight_rounding
        return rounding_to_begin_with(self._folder.previous, self._args)

    def _loop(self, trainer: Trainer, first_step: int) -> bool:
        """Steps until the end or a signal; whether the end was reached."""
        args, num_steps = self._args, self._inputs.num_steps
        progress = Progress(
            self._folder.metrics,
            first_step=first_step,
            num_steps=num_steps,
            logging_steps=args.logging_steps,
            bar=not args.disable_tqdm,
            tools=self._tools(first_step),
        )
        progress.track(self._to_track)
        gpus = current_setup().devices()[0][0].platform == "gpu"
        profile = Profile(
            args.profiled if self._folder.is_owner else None,
            self._folder.root / "profile",
            self._tracer,
            progress.say,
            settle=trainer.gate.settle,
            gpus=gpus,
        )
        complete = False
        try:
            for step in range(first_step + 1, num_steps + 1):
                profile.before(step)
                record = self._step(trainer, step, progress, last=step == num_steps)
                profile.after(record)
                progress.step(record)
                if self._forecast.is_due:
                    self._tell_forecast(progress, step)
                last = step == num_steps
                stopping = self._stop.requested if self._stops is None else self._stops
                ends = stopping or (last and args.save_at_end)
                if not ends and not last:  # else what went wrong must not keep the weights back
                    self._saves.look(progress)
                    self._saves.prepare(trainer, step, num_steps)
                if ends or self._save_due(step):
                    self._save(trainer, progress, last=last and not stopping, waits=ends or last)
                if stopping:  # what is left, such as an evaluation, is done by the next start
                    self._stop.in_time()
                    complete = last
                    return False
                if self._evaluation_due(step, num_steps):
                    with progress.doing("evaluating"):
                        self._evaluate(trainer, step, progress.write, progress.say)
                    if not last and (why := self._nothing_gained(step)):
                        progress.say(why)
                        if args.save_at_end and self._saves.step != step:
                            self._save(trainer, progress, last=True, waits=True)
                        break
            self._finish_saves(progress)
            complete = True
            return True
        except BaseException as error:
            self._saves.settle(progress, error)
            raise
        finally:
            profile.close()
            progress.close(complete=complete)

    def _step(
        self, trainer: Trainer, step: int, progress: Progress, *, last: bool
    ) -> dict[str, Any]:
        start = time.perf_counter()
        batch = next(self._inputs.source)
        data_s = time.perf_counter() - start
        progress.begin_step(batch.arrays["input_ids"].shape[1])
        arrays = batch.arrays | {"row_ids": np.array(batch.row_ids)}
        metrics = trainer.step(arrays, stop=self._stop.requested)
        issued = time.perf_counter()
        if not last and not self._stop.requested:
            self._inputs.source.make_ahead()  # while the devices compute
        made = time.perf_counter()
        self._stopped_elsewhere = metrics.stop and not self._stop.requested
        self._stops = metrics.stop if self._together is not None else None
        loss, norm, skipped = metrics.loss, metrics.grad_norm, metrics.skipped
        seconds = time.perf_counter() - start
        if start + seconds - made < 0.1 * (made - issued):  # nothing was left to wait for
            data_s += made - issued
        self._timed.append((batch.num_tokens, seconds))
        lanes = self._tracer.take()
        self._forecast.step(arrays["input_ids"].shape[1], seconds, lanes)
        self._tokens_seen += batch.num_tokens
        self._padding_seen += arrays["input_ids"].size - batch.num_tokens
        self._skipped += skipped
        num_devices = self._plan.job.hardware.total_devices
        flops = self._workload.model_flops_per_step(
            BatchShape(num_rows=len(arrays["input_ids"]), seq_length=arrays["input_ids"].shape[1])
        )
        peak = self._plan.job.hardware.peak_flops_per_s * num_devices
        return {
            "step": step,
            "epoch": round(self._inputs.source.epochs_after(), 4),
            "loss": loss,
            "grad_norm": norm,
            **({} if self._args.clip is None else {"clipped": norm > self._args.clip}),
            **({"aux_loss": metrics.aux_loss, **metrics.figures} if metrics.figures else {}),
            # Steps that were skipped do not count for the optimizer.
            "learning_rate": _short(self._schedule(step - 1 - (self._skipped - skipped))),
            "num_tokens": self._tokens_seen,
            "num_padding_tokens": self._padding_seen,
            "num_supervised_tokens": batch.num_supervised_tokens,
            "tokens_per_second": batch.num_tokens / seconds,
            "tokens_per_second_per_device": batch.num_tokens / seconds / num_devices,
            "step_time_s": seconds,
            "data_time_s": data_s,
            **lane_seconds(lanes),
            "wait_device_s": start + seconds - issued,
            "mfu": flops / seconds / peak,
            "device_peak_gib": _device_peak_gib(),
            "skipped_steps": self._skipped,
            **({"skipped": True} if skipped else {}),
            "row_ids": batch.row_ids,
        }

    @property
    def _guesses(self) -> bool:
        """Whether times are predicted for a CPU machine that was not measured."""
        return self._plan.job.hardware.unified_memory and self._args.hardware_profile is None

    def _tell_forecast(self, progress: Progress, step: int) -> None:
        found = self._forecast.comparison()
        assert found is not None
        progress.write({"step": step, "forecast": found.record()})
        progress.say(found.describe(measured=self._args.hardware_profile is not None))

    def _evaluation_due(self, step: int, num_steps: int) -> bool:
        if not self._inputs.evaluation:
            return False
        if step == 0:
            return self._args.eval_at_start
        every, epochs = self._args.eval_steps, self._args.eval_epochs
        by_steps = every is not None and step % every == 0
        by_epochs = epochs is not None and self._inputs.source.has_passed(epochs)
        return step == num_steps or by_steps or by_epochs

    def _save_due(self, step: int) -> bool:
        """Of several hosts, the first one's clock decides."""
        due = self._saves.due(step)
        return due if self._args.save_minutes is None else all_say(self._together, due)

    def _nothing_gained(self, step: int) -> str:
        """Why training stops early, if it does after this step; of several hosts, the first knows.

        It is the one that has the evaluations.
        """
        patience = self._args.early_stopping_patience
        if patience is None or not self._inputs.evaluation or not step:
            return ""
        return all_told(self._together, lambda: self._without_gain(step, patience))

    def _without_gain(self, step: int, patience: int) -> str:
        args = self._args
        found = evaluated(self._folder.metrics, self._measure, args.best_metric)
        values = ((at, value) for at, value in found.items() if at <= step)
        without, best = evaluations_without_gain(values, args.early_stopping_threshold)
        if without < patience:
            return ""
        return (
            f"stopping early at step {step}: {counted(without, 'evaluation')} without a lower "
            f"{args.best_metric}, the best of step {best}"
            f"{skipped_text(self._folder.metrics, best or 0, step)}"
        )

    def _evaluate_what_was_missed(self, trainer: Trainer, step: int) -> None:
        """Before the first step; after a signal, a kill, or with rows not measured so far."""
        if not self._evaluation_due(step, self._inputs.num_steps):
            return
        there = has_evaluation(self._folder.metrics, step, self._measure)
        if all_say(self._together, there):
            return
        metrics = MetricsFile(self._folder.metrics)

        def write(record: dict[str, Any]) -> None:
            metrics.write(record)
            self._to_track.append(record)

        try:
            self._evaluate(trainer, step, write, functools.partial(print, flush=True))
        finally:
            metrics.close()

    def _tools(self, first_step: int) -> dict[str, Tool]:
        if not self._folder.is_owner:
            return {}
        return make_tools(self._args, first_step=first_step, starts=self._run_record["starts"])

    def _track_what_was_missed(self, first_step: int) -> None:
        """Hand on what was evaluated though no step is left."""
        if not self._to_track:
            return
        trackers = Trackers(self._tools(first_step), functools.partial(print, flush=True))
        for record in self._to_track:
            trackers.write(record)
        trackers.close(complete=True)

    def _evaluate(
        self,
        trainer: Trainer,
        step: int,
        write: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        """Mean loss of the supervised tokens of each set of held-out rows."""
        start = time.perf_counter()
        losses = {
            name: trainer.evaluate(batch.arrays for batch in rows.one_epoch())
            for name, rows in self._inputs.evaluation.items()
        }
        record = {
            "step": step,
            **losses_record(losses, cross_entropy=not self._measure.terms),
            "eval_runtime": time.perf_counter() - start,
            **self._measure.record(),
        }
        write(record)
        say(losses_line(step, losses, cross_entropy=not self._measure.terms))
        if self._args.sample_at_eval:
            self._samples.take(trainer, f"at step {step}", say)

    def _save(self, trainer: Trainer, progress: Progress, *, last: bool, waits: bool) -> None:
        """Write a checkpoint; a `last` one that fails leaves the weights to the export."""
        try:
            self._saves.save(trainer, self._extra(), progress, waits=waits)
        except OSError as error:
            if not last:
                raise
            self._saves.not_saved = error
            progress.say("the last checkpoint cannot be written; the weights are exported instead")

    def _finish_saves(self, progress: Progress) -> None:
        """After all steps: a save that fails then leaves the weights to the export."""
        try:
            self._saves.finish(progress)
        except OSError as error:
            self._saves.not_saved = error
            progress.say("a checkpoint cannot be written; the weights are exported instead")

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds beside the state."""
        return {
            "data": self._inputs.source.state(),
            "rows_per_step": self._inputs.source.rows_per_step,
            "num_steps": self._inputs.num_steps,
            "tokens_seen": self._tokens_seen,
            "padding_seen": self._padding_seen,
            "skipped_steps": self._skipped,
            "seed": self._args.seed,
            IN_CHECKPOINT: essential(self._run_record),
        }

    def _finish(self, trainer: Trainer, *, complete: bool) -> int:
        """Samples, export and the summary."""
        if not complete:
            print(f"stopped at step {trainer.step_count}; the same command goes on from there")
            return EXIT_AGAIN if self._stopped_elsewhere else self._stop.exit_code
        self._samples.take(trainer, "after training", functools.partial(print, flush=True))
        if self._exports:
            export_run(
                trainer,
                self._folder,
                self._inputs.pretrained,
                self._args,
                run=self._run_record,
                tokens_seen=self._tokens_seen,
            )
        self._folder.succeeded()
        self._summary(trainer)
        if self._saves.not_saved is None:
            return 0
        print(
            f"error: the last checkpoint was not written: {self._saves.not_saved}\n"
            f"The weights of step {trainer.step_count} are in {self._folder.export}, without the "
            "optimizer's state",
            file=sys.stderr,
        )
        return EXIT_FAILED

    def _summary(self, trainer: Trainer) -> None:
        places = self._tokens_seen + self._padding_seen
        print(
            f"done: {counted(trainer.step_count, 'step')}, {self._tokens_seen:,} tokens seen; "
            f"padding took {self._padding_seen / max(1, places):.0%} of the rows"
        )
        if self._skipped:
            taken = trainer.step_count - self._skipped
            print(
                f"  skipped:     {counted(self._skipped, 'step')}, which changed no weight; of the "
                f"learning rate's {self._inputs.num_steps} steps {taken} were taken"
            )
        timed = self._timed[1:] or self._timed
        if timed:
            tokens, seconds = (sum(column) for column in zip(*timed, strict=True))
            step_s = sorted(second for _, second in timed)[len(timed) // 2]
            known = f", predicted {step_seconds(self._plan, self._inputs):.3f} s"
            print(
                f"  {tokens / seconds:,.0f} tokens/s without padding, after the first step\n"
                f"  median step {step_s:.3f} s{'' if self._guesses else known}"
            )
        found = self._forecast.comparison()
        if found is not None and found.lane is not None and not self._guesses:
            print(f"  {found.describe(measured=self._args.hardware_profile is not None)}")
        peak = _device_peak_gib()
        planned = self._plan.chosen.memory.device_bytes - self._parts.held_back_bytes
        predicted = planned / 2**30
        if peak is not None:
            print(f"  device peak {peak:.1f} GiB, predicted {predicted:.1f} GiB")
        print(f"  checkpoints: {self._folder.checkpoints}")
        if (best := self._saves.best) is not None:
            print(
                f"  best:        {best} by {self._args.best_metric}; as a model: slidedp export "
                f"{best} NEW"
            )
        for path in self._saves.best_before:
            print(f"  kept:        {path}, the best before held-out rows or loss were changed")
        print(f"  metrics:     {self._folder.metrics}")
        if self._exports:
            how = export_text(trainer.weight_rounding, self._args)
            print(f"  model:       {self._folder.export} ({how})")
            if self._args.ema_decay is not None:
                print(f"  averaged:    {self._folder.export_ema}")

    def _record(self, trainer: Trainer) -> dict[str, Any]:
        packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")
        return {
            "arguments": dataclasses.asdict(self._args),
            "plan": plan_as_dict(self._plan),
            "compiled_memory": check_record(self._parts.check),
            "predicted": {"step_s": step_seconds(self._plan, self._inputs)},
            "disk": self._disk.record(),
            "planned_for": planned_for(),
            "hardware_profile": profile_record(self._args),
            "xla_flags": xla_flags(),
            "configuration": dataclasses.asdict(self._inputs.pretrained.config),
            "kernel_form": trainer.kernel_form,
            "expert_products": expert_products(
                self._args,
                self._inputs.pretrained.config,
                self._plan.strategy.rows_per_microbatch * self._inputs.source.widths[-1],
            ),
            ROUNDING: trainer.weight_rounding.record(),
            "data": dataclasses.asdict(self._inputs.report),
            "started": self._started.isoformat(),
            "starts": starts(
                self._folder.previous,
                self._args,
                time=datetime.datetime.now().isoformat(timespec="seconds"),
                from_step=self._inputs.first_step,
            ),
            "base_model": base_model_name(self._args.model_name_or_path),
            "chat_template": self._inputs.pretrained.chat_template,
            "fingerprints": fingerprints(self._inputs),
            "data_counts": {
                name: getattr(self._inputs.report, name)
                for name in ("rows_in", "rows_kept", "num_tokens", "num_supervised_tokens")
            },
            "versions": {
                "slidedp_jax": slidedp_jax.__version__,
                "python": platform.python_version(),
            }
            | {name: importlib.metadata.version(name) for name in packages},
        }


def _short(value: Any) -> float:
    """A float32 by the fewest digits that tell it."""
    return float(str(np.float32(value)))


def _device_peak_gib() -> float | None:
    """Largest peak over the compute devices; None where the backend does not tell."""
    stats = [device.memory_stats() or {} for device in current_setup().own_devices()]
    peaks = [entry["peak_bytes_in_use"] for entry in stats if "peak_bytes_in_use" in entry]
    return max(peaks) / 2**30 if peaks else None
