"""What is checked before anything expensive: model folder, data, steps, devices, plan."""

from __future__ import annotations

import datetime
import functools
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slidedp_jax.data import BatchSource, DataReport, StepSize
from slidedp_jax.errors import UserError
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.optimizers import OptimizerName
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.stated_choices import cost_of_choices
from slidedp_jax.planner.stated_machine import Stated, machine
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.whole_updates import update_flops, whole_parameters
from slidedp_jax.pretrained import Pretrained, from_pretrained
from slidedp_jax.run.arguments import STATED, WHOLE_PARAMETER_OPTIMIZERS, TrainArguments
from slidedp_jax.run.data_progress import data_progress
from slidedp_jax.run.data_settings import example_settings, num_processes, token_cache
from slidedp_jax.run.evaluations import check_metric
from slidedp_jax.run.held_out import held_out_sets
from slidedp_jax.state.freezing import frozen_names
from slidedp_jax.wording import counted

USUAL_RATES: Mapping[OptimizerName, float] = {
    "adamw": 1e-2,
    "lion": 1e-2,
    "adafactor": 1e-1,
    "muon": 1e-1,
    "sgd": 10.0,
}
"""Learning rates above which the user is told; of models that start from nothing, ten times those
in use. The steps of the first four have a size that does not depend on the gradients'."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Checked inputs of a run.

    Attributes:
      pretrained: the model's Hugging Face folder.
      source: the training rows.
      evaluation: the rows of each set of `validation_file`, by its name.
      report: what became of the training files' rows.
      evaluation_reports: what became of the validation files' rows, by their sets' names.
      num_steps: steps in all.
      first_step: steps that an earlier run has done.
    """

    pretrained: Pretrained
    source: BatchSource
    evaluation: Mapping[str, BatchSource]
    report: DataReport
    evaluation_reports: Mapping[str, DataReport]
    num_steps: int
    first_step: int = 0


def load_inputs(
    args: TrainArguments, num_devices: int, now: datetime.datetime | None = None
) -> RunInputs:
    """Check the model folder by its headers, read and tokenise the data, count the steps.

    Weights that are to come from the hub are left there (`Pretrained.fetch_weights`), and a dry run
    does without.

    `now`: what templates take for the time; None is the time of rendering.

    Raises:
      UserError: anything about them that would stop the run later.
    """
    from slidedp_jax.run.optimizers import check_patterns  # which imports JAX

    pretrained = from_pretrained(
        args.model_name_or_path, weights=False, chat_template=args.chat_template_path, now=now
    )
    if pretrained.has_weights if args.dry_run else pretrained.hub_name is None:
        pretrained.fetch_weights()
    check_patterns(args, _trained_shapes(args, pretrained.config))
    pretrained.check_router_losses(args.router_aux_loss_coef, args.router_z_loss_coef)
    check_metric(args, pretrained.config)
    held_out = held_out_sets(args.validation_file)
    for path in (*args.train_file, *(file for files in held_out.values() for file in files)):
        if not pathlib.Path(path).is_file():
            raise UserError(f"there is no file {path}; check train_file and validation_file")
    source, report = _rows(args, pretrained, num_devices, args.train_file)
    source.require_whole_step(report)
    loaded = {
        name: _rows(args, pretrained, num_devices, files, like=source)
        for name, files in held_out.items()
    }
    return RunInputs(
        pretrained=pretrained,
        source=source,
        evaluation={name: rows for name, (rows, _) in loaded.items()},
        report=report,
        evaluation_reports={name: its_report for name, (_, its_report) in loaded.items()},
        num_steps=args.max_steps or source.num_steps(args.num_train_epochs),
    )


def with_rows_per_step(args: TrainArguments, inputs: RunInputs, num_devices: int) -> RunInputs:
    """The same data in steps of the size that the settings say, from its beginning."""
    size = _step_size(args, num_devices)
    for source in (inputs.source, *inputs.evaluation.values()):
        source.resize(size)
    return replace(
        inputs, num_steps=args.max_steps or inputs.source.num_steps(args.num_train_epochs)
    )


def _step_size(args: TrainArguments, num_devices: int) -> StepSize:
    """Rows of a step; one per device where their number has still to be found."""
    size = args.per_device_train_batch_size
    return StepSize(
        per_device=size if isinstance(size, int) else 1,
        accumulation=args.gradient_accumulation_steps,
        num_devices=num_devices,
    )


def _rows(
    args: TrainArguments,
    pretrained: Pretrained,
    num_devices: int,
    files: list[str],
    *,
    like: BatchSource | None = None,
) -> tuple[BatchSource, DataReport]:
    """The rows to train on; or, `like` those, rows to evaluate on: all of them, in their order.

    Evaluation is computed as training is: packed or not, as many rows at a time, no row of more
    documents than attention has room for.
    """
    all_rows = {} if like is None else {"max_rows": None}
    what = counted(len(files), "file") if len(files) > 1 else pathlib.Path(files[0]).name
    with data_progress(what) as progress:
        return pretrained.rows(
            files,
            rows_per_step=_step_size(args, num_devices),
            packing=args.packing,
            most_documents_per_row=None if like is None else like.documents_per_row,
            shuffle=args.shuffle and like is None,
            seed=args.seed if args.data_seed is None else args.data_seed,
            file_weights=args.train_file_weights if like is None else None,
            num_proc=num_processes(args),
            cache=token_cache(args, files),
            progress=progress,
            say=functools.partial(print, flush=True),
            **vars(example_settings(args)) | all_rows,
        )


_CHOICES = (
    *("layers_per_chunk", "rows_per_microbatch", "loss_chunk_tokens"),
    *("weight_route", "gradient_route"),
)
_PERMISSIONS = ("keep_activations", "resident_state")


def choices_note(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    plan: Plan,
    held_back_bytes: float = 0.0,
) -> list[str]:
    """What the settings of the strategy cost, where the planner's own would be faster.

    Args:
      args: the run's settings.
      inputs: model and data.
      num_devices: compute devices.
      plan: as they say.
      held_back_bytes: device memory that it leaves free.
    """
    names = (*_CHOICES, *_PERMISSIONS)
    undecided: dict[str, Any] = dict.fromkeys(names)
    free = replace(args, **undecided)

    def without() -> Plan:
        try:
            return make_plan(free, inputs, num_devices, held_back_bytes=held_back_bytes)
        except UserError as error:
            raise PlanError(str(error)) from None

    stated = {f"--{name}": getattr(args, name) for name in names}
    return cost_of_choices(plan, stated, without)


def make_plan(
    args: TrainArguments,
    inputs: RunInputs,
    num_devices: int,
    strategy: Strategy | None = None,
    *,
    rows_per_step: int | None = None,
    decided: Mapping[str, Any] | None = None,
    held_back_bytes: float = 0.0,
) -> Plan:
    """The strategy for this machine, or for `args.hardware` in a dry run.

    Args:
      args: the run's settings.
      inputs: model and data.
      num_devices: compute devices.
      strategy: what has been decided; it is only costed.
      rows_per_step: other than those of `inputs`, to see what they would take.
      decided: `Choices` beside those of the settings.
      held_back_bytes: device memory that the plan leaves free (`this_machine.plan_for`).

    Raises:
      UserError: nothing fits; every limit is listed.
    """
    from slidedp_jax.this_machine import plan_for

    hardware = None
    if args.hardware is not None:
        try:
            stated = Stated(**{name: getattr(args, name) for name in STATED})
            hosts = args.num_hosts or 1
            each = num_devices // hosts
            hardware = machine(args.hardware, each, stated, num_hosts=hosts)
        except ValueError as error:
            raise UserError(str(error)) from None
        _check_budgets(args, hardware)
    choices = Choices(**{name: getattr(args, name) for name in _CHOICES} | dict(decided or {}))
    whole = args.optim in WHOLE_PARAMETER_OPTIMIZERS
    trained = _trained_shapes(args, inputs.pretrained.config)
    return plan_for(
        inputs.pretrained.config,
        frozen=args.freeze,
        rows_per_step=rows_per_step or inputs.source.rows_per_step,
        tokens_per_row=inputs.source.widths[-1],
        documents_per_row=inputs.source.documents_per_row if args.packing else None,
        document_lengths=inputs.source.typical_documents if args.packing else None,
        max_grad_norm=args.clip,
        compute_dtype=args.dtype,
        optimizer_state_bytes=_state_bytes_per_parameter(args, inputs.pretrained.config),
        device_memory_budget_gib=args.device_memory_budget,
        host_memory_budget_gib=args.host_memory_budget,
        # Eager updates have begun when a step turns out to be bad.
        update_policy="deferred" if args.on_nonfinite == "skip" or args.max_loss else None,
        choices=choices,
        keep_activations=args.keep_activations,
        resident_state=False if whole else args.resident_state,  # those read them on the host
        hardware=hardware,
        hardware_profile=args.hardware_profile,
        update_flops=update_flops(args.optim, trained),
        whole_parameters=whole_parameters(args.optim, trained),
        held_back_bytes=held_back_bytes,
        strategy=strategy,
    )


def _check_budgets(args: TrainArguments, hardware: HardwareProfile) -> None:
    """Whether no more is to be used of another machine than it has.

    Raises:
      UserError: it is; the flag that states what it has is named.
    """
    for budget, what, have in (
        (args.host_memory_budget, "host_memory", hardware.host_memory_bytes / GIB),
        (args.device_memory_budget, "device_memory", hardware.device_memory_bytes / GIB),
    ):
        if budget is not None and budget > have:
            raise UserError(
                f"{what}_budget is {budget:g} GiB; {hardware.name} is taken to have {have:.2f} "
                f"GiB: say with --{what}_gib what the machine has"
            )


def _state_bytes_per_parameter(args: TrainArguments, config: ModelConfig) -> float:
    """Optimizer state in bytes, an average of the weights included, per trained parameter."""
    from slidedp_jax.run.optimizers import make_optimizer, state_bytes

    trained = _trained_shapes(args, config)
    total = state_bytes(make_optimizer(args, num_steps=1), trained)
    if args.ema_decay is not None:
        total += 4 * _count(trained)
    return total / _count(trained)


def _trained_shapes(args: TrainArguments, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = config.parameter_shapes()
    frozen = frozen_names(shapes, args.freeze)
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def frozen_note(args: TrainArguments, config: ModelConfig) -> str:
    """One line on what stays as it is."""
    trained, arrays = _trained_shapes(args, config), len(config.parameter_shapes())
    return (
        f"{arrays - len(trained)} of {arrays} parameter arrays are frozen; "
        f"{_count(trained):,} of {config.num_parameters:,} parameters are trained"
    )


def check_attention(args: TrainArguments, inputs: RunInputs) -> None:
    """Whether a kernel that was asked for by name can run on this machine.

    Raises:
      UserError: it cannot; every reason is listed.
    """
    if args.attention == "auto" or args.hardware is not None:
        return
    from slidedp_jax.models.attention import RowLayout, device_target, resolve_attention
    from slidedp_jax.process import current_setup

    computed: dict[str, RowLayout] = {"the training rows": "documents" if args.packing else "whole"}
    if args.sample_prompts:
        computed["sample_prompts"] = "documents"
    for what, rows in computed.items():
        try:
            resolve_attention(
                args.attention,
                target=device_target(current_setup().devices()[0][0]),
                dtype=args.dtype,
                head_dim=inputs.pretrained.config.head_dim,
                rows=rows,
            )
        except ValueError as error:
            raise UserError(f"for {what}, {error}") from None


def attention_notes(inputs: RunInputs, args: TrainArguments) -> list[str]:
    """Where a GPU runs portable attention, and why: a fused kernel is several times as fast."""
    if args.attention != "auto" or args.hardware is not None:
        return []
    from slidedp_jax.models.attention import device_target, resolve_attention
    from slidedp_jax.process import current_setup

    target = device_target(current_setup().devices()[0][0])
    choice = resolve_attention(
        "auto",
        target=target,
        dtype=args.dtype,
        head_dim=inputs.pretrained.config.head_dim,
        rows="documents" if args.packing else "whole",
    )
    if target.platform != "cuda" or choice.name != "chunked":
        return []
    return [f"attention is the portable one, several times slower than cuDNN's: {choice.reason}"]


def setting_notes(inputs: RunInputs, args: TrainArguments) -> list[str]:
    """What is allowed and does not do what one might expect."""
    notes = []
    if args.dry_run and not inputs.pretrained.has_weights:
        notes.append(
            f"there are no weights in {inputs.pretrained.folder}, so they are not checked; the run "
            f"{'fetches' if inputs.pretrained.hub_name else 'needs'} them"
        )
    longest = inputs.pretrained.config.max_position_embeddings
    if longest is not None and inputs.source.widths[-1] > longest:
        notes.append(
            f"rows have up to {inputs.source.widths[-1]:,} tokens, the model was made for "
            f"{longest:,} (max_position_embeddings)"
        )
    usual = USUAL_RATES[args.optim]
    if args.learning_rate > usual:
        notes.append(
            f"learning_rate is {args.learning_rate:g}; with {args.optim}, more than {usual:g} "
            "rarely trains anything (the default is 1e-05)"
        )
    if args.learning_rate == 0:
        notes.append("learning_rate is 0: nothing is learnt")
    notes += [
        f"{name} without validation_file: nothing is evaluated"
        for name in ("eval_steps", "eval_epochs")
        if getattr(args, name) is not None and not args.validation_file
    ]
    if args.sample_at_eval and not (args.validation_file and args.sample_prompts):
        notes.append("sample_at_eval needs sample_prompts and validation_file: nothing is sampled")
    if args.profiled is not None and args.profiled[1] <= inputs.first_step:
        notes.append(f"profile_steps {args.profile_steps} are done already: nothing is traced")
    elif args.profiled is not None and args.profiled[0] > inputs.num_steps:
        notes.append(
            f"profile_steps {args.profile_steps} is beyond the last step, {inputs.num_steps}: "
            "nothing is traced"
        )
    if args.warmup_steps is not None and args.warmup_steps >= inputs.num_steps:
        notes.append(
            f"warmup_steps is {args.warmup_steps} of {inputs.num_steps} steps: the peak learning "
            "rate is never reached"
        )
    return notes


def epochs_note(inputs: RunInputs, args: TrainArguments) -> str:
    """One line on steps and epochs."""
    source, done = inputs.source, inputs.first_step
    epochs = source.epochs_after(max(0, inputs.num_steps - done))
    repeated = " (the data repeats, reshuffled)" if math.ceil(epochs) > 1 and args.max_steps else ""
    packed = "packed " if args.packing else ""
    rows, so_far = counted(source.rows_per_step, f"{packed}row"), ""
    if done:
        so_far = f"; {counted(done, 'step')}, {source.epochs_after():.2f} epochs are done"
    steps = counted(inputs.num_steps, "step")
    return f"{steps} of {rows}, {epochs:.2f} epochs{repeated}{so_far}"
