"""A job as the words of a command ask for it, planned for one machine or another."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slidedp_jax.models.config import ModelConfig, named_config
from slidedp_jax.models.frozen_names import frozen_names
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.command_line import COUNTS
from slidedp_jax.planner.disk import DiskUse, disk_use
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.model_names import preset_of
from slidedp_jax.planner.optimizers import (
    AVERAGE_BYTES,
    WHOLE_PARAMETER_OPTIMIZERS,
    OptimizerName,
    state_bytes,
)
from slidedp_jax.planner.search import Plan, plan
from slidedp_jax.planner.whole_updates import (
    update_flops,
    whole_parameters,
    whole_update_note,
    with_update_flops,
)
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.wording import counted, short_count

ROUTES = ("weight_route", "gradient_route")


@dataclass(frozen=True, kw_only=True)
class AskedJob:
    """What is to be planned.

    Attributes:
      args: the words of the command.
      config: the model.
      name: of the model, for reports; None: by its type and size.
      trained: shapes of the parameters that are not frozen.
      optimizer: by name; None where the bytes of its state are given instead.
    """

    args: argparse.Namespace
    config: ModelConfig
    name: str | None
    trained: Mapping[str, tuple[int, ...]]
    optimizer: OptimizerName | None

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that stay as they are."""
        return frozenset(self.config.parameter_shapes().keys() - self.trained.keys())

    @property
    def num_trained(self) -> int:
        """Parameters that are not frozen."""
        return sum(map(math.prod, self.trained.values()))

    def plan(
        self,
        hardware: HardwareProfile,
        *,
        optimizer: OptimizerName | None = None,
        num_rows: int | None = None,
        free: bool = False,
    ) -> Plan:
        """The plan for a machine, or with another optimizer, other rows, or nothing decided.

        Args:
          hardware: the machine.
          optimizer: another than the job's.
          num_rows: of a step, where not as many as the job's.
          free: leave to the search what the command has decided of the strategy.

        Raises:
          PlanError: nothing fits.
        """
        args = self.args
        optimizer = optimizer or self.optimizer
        state_bytes = self.state_bytes(optimizer)
        hardware = with_update_flops(
            hardware,
            update_flops(optimizer, self.trained),
            num_parameters=self.num_trained,
            optimizer_state_bytes=state_bytes,
            num_whole=whole_parameters(optimizer, self.trained),
        )
        whole = optimizer in WHOLE_PARAMETER_OPTIMIZERS
        return plan(
            Workload.from_config(self.config, name=self.name, frozen=self.frozen),
            _batch(num_rows, args.tokens_per_step, args.seq_length, args.document_length),
            hardware,
            update_policy="deferred" if args.max_grad_norm else "eager",
            compute_dtype=args.compute_dtype,
            optimizer_state_bytes=state_bytes,
            device_budget_bytes=_gib(args.device_memory_budget_gib),
            host_budget_bytes=_gib(args.host_memory_budget_gib),
            choices=Choices(
                **{name: None if free else getattr(args, name) for name in (*ROUTES, *COUNTS)}
            ),
            keep_activations=None if free else args.keep_activations,
            # As in training.
            resident_state=False if whole else None if free else args.resident_state,
        )

    def state_bytes(self, optimizer: OptimizerName | None) -> float:
        """Optimizer state per trained parameter, in bytes."""
        trained = self.num_trained
        if optimizer is None:
            total = self.args.optimizer_state_bytes * trained
        else:
            total = state_bytes(optimizer, self.trained)
        if self.args.ema_decay is not None:
            total += AVERAGE_BYTES * trained
        return float(total / trained)

    def notes(self) -> list[str]:
        """What is to be said of its forecast on any machine."""
        found = []
        if frozen := len(self.config.parameter_shapes()) - len(self.trained):
            found.append(
                f"{counted(frozen, 'parameter array')} frozen, {short_count(self.num_trained)} of "
                f"{short_count(self.config.num_parameters)} parameters trained"
            )
        if (of_update := whole_update_note(self.optimizer)) is not None:
            found.append(of_update)
        return found

    def disk(self) -> DiskUse:
        """The room that the run's folder takes."""
        return disk_use(
            self.config.num_parameters,
            self.state_bytes(self.optimizer) * self.num_trained / self.config.num_parameters,
            save_total_limit=self.args.save_total_limit,
            export_dtype=self.args.export_dtype,
            averaged=self.args.ema_decay is not None,
        )


def asked_job(args: argparse.Namespace) -> AskedJob:
    """Check the words of the command that say what the job is.

    Raises:
      ValueError: one of them is wrong.
      FileNotFoundError: there is no such model.
    """
    if not 0 <= args.max_grad_norm < math.inf:
        raise ValueError(f"--max_grad_norm is {args.max_grad_norm}; use 0 for none or a limit > 0.")
    if args.ema_decay is not None and not 0 < args.ema_decay < 1:
        raise ValueError(f"--ema_decay is {args.ema_decay}; it must be between 0 and 1.")
    optimizer = args.optim
    if args.optimizer_state_bytes is None:
        optimizer = optimizer or "adamw"
    elif not 0 <= args.optimizer_state_bytes < math.inf:
        raise ValueError(f"--optimizer_state_bytes is {args.optimizer_state_bytes}; 0 or more.")
    if optimizer in WHOLE_PARAMETER_OPTIMIZERS and args.resident_state:
        raise ValueError(f"--resident_state is not for --optim {optimizer}; drop one of them.")
    _batch(None, args.tokens_per_step, args.seq_length, args.document_length)
    config, name = _model(args.model_name_or_path, args.preset)
    shapes = config.parameter_shapes()
    frozen = frozen_names(shapes, args.freeze)
    return AskedJob(
        args=args,
        config=config,
        name=name,
        trained={name: shape for name, shape in shapes.items() if name not in frozen},
        optimizer=optimizer,
    )


def _model(name_or_path: str | None, preset: str | None) -> tuple[ModelConfig, str | None]:
    """The configuration, and the name where it is a known model's."""
    if name_or_path is not None:
        path = Path(name_or_path).expanduser()
        if path.exists():
            return read_config(path.parent if path.name == "config.json" else path), None
        try:
            preset = preset_of(name_or_path)
        except ValueError as error:
            raise FileNotFoundError(f"There is no folder {name_or_path} here. {error}") from None
    assert preset is not None
    name = preset_of(preset)
    return named_config(name), name


def _batch(
    num_rows: int | None, tokens_per_step: int, seq_length: int, document_length: int | None
) -> BatchShape:
    if seq_length < 1 or tokens_per_step < 1 or tokens_per_step % seq_length:
        raise ValueError(
            f"--tokens_per_step is {tokens_per_step}; it must be a multiple of --seq_length "
            f"{seq_length}."
        )
    documents = None
    if document_length is not None:
        if not 1 <= document_length <= seq_length:
            raise ValueError(
                f"--document_length is {document_length}; it must be between 1 and --seq_length "
                f"{seq_length}."
            )
        full, rest = divmod(seq_length, document_length)
        documents = (document_length,) * full + ((rest,) if rest else ())
    return BatchShape(
        num_rows=num_rows or tokens_per_step // seq_length,
        seq_length=seq_length,
        document_lengths=documents,
        documents_per_row=None if documents is None else len(documents),
    )


def _gib(value: float | None) -> float | None:
    return None if value is None else value * GIB
