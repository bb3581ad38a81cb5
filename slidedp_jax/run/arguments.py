"""Settings of a training run: one frozen value from a YAML file and the command line.

Names are those of Hugging Face's TrainingArguments where they have one. The command line wins over
the file; hyphens and underscores are the same; an unknown key is an error that names the nearest.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import yaml

from slidedp_jax.compilation_cache import AUTO
from slidedp_jax.data.example_settings import Keep, LossOn, OverLong
from slidedp_jax.data.row_order import checked_weights
from slidedp_jax.errors import UserError
from slidedp_jax.planner.optimizers import (
    WHOLE_PARAMETER_OPTIMIZERS as WHOLE_PARAMETER_OPTIMIZERS,
)
from slidedp_jax.planner.optimizers import OptimizerName
from slidedp_jax.planner.stated_machine import Stated
from slidedp_jax.planner.strategy import GradientRoute, WeightRoute
from slidedp_jax.run.held_out import checked_metric
from slidedp_jax.run.other_tools import CALLED_HERE, answer
from slidedp_jax.state.weight_rounding import Rounding

AUTO_BATCH_SIZE: Final = "auto"
STATED = tuple(Stated.__dataclass_fields__)
"""Settings that say what the machine has that `hardware` names."""

Scheduler = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
]


def _setting(group: str, text: str, default: Any = dataclasses.MISSING) -> Any:
    metadata = {"group": group, "help": text}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Every setting of `python -m slidedp_jax.train`; see each field's help text."""

    model_name_or_path: str = _setting("model", "Hugging Face model folder (or hub name)")
    train_file: list[str] = _setting("data", "one or more .jsonl, .json, .txt or .parquet files")
    output_dir: str = _setting("output", "folder for checkpoints, metrics and the export")

    attention: Literal["auto", "cudnn", "chunked"] = _setting(
        "model", "auto, cudnn or chunked", "auto"
    )
    expert_products: Literal["auto", "portable", "ragged_dot", "mosaic", "triton"] = _setting(
        "model", "kernels of experts; auto: by what was measured on such a device", "auto"
    )
    dtype: Literal["bfloat16", "float32"] = _setting(
        "model",
        "bfloat16 or float32, of forward and backward; master weights are always float32",
        "bfloat16",
    )
    weight_rounding: Rounding | None = _setting(
        "model",
        "of float32 masters to bfloat16: dither or nearest; null: dither, or as before",
        None,
    )

    train_file_weights: list[float] = _setting(
        "data", "passes over each file in an epoch, such as 2 0.5; one over all by default", []
    )
    validation_file: list[str] = _setting(
        "data", "files whose loss is measured; name=file for one of its own", []
    )
    max_seq_length: int = _setting("data", "tokens of a row", 2048)
    packing: bool = _setting("data", "several documents per row, isolated from each other", False)
    loss_on: LossOn = _setting("data", "auto, assistant, completion or all", "auto")
    over_long: OverLong = _setting(
        "data", "longer rows: truncate, drop, raise or split", "truncate"
    )
    truncation_keep: Keep = _setting("data", "side of a truncated row that stays", "start")
    append_eos: bool = _setting("data", "end completions and documents with eos", True)
    skip_bad_rows: bool = _setting("data", "count malformed rows instead of stopping", False)
    max_train_samples: int | None = _setting("data", "use the first so many rows", None)
    chat_template_path: str | None = _setting("data", "file that replaces the chat template", None)
    chat_template_kwargs: dict[str, Any] = _setting("data", "variables for the template, JSON", {})
    columns: dict[str, str] = _setting("data", "our field name -> name in the files, JSON", {})
    shuffle: bool = _setting("data", "a new order each epoch", True)
    data_seed: int | None = _setting("data", "of the order; the seed by default", None)
    dataset_num_proc: int | Literal["auto"] = _setting(
        "data", "processes that tokenise; auto: one for each core, of large files", "auto"
    )
    data_cache: str | None = _setting(
        "data", "folder for tokenised rows, null for none; auto: user's cache, of large files", AUTO
    )

    per_device_train_batch_size: int | Literal["auto"] = _setting(
        "training", "rows per device and micro batch; auto: the planner's", 1
    )
    gradient_accumulation_steps: int = _setting("training", "micro batches per step", 1)
    num_train_epochs: float = _setting("training", "passes over the data", 1.0)
    max_steps: int | None = _setting("training", "stop there, repeating epochs if need be", None)
    optim: OptimizerName = _setting("training", "adamw, lion, sgd, adafactor or muon", "adamw")
    learning_rate: float = _setting("training", "peak learning rate", 1e-5)
    lr_scheduler_type: Scheduler = _setting("training", "after the warm-up", "cosine")
    warmup_steps: int | None = _setting(
        "training", "steps of linear warm-up; null: by warmup_ratio", None
    )
    warmup_ratio: float = _setting("training", "share of steps, where warmup_steps is null", 0.03)
    min_lr_ratio: float = _setting("training", "final over peak learning rate", 0.0)
    lr_decay_steps: int | None = _setting(
        "training", "last steps of warmup_stable_decay; null: by lr_decay_ratio", None
    )
    lr_decay_ratio: float = _setting(
        "training", "share of steps, where lr_decay_steps is null", 0.1
    )
    lr_decay_type: Literal["cosine", "linear", "1-sqrt"] = _setting(
        "training", "of warmup_stable_decay", "cosine"
    )
    learning_rate_by_name: dict[str, float] = _setting(
        "training", "pattern of parameter names -> peak learning rate, JSON", {}
    )
    weight_decay: float = _setting("training", "decoupled; not on norms and biases", 0.0)
    weight_decay_by_name: dict[str, float] = _setting(
        "training", "pattern of parameter names -> weight decay, JSON", {}
    )
    adam_beta1: float = _setting("training", "AdamW and Lion; SGD's momentum", 0.9)
    adam_beta2: float = _setting("training", "AdamW and Lion", 0.999)
    adam_epsilon: float = _setting("training", "AdamW", 1e-8)
    max_grad_norm: float | None = _setting("training", "exact global clip; 0 or null for none", 1.0)
    on_nonfinite: Literal["stop", "skip"] = _setting("training", "non-finite gradients", "stop")
    max_loss: float | None = _setting("training", "treat a larger loss like those", None)
    max_consecutive_skips: int = _setting("training", "skips in a row before it stops", 10)
    label_smoothing_factor: float = _setting(
        "training", "of the targets, in evaluation too; 0 for none", 0.0
    )
    z_loss_coef: float = _setting("training", "of the square of the logits' log-sum-exp", 0.0)
    freeze: list[str] = _setting("training", "patterns of names that stay as they are", [])
    router_aux_loss_coef: float | None = _setting(
        "training", "experts' load balance; null: as config.json says", None
    )
    router_z_loss_coef: float = _setting("training", "size of the routers' logits", 0.0)
    ema_decay: float | None = _setting("training", "keep an average of the weights", None)
    seed: int = _setting("training", "of everything random", 42)

    num_devices: int | None = _setting("devices", "compute devices; all by default", None)
    devices: str | None = _setting("devices", "GPU indices, such as 1,3", None)
    platform: Literal["auto", "cpu", "cuda"] = _setting("devices", "where to compute", "auto")
    num_host_devices: int | None = _setting(
        "devices", "CPU devices for the state, rounded up to a multiple of the devices", None
    )
    device_memory_budget: float | None = _setting("devices", "GiB of each device", None)
    host_memory_budget: float | None = _setting("devices", "GiB of host memory", None)
    layers_per_chunk: int | None = _setting("devices", "planned by default", None)
    rows_per_microbatch: int | None = _setting("devices", "planned by default", None)
    loss_chunk_tokens: int | None = _setting(
        "devices", "tokens whose logits exist at once; planned by default", None
    )
    keep_activations: bool | None = _setting(
        "devices", "recompute only layers whose results do not fit; null: on GPUs", None
    )
    resident_state: bool | None = _setting(
        "devices", "state of the lowest layers stays on the GPUs where it pays; null: on GPUs", None
    )
    weight_route: WeightRoute | None = _setting("devices", "replicate or shard_all_gather", None)
    gradient_route: GradientRoute | None = _setting("devices", "reduce_scatter or host_sum", None)
    plan_from: str | None = _setting(
        "devices", "run.json of another run, whose strategy is taken for the same bits", None
    )
    compilation_cache: str | None = _setting(
        "devices", "folder for compiled programs, null for none; auto: user's cache, on GPUs", AUTO
    )
    hardware: str | None = _setting("devices", "with dry_run: plan for this machine", None)
    host_cores: int | None = _setting("devices", "with hardware: cores of that host", None)
    host_memory_gib: float | None = _setting("devices", "with hardware: memory of that host", None)
    link_gb_per_s: float | None = _setting(
        "devices", "with hardware: from that host to each GPU, and back", None
    )
    device_memory_gib: float | None = _setting("devices", "with hardware: memory of a GPU", None)
    hardware_profile: str | None = _setting(
        "devices",
        "plan with the rates of this file of `slidedp measure`; auto: this machine's",
        None,
    )
    network_gb_per_s: float | None = _setting(
        "devices", "with hardware: into each of several hosts from the others", None
    )
    num_hosts: int | None = _setting(
        "devices", "hosts that train together; null: as environment or launcher say", None
    )
    host_index: int | None = _setting(
        "devices", "which of them this is, from 0; null: so, too", None
    )
    coordinator: str | None = _setting(
        "devices", "address:port of the first one, where they meet; null: so, too", None
    )
    dry_run: bool = _setting("devices", "check everything, print the plan, stop", False)

    save_steps: int | None = _setting("output", "steps between saves; null: see save_at_end", 500)
    save_at_end: bool = _setting("output", "a checkpoint of the last step", True)
    save_minutes: float | None = _setting("output", "minutes between saves, by the clock", None)
    save_beside: bool = _setting(
        "output", "write checkpoints while steps go on; false: steps wait", True
    )
    save_buffer: float | None = _setting(
        "output", "GiB for what is copied and not written yet; null: what is free", None
    )
    save_total_limit: int = _setting("output", "newest checkpoints to keep", 2)
    save_keep_every: int | None = _setting(
        "output", "keep those of its multiples as well, for good", None
    )
    save_best: bool = _setting("output", "keep that of the lowest held-out loss as well", False)
    metric_for_best_model: str = _setting(
        "output", "eval_loss, or eval_NAME_loss of a named validation_file", "eval_loss"
    )
    early_stopping_patience: int | None = _setting(
        "output", "stop after so many evaluations without a better one; null: never", None
    )
    early_stopping_threshold: float = _setting(
        "output", "by how much a better one has to be lower", 0.0
    )
    stop_within: float | None = _setting(
        "output", "seconds from SIGTERM or SIGUSR1 until the process must have ended", None
    )
    overwrite_output_dir: bool = _setting("output", "start over in a used folder", False)
    allow_changed: list[str] = _setting(
        "output",
        "settings that a resumed run may have otherwise than before, such as train_file",
        [],
    )
    eval_steps: int | None = _setting("output", "steps between evaluations; null: at the end", None)
    eval_epochs: float | None = _setting(
        "output", "epochs between evaluations, such as 0.25; beside eval_steps", None
    )
    eval_at_start: bool = _setting("output", "the held-out loss before the first step, too", False)
    logging_steps: int = _setting("output", "steps between console lines", 1)
    report_to: list[str] = _setting(
        "output", "tensorboard, wandb, beside metrics.jsonl; none for neither", []
    )
    run_name: str | None = _setting("output", "for wandb; null: the name of output_dir", None)
    logging_dir: str | None = _setting(
        "output", "of tensorboard; null: tensorboard/ in output_dir", None
    )
    profile_steps: str | None = _setting(
        "output", "first:last of the steps to trace into profile/, such as 3:5", None
    )
    disable_tqdm: bool = _setting("output", "no bar on a terminal", False)
    verbose: bool = _setting("output", "print the whole plan and the data's report first", False)
    export: bool = _setting("output", "write a Hugging Face folder at the end", True)
    export_dtype: Literal["bfloat16", "float16", "float32"] = _setting(
        "output", "of the exported weights", "bfloat16"
    )
    export_rounding: Rounding | None = _setting(
        "output", "of an export in bfloat16: dither or nearest; null: as trained", None
    )
    sample_prompts: list[str] = _setting(
        "output", "greedy samples before and after, in samples.jsonl", []
    )
    sample_max_new_tokens: int = _setting("output", "length of the samples", 48)
    sample_at_eval: bool = _setting("output", "samples at each evaluation as well", False)

    def __post_init__(self) -> None:
        size = self.per_device_train_batch_size
        self._require(
            "per_device_train_batch_size",
            size == AUTO_BATCH_SIZE or (isinstance(size, int) and size >= 1),
            "at least 1, or auto",
        )
        for name in ("gradient_accumulation_steps", "logging_steps"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        counts = ("max_steps", "save_steps", "save_keep_every", "eval_steps")
        for name in (*counts, "num_devices", "max_train_samples"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1, or null")
        ema_ok = self.ema_decay is None or 0 < self.ema_decay < 1
        self._require("ema_decay", ema_ok, "between 0 and 1, or null")
        loss_ok = self.max_loss is None or 0 < self.max_loss < math.inf
        self._require("max_loss", loss_ok, "positive and finite, or null")
        self._require("max_consecutive_skips", self.max_consecutive_skips >= 1, "at least 1")
        self._require("save_total_limit", self.save_total_limit >= 1, "at least 1")
        self._check_saving()
        self._check_evaluation()
        self._require("num_train_epochs", 0 < self.num_train_epochs < math.inf, "positive")
        numbers = ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "z_loss_coef")
        more = ("lr_decay_steps", "router_aux_loss_coef", "router_z_loss_coef")
        for name in (*numbers, *more):
            value = getattr(self, name) or 0
            self._require(name, 0 <= value < math.inf, "a finite number, not negative")
        for name in ("warmup_ratio", "min_lr_ratio", "lr_decay_ratio"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        self._check_by_name()
        self._check_reports()
        for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
            self._require(name, 0 <= getattr(self, name) < 1, "0 to 1, 1 excluded")
        self._require("adam_epsilon", 0 < self.adam_epsilon < math.inf, "positive")
        self._require("max_seq_length", self.max_seq_length >= 2, "at least 2")
        if self.resident_state and self.optim in WHOLE_PARAMETER_OPTIMIZERS:
            raise UserError(
                f"resident_state is for optimizers that update each weight by itself; {self.optim} "
                "reads whole matrices, on the host. Drop resident_state, or use another optim"
            )
        if self.resident_state and self.gradient_route == "host_sum":
            raise UserError(
                "resident_state needs gradients that the devices sum: drop gradient_route host_sum "
                "or resident_state"
            )
        if self.export_rounding == "dither" and self.export_dtype != "bfloat16":
            raise UserError(
                f"export_rounding dither is for exports in bfloat16, export_dtype is "
                f"{self.export_dtype}; drop one of them"
            )
        stated = [name for name in STATED if getattr(self, name) is not None]
        if stated and self.hardware is None:
            raise UserError(
                f"{', '.join(stated)} says what another machine has, and goes with --hardware; "
                "what a run may use of this one: host_memory_budget, device_memory_budget"
            )
        if self.hardware is not None and self.hardware_profile is not None:
            raise UserError(
                "hardware plans for another machine, hardware_profile with this one's rates; give "
                "one of them"
            )
        if self.hardware is not None and not self.dry_run:
            raise UserError("hardware plans for another machine; it goes with --dry_run only")
        if not self.train_file:
            raise UserError("train_file is empty; give at least one file")

    def _check_by_name(self) -> None:
        for name in ("learning_rate_by_name", "weight_decay_by_name"):
            values = getattr(self, name).values()
            ok = all(0 <= value < math.inf for value in values)
            self._require(name, ok, "finite numbers, not negative, by pattern")
        if self.learning_rate_by_name and not self.learning_rate:
            raise UserError(
                "learning_rate_by_name goes with a learning_rate above 0, whose schedule it has"
            )
        if self.weight_decay_by_name and self.optim == "muon":
            raise UserError(
                "weight_decay_by_name is not for muon, which decays the matrices of the layers "
                "alone; drop it, or use another optim"
            )

    def _check_reports(self) -> None:
        known = {"tensorboard", "wandb", "none"}
        self._require(
            "report_to", known.issuperset(self.report_to), f"of {', '.join(sorted(known))}"
        )
        self._require(
            "report_to", "none" not in self.report_to or len(self.report_to) == 1, "none alone"
        )
        _ = self.profiled

    @property
    def trackers(self) -> list[str]:
        """What `report_to` names, each once."""
        return [name for name in dict.fromkeys(self.report_to) if name != "none"]

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First and last step of `profile_steps`."""
        if self.profile_steps is None:
            return None
        first, colon, last = self.profile_steps.partition(":")
        ok = bool(colon) and first.isdecimal() and last.isdecimal()
        self._require(
            "profile_steps", ok and 1 <= int(first) <= int(last), "first:last, such as 3:5"
        )
        return int(first), int(last)

    def _check_saving(self) -> None:
        for name in ("save_minutes", "save_buffer", "stop_within"):
            value = getattr(self, name)
            ok = value is None or 0 < value < math.inf
            self._require(name, ok, "positive and finite, or null")
        if self.save_best and not self.validation_file:
            raise UserError("save_best goes by the held-out loss; give a validation_file")

    def _check_evaluation(self) -> None:
        processes = self.dataset_num_proc
        ok = processes == AUTO or (isinstance(processes, int) and processes >= 1)
        self._require("dataset_num_proc", ok, "at least 1, or auto")
        ok = self.eval_epochs is None or 0 < self.eval_epochs < math.inf
        self._require("eval_epochs", ok, "positive, or null")
        patience = self.early_stopping_patience
        self._require("early_stopping_patience", patience is None or patience >= 1, "at least 1")
        ok = 0 <= self.early_stopping_threshold < math.inf
        self._require("early_stopping_threshold", ok, "a finite number, not negative")
        checked_weights(self.train_file_weights, len(self.train_file))
        checked_metric(self.metric_for_best_model, self.validation_file)
        if patience is not None and not self.validation_file:
            raise UserError(
                "early_stopping_patience goes by the held-out loss; give a validation_file"
            )
        if patience is not None and self.eval_steps is None and self.eval_epochs is None:
            raise UserError(
                "early_stopping_patience counts evaluations, of which there is one, at the end; "
                "give eval_steps or eval_epochs"
            )

    @property
    def best_metric(self) -> str:
        """Key of what decides which checkpoint is the best, and when to stop."""
        return checked_metric(self.metric_for_best_model, self.validation_file)

    @property
    def clip(self) -> float | None:
        """The norm limit, None for no clipping."""
        return self.max_grad_norm or None

    @property
    def device_ids(self) -> tuple[int, ...] | None:
        """GPU indices of `devices`."""
        if self.devices is None:
            return None
        try:
            return tuple(int(part) for part in self.devices.split(","))
        except ValueError:
            raise UserError(f"devices is {self.devices!r}; give indices such as 0,2") from None

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise UserError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")


_HINTS = typing.get_type_hints(TrainArguments)
FIELDS = {f.name: f for f in dataclasses.fields(TrainArguments)}


def parse_arguments(
    argv: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> TrainArguments:
    """Read `--config FILE` and `--name value` pairs.

    A list takes all values up to the next flag; a boolean flag without a value means true.

    Args:
      argv: words of the command line.
      defaults: values of settings that a command does not need, where they are not given.

    Raises:
      UserError: unknown or missing keys, wrong types, an unreadable file.
    """
    given = _command_line(argv)
    values: dict[str, Any] = dict(defaults or {})
    unknown: list[str] = []
    config = given.pop("config", None)
    if config is not None:
        of_file, unknown = _from_file(pathlib.Path(_one("config", config)))
        values.update(of_file)
    unknown += [_unknown(name, "flag --") for name in given if name not in FIELDS]
    if unknown:
        raise UserError("\n".join(unknown))
    values.update(given)
    missing = [
        name
        for name, f in FIELDS.items()
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and name not in values
    ]
    if missing:
        raise UserError(f"missing: {', '.join('--' + name for name in missing)}; see --help")
    return TrainArguments(**{name: convert(name, value) for name, value in values.items()})


def convert(name: str, value: Any) -> Any:
    """Bring a value from the file or the command line to its field's type.

    Raises:
      UserError: it is of another type.
    """
    hint = _HINTS[name]
    # `Literal[...] | None` is of another type than `int | None`.
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if is_union else (hint,)
    if type(None) in options:
        if _scalar(name, value) in (None, "None", "none", "null", "Null", "~", ""):
            return None
        hint = next(option for option in options if option is not type(None))
    elif is_union:  # a number, or words that stand for one
        value = _scalar(name, value)
        words = next(typing.get_args(o) for o in options if typing.get_origin(o) is Literal)
        if isinstance(value, str) and not value[:1].isdecimal() and value[:1] not in ("-", "."):
            return _choice(name, value, (*words, "a number"))
        hint = next(option for option in options if typing.get_origin(option) is not Literal)
    origin = typing.get_origin(hint)
    if origin is list:
        items = value if isinstance(value, list) else [value]
        if typing.get_args(hint) == (float,):
            return [_plain(name, item, float) for item in items]
        return [str(item) for item in items]
    if origin is dict:
        mapping = _mapping(name, _scalar(name, value))
        kind = typing.get_args(hint)[1]
        if kind is float:
            return {key: _plain(f"{name}[{key}]", own, float) for key, own in mapping.items()}
        return mapping
    value = _scalar(name, value)
    if origin is Literal:
        return _choice(name, str(value), typing.get_args(hint))
    return _plain(name, value, hint)


def meaning(name: str) -> str:
    """What a setting is, and what it can be."""
    text: str = FIELDS[name].metadata["help"]
    choices = [str(choice) for choice in _choices(name)]
    named = set(re.findall(r"[\w.]+", text))
    return text if named.issuperset(choices) else f"{text}: {', '.join(choices)}"


def _choices(name: str) -> tuple[Any, ...]:
    """The values of a Literal, also where null is allowed beside them; none for others."""
    hint = _HINTS[name]
    parts = (hint, *typing.get_args(hint))
    return next((typing.get_args(p) for p in parts if typing.get_origin(p) is Literal), ())


def _command_line(argv: Sequence[str]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    name = None
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            if name in given:
                raise UserError(f"--{flag} is given twice; give it once")
            given[name] = [value] if equals else []
        elif name is None:
            raise UserError(f"{word!r} stands before any --flag; settings are --name value pairs")
        else:
            given[name].append(word)
    return given


def _from_file(path: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in a file, and what is to be said of keys that are none."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the config file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `name: value` lines, got {type(content).__name__}")
    values: dict[str, Any] = {}
    unknown = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            unknown.append(_unknown(name, f"key in {path}: "))
        if name in values:
            raise UserError(f"{path} gives {name} twice; give it once")
        values[name] = value
    return values, unknown


def _unknown(name: str, where: str) -> str:
    """What is to be said of a name that is no setting."""
    lower = name.lower()
    if (ours := CALLED_HERE.get(lower)) is not None:
        return f"unknown {where}{name}; here it is called {ours} ({meaning(ours)})"
    if (text := answer(lower)) is not None:
        return f"unknown {where}{name}; {text}"
    near = difflib.get_close_matches(lower, FIELDS, n=3, cutoff=0.65)
    hint = f"did you mean {' or '.join(near)}?" if near else "see --help for all settings"
    return f"unknown {where}{name}; {hint}"


def _one(name: str, value: list[str]) -> str:
    if len(value) != 1:
        raise UserError(f"--{name} takes one value, got {len(value)}: {' '.join(value)}")
    return value[0]


def _scalar(name: str, value: Any) -> Any:
    """The one value of a command-line list; an empty list is a bare flag."""
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        raise UserError(f"{name} takes one value, got {value}; quote it if it holds spaces")
    return value[0] if value else True


def _choice(name: str, value: str, allowed: tuple[Any, ...]) -> str:
    if value not in allowed:
        raise UserError(f"{name} is {value!r}; it can be {', '.join(map(str, allowed))}")
    return value


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be a mapping, got {value!r}")
    return dict(value)


_TRUTH = {"true": True, "yes": True, "on": True, "1": True}
_TRUTH |= {"false": False, "no": False, "off": False, "0": False}


def _plain(name: str, value: Any, kind: type) -> Any:
    """str, bool, int or float; numbers may come as text such as 1e-5."""
    if kind is bool:
        if str(value).lower() not in _TRUTH:
            raise UserError(f"{name} is {value!r}; it can be true/false, yes/no, on/off or 1/0")
        return _TRUTH[str(value).lower()]
    if isinstance(value, bool | list | dict) or value is None:
        raise UserError(f"{name} is {value!r}; a {kind.__name__} is expected")
    if kind is str:
        return str(value)
    try:
        number = float(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}; a number is expected") from None
    if kind is int:
        if not number.is_integer():
            raise UserError(f"{name} is {value!r}; a whole number is expected")
        return int(number)
    return number
