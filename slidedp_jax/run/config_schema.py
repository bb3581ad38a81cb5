"""JSON schema of `--config` files, for editors and for checks before a job is queued.

It says what a value's form is, as `arguments` reads it; what values go with each other, and with
model and data, only a dry run can say.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, Literal

from slidedp_jax.run.arguments import FIELDS, TrainArguments, meaning

_NUMBER = {"type": "string", "pattern": r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"}
"""Numbers as text: many readers of YAML take 1e-5 for text, which is understood."""


def config_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12) of a YAML or JSON file of settings."""
    hints = typing.get_type_hints(TrainArguments)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "slidedp train --config",
        "description": "Settings of a training run; the command line wins over the file.",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(name, hints[name]) for name in FIELDS},
    }


def config_schema_text() -> str:
    """The same as text, with a newline at its end."""
    return json.dumps(config_schema(), indent=1) + "\n"


def _property(name: str, hint: Any) -> dict[str, Any]:
    field = FIELDS[name]
    found: dict[str, Any] = {"description": meaning(name)} | _form(hint)
    if field.default is not dataclasses.MISSING:
        found["default"] = field.default
    elif field.default_factory is not dataclasses.MISSING:
        found["default"] = field.default_factory()
    return found


def _form(hint: Any) -> dict[str, Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return {"anyOf": [form for part in parts for form in _forms(part)]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is list:  # one value stands for a list of one
        item = _form(parts[0])
        return {"anyOf": [{"type": "array", "items": item}, item]}
    if origin is dict:
        return {"type": "object"} | (
            {} if parts[1] is Any else {"additionalProperties": _form(parts[1])}
        )
    return {"anyOf": forms} if len(forms := _forms(hint)) > 1 else forms[0]


def _forms(kind: Any) -> list[dict[str, Any]]:
    if kind in (int, float):
        return [{"type": "integer" if kind is int else "number"}, _NUMBER]
    if kind is bool:
        return [{"type": "boolean"}, {"enum": ["true", "yes", "on", "false", "no", "off", 0, 1]}]
    if kind is type(None):
        return [{"type": "null"}]
    return [{"type": "string"}] if kind is str else [_form(kind)]
