"""All settings of a training run as the help of commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slidedp_jax.run.arguments import FIELDS, meaning
from slidedp_jax.wording import wrapped

_NAMES = 30
"""Columns of the settings' names."""


def help_text(columns: int = 80) -> str:
    """All settings by group, with types and defaults, in so many columns."""
    lines = ["usage: slidedp train [--config FILE.yaml] --name value ...", ""]
    for group in dict.fromkeys(f.metadata["group"] for f in FIELDS.values()):
        names = [name for name, f in FIELDS.items() if f.metadata["group"] == group]
        lines += [f"{group}:", *help_lines(names, columns), ""]
    return "\n".join(lines)


def help_lines(names: Sequence[str], columns: int = 80) -> list[str]:
    """What each of these settings is, broken to fit."""
    texts = [f"  --{name:<{_NAMES}}{meaning(name)}{_default(FIELDS[name])}" for name in names]
    return [wrapped(text, columns, _NAMES + 4) for text in texts]


def _default(f: dataclasses.Field[object]) -> str:
    if f.default is not dataclasses.MISSING:
        return f" [{f.default}]"
    return " [required]" if f.default_factory is dataclasses.MISSING else ""
