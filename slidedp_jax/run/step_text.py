"""A step's figures in words that fit a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slidedp_jax.run.time_text import clock
from slidedp_jax.wording import short_count

_FIRST_TO_GO = ("learning_rate", "grad_norm", "tokens_per_second")
"""Figures that a bar does without where there is no room; never the loss."""


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Name in the record -> text of what a step's record has, in the order of reading."""
    values = {name: record.get(name) for name in _FORMATS}
    return {name: _FORMATS[name](value) for name, value in values.items() if value is not None}


def _digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {_digits(value)}",
    "grad_norm": lambda value: f"norm {_digits(value)}",
    "learning_rate": lambda value: f"lr {value:.2g}",
    "tokens_per_second": lambda value: f"{short_count(value)} tok/s",
}


def left(seconds: float | None) -> str:
    """What remains of a run; None: not known yet."""
    return "-:-- left" if seconds is None else f"{clock(seconds)} left"


def step_line(record: Mapping[str, Any], num_steps: int) -> str:
    """The line that stays: at most 80 columns for all that is usual."""
    parts = [f"step {record['step']}/{num_steps}", *figures(record).values()]
    return "  ".join([*parts, left(record["eta_s"])])


def fitting(texts: Mapping[str, str], room: int) -> str:
    """As many of a step's figures as there is room for, the loss in any case."""
    shown = dict(texts)
    for name in _FIRST_TO_GO:
        if len(" | ".join(shown.values())) <= room:
            break
        shown.pop(name, None)
    return " | ".join(shown.values())
