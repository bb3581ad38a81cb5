"""Which settings a resumed run may have otherwise than before, and what it says of those it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import FIELDS, STATED, TrainArguments

PATHS = ("model_name_or_path", "train_file", "chat_template_path")
"""Settings that name what is known by its content, wherever it lies and however that is spelled."""

MAY_CHANGE = frozenset(
    {
        "allow_changed",
        "output_dir",
        "overwrite_output_dir",
        "max_steps",
        "num_train_epochs",
        "num_devices",
        "num_hosts",
        "host_index",
        "coordinator",
        "devices",
        "platform",
        "num_host_devices",
        "device_memory_budget",
        "keep_activations",
        "resident_state",
        "host_memory_budget",
        "compilation_cache",
        "layers_per_chunk",
        "rows_per_microbatch",
        "loss_chunk_tokens",
        "weight_route",
        "gradient_route",
        "hardware",
        "hardware_profile",
        *STATED,
        "dry_run",
        "attention",
        "expert_products",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "save_steps",
        "save_at_end",
        "save_minutes",
        "save_beside",
        "save_buffer",
        "save_total_limit",
        "save_keep_every",
        "save_best",
        "stop_within",
        "eval_steps",
        "eval_epochs",
        "eval_at_start",
        "metric_for_best_model",
        "early_stopping_patience",
        "early_stopping_threshold",
        "validation_file",
        "dataset_num_proc",
        "data_cache",
        "logging_steps",
        "report_to",
        "run_name",
        "logging_dir",
        "profile_steps",
        "disable_tqdm",
        "verbose",
        "export",
        "export_dtype",
        "export_rounding",
        "weight_rounding",
        "sample_prompts",
        "sample_max_new_tokens",
        "sample_at_eval",
        "on_nonfinite",
        "max_loss",
        "max_consecutive_skips",
        "plan_from",
    }
)
"""Settings that a resumed run may have otherwise than the run that it continues."""

SCHEDULE = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "min_lr_ratio",
    "lr_decay_steps",
    "lr_decay_ratio",
    "lr_decay_type",
    "learning_rate_by_name",
)
"""Settings of the learning rate at each step."""

ORDERED = ("learning_rate_by_name", "weight_decay_by_name")
"""Settings whose order counts: the first pattern that fits decides."""

DATA = (
    "train_file",
    "train_file_weights",
    "max_train_samples",
    "max_seq_length",
    "packing",
    "loss_on",
    "over_long",
    "truncation_keep",
    "append_eos",
    "skip_bad_rows",
    "chat_template_path",
    "chat_template_kwargs",
    "columns",
    "shuffle",
    "data_seed",
)
"""Settings that make the rows and their order."""

ALLOWABLE = (
    *SCHEDULE,
    "weight_decay",
    "weight_decay_by_name",
    "label_smoothing_factor",
    "z_loss_coef",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    *DATA,
)
"""What `allow_changed` may name: changes after which a run is another, but can go on."""


def check_allowed(args: TrainArguments) -> None:
    """Whether `allow_changed` names what it can.

    Raises:
      UserError: it does not.
    """
    wrong = [name for name in args.allow_changed if name not in {*ALLOWABLE, *MAY_CHANGE}]
    if wrong:
        raise UserError(
            f"allow_changed names {', '.join(wrong)}; a run can go on with another "
            f"{', '.join(ALLOWABLE)}. {_anew(args.output_dir)}"
        )


def data_may_change(args: TrainArguments) -> bool:
    """Whether a run may go on with other rows, or the same in another order."""
    return not set(DATA).isdisjoint(args.allow_changed)


def check_settings(
    args: TrainArguments, before: Mapping[str, Any], root: object, *, by_content: bool
) -> list[str]:
    """Compare the settings of a run that goes on; notes on those that may differ and do.

    Args:
      args: of this start.
      before: of the last one.
      root: the output folder.
      by_content: what `PATHS` name is compared elsewhere, by its content.

    Raises:
      UserError: others differ; it says how to go on nevertheless.
    """
    skipped = MAY_CHANGE.union(PATHS) if by_content else MAY_CHANGE
    differing = {
        name: f"{name} was {was!r}, now {now!r}"
        for name, (was, now) in changed(args, before).items()
        if name not in skipped
    }
    refused = [name for name in differing if name not in args.allow_changed]
    if not refused:
        return [f"as allowed, {text}" for text in differing.values()]
    possible = [name for name in differing if name in ALLOWABLE]
    ways = []
    if len(possible) == len(differing):
        ways.append(f"To go on with the new ones: --allow_changed {' '.join(possible)}.")
    else:
        ways.append(_anew(root))
    raise UserError(
        f"output_dir {root} holds a run with other settings: "
        f"{'; '.join(differing[name] for name in refused)}. {' '.join(ways)} Or use the same "
        "settings, another output_dir, or --overwrite_output_dir, which deletes the run"
    )


def changed(args: TrainArguments, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Setting -> its values before and now, of those that differ.

    A version that had not a setting yet did what its default says.
    """
    was, now = with_defaults(before), dataclasses.asdict(args)
    return {
        name: (was[name], now[name])
        for name in now
        if name in was and not _same(name, was[name], now[name])
    }


def with_defaults(before: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an earlier run, with the defaults of those that its version had not."""
    defaults = {}
    for name, own in FIELDS.items():
        if own.default is not dataclasses.MISSING:
            defaults[name] = own.default
        elif own.default_factory is not dataclasses.MISSING:
            defaults[name] = own.default_factory()
    return defaults | dict(before)


def _same(name: str, was: Any, now: Any) -> bool:
    return bool(was == now) and (name not in ORDERED or list(was) == list(now))


def starts(
    previous: Mapping[str, Any] | None, args: TrainArguments, *, time: str, from_step: int
) -> list[dict[str, Any]]:
    """All starts of a run, this one last: the first with all settings, others with what changed.

    Args:
      previous: what `record.read_run` gave of the run so far, if there is one.
      args: of this start.
      time: of this start.
      from_step: steps that were done.
    """
    this = {"time": time, "from_step": from_step}
    if previous is None:
        return [this | {"arguments": dataclasses.asdict(args)}]
    earlier = previous.get("starts") or [
        {"time": previous.get("started"), "from_step": 0, "arguments": previous["arguments"]}
    ]
    differing = changed(args, previous["arguments"])
    return [*earlier, this | {"changed": {name: list(pair) for name, pair in differing.items()}}]


def _anew(root: object) -> str:
    return (
        f"To start a new run from the weights of this one: `slidedp export {root} NEW`, then "
        "--model_name_or_path NEW with another --output_dir."
    )
