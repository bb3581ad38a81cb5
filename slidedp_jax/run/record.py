"""`run.json`: with which settings, plan and versions a run was started last.

The parts of it that a resumed run compares lie in every checkpoint too, so that a damaged file does
not put the checkpoints out of reach.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from slidedp_jax.checkpoint.record import ROUNDING, read_record
from slidedp_jax.errors import UserError
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.whole_files import write_whole

NAME = "run.json"
IN_CHECKPOINT = "run"
"""Entry of a checkpoint's `extra` that holds what `essential` gives."""

_LATER = (
    "started",
    "base_model",
    "chat_template",
    "fingerprints",
    "data_counts",
    "starts",
    "expert_products",
)
"""Entries that earlier versions did not write: local time of the first start, name of the model
that it began with, text of a template of its own, fingerprints of rows and tokenizer, numbers of
rows and tokens, all its starts, kernels of experts' products."""


def essential(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run needs of a record."""
    return {
        "arguments": record["arguments"],
        "strategy": record["plan"]["chosen"]["strategy"],
        "planned_for": record["planned_for"],
        ROUNDING: record[ROUNDING],
        "versions": record["versions"],
        "xla_flags": record["xla_flags"],
        **{name: record[name] for name in _LATER},
    }


def understood(saved: Mapping[str, Any]) -> dict[str, Any]:
    """With all entries, and as this version reads them."""
    full: dict[str, Any] = dict.fromkeys(_LATER) | dict(saved)
    if full["started"] is None and not full["arguments"].get("warmup_steps"):
        # It was 0 by default, which meant that `warmup_ratio` counts.
        full["arguments"] = {**full["arguments"], "warmup_steps": None}
    return full


def write_run(root: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Replace the record of a run in one instant."""
    write_whole(root / NAME, json.dumps(_finite(record), indent=1, default=str))


def _finite(value: Any) -> Any:
    """The same with text for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_run(
    root: pathlib.Path, newest: pathlib.Path | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """What `essential` gives of the run in a folder, and notes for the user.

    Args:
      root: the output folder.
      newest: its newest complete checkpoint, if it has one.

    Returns:
      None where only checkpoints of an earlier version are left, which do not hold their settings.

    Raises:
      UserError: the folder holds no run, or one of which nothing can be read.
    """
    path = root / NAME
    try:
        record = json.loads(path.read_bytes().decode())
        arguments = record["arguments"]
        return understood(
            {
                "arguments": dict(arguments),
                "strategy": record.get("plan", {}).get("chosen", {}).get("strategy"),
                "planned_for": record.get("planned_for"),
                ROUNDING: WeightRounding.recorded(record.get(ROUNDING)).record(),
                "versions": record.get("versions", {}),
                "xla_flags": record.get("xla_flags"),
                **{name: record.get(name) for name in _LATER},
            }
        ), []
    except FileNotFoundError:
        why = "is missing"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"is damaged ({str(error) or type(error).__name__})"
    if newest is None:
        if why == "is missing":
            raise UserError(
                f"output_dir {root} holds files but no run of slidedp_jax; give an empty or new "
                "folder"
            )
        raise UserError(
            f"{path} {why}, and there is no checkpoint to go on from: --overwrite_output_dir "
            "starts over, or give another output_dir"
        )
    saved = read_record(newest)["extra"].get(IN_CHECKPOINT)
    if saved is not None:
        return understood(saved), [
            f"{path} {why}; the run's settings are taken from {newest} instead"
        ]
    if why == "is missing":
        return None, [f"{path} {why}: the settings of this command are not compared with the run's"]
    raise UserError(
        f"{path} {why}. The checkpoints are whole, but do not hold the run's settings: move "
        f"{path.name} away to go on from {newest} with the settings of this command"
    )
