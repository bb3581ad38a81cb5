"""Tool calls and tool definitions in the one form that chat templates are written for.

That form is transformers': a call is `{"type": "function", "function": {"name": ..., "arguments":
{...}}}` with whatever else its row says (`id`), its arguments an object. Public data also has them
as JSON text (the OpenAI wire form, and what Arrow needs where arguments differ in type), without
the wrapper, or the whole list as text; all of these are brought to the form, with the order of
keys, and anything else is an error with its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, final

from slidedp_jax.data.fields import Fields, describe

_OF_THE_CALL = ("id", "type", "index")
"""Keys of a call that do not belong to its function."""

_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Spellings of `arguments` in public data."""

_BESIDE_ARGUMENTS = ("name", "description", "strict", *_OF_THE_CALL)

_THOUGHT = re.compile(r"\s*(<think>.*?</think>)(.*)", re.DOTALL)

_NULL_ARGUMENTS = (
    "the arguments of {} tool calls hold null, which the model learns to say; files written with "
    "`to_json` of datasets have it for keys that a row never had, take these out"
)
_NULL_DEFINITIONS = (
    "{} tool definitions hold null, which the model sees; files written with `to_json` of datasets "
    "have it for keys that a row never had, take these out"
)
_MEANT_TO_BE_NULL = ("default", "const", "example")


@final
class Arguments(dict[str, Any]):
    """Arguments of a call: an object to templates that walk or `tojson` it, else its JSON text.

    Some templates (DeepSeek's) add arguments to a text or print them as they are, since they expect
    JSON text. They get it.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def calls_in(fields: Fields, value: Any, key: str) -> list[dict[str, Any]]:
    """The calls of a `tool_calls` value; none for null, an empty list or object and empty text.

    Raises:
      RowError: it is no list of calls.
    """
    calls = fields.from_json(value, key)
    if calls is None or calls == {}:
        return []
    if not isinstance(calls, list):
        raise fields.error(key, f"must be a list of calls, got {describe(calls)}")
    as_text = isinstance(value, str)
    return [_call(fields, call, f"{key}[{i}]", as_text) for i, call in enumerate(calls)]


def calls_said(fields: Fields, value: Any, key: str) -> tuple[str, list[dict[str, Any]]]:
    """What a turn says that is nothing but calls: its thought and its calls.

    Args:
      fields: of the row.
      value: a call or a list of calls, as objects or JSON text; `<think>...</think>` may precede
        the text.
      key: its place.

    Raises:
      RowError: it is neither.
    """
    thought, as_text = "", isinstance(value, str)
    if isinstance(value, str) and (match := _THOUGHT.fullmatch(value)):
        thought, value = match.groups()
    calls = fields.from_json(value, key)
    if isinstance(calls, list) and calls:
        return thought, [_call(fields, c, f"{key}[{i}]", as_text) for i, c in enumerate(calls)]
    if not isinstance(calls, dict):
        raise fields.error(
            key, f"must be a call with name and arguments, or a list of them, got {describe(calls)}"
        )
    return thought, [_call(fields, calls, key, as_text)]


def looks_like_calls(text: Any) -> bool:
    """Whether a text can be read as a call or as a list of calls."""
    if not isinstance(text, str) or not text.lstrip().startswith(("{", "[")):
        return False
    try:
        said = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return False
    calls = said if isinstance(said, list) else [said]
    return bool(calls) and all(
        isinstance(call, dict) and "name" in call and any(name in call for name in _ARGUMENTS[:2])
        for call in calls
    )


def _call(fields: Fields, value: Any, key: str, as_text: bool) -> dict[str, Any]:
    as_text = as_text or isinstance(value, str)
    call = fields.from_json(value, key)
    if not isinstance(call, dict):
        raise fields.error(key, f"must be an object, a call, got {describe(call)}")
    call = {name: entry for name, entry in call.items() if entry is not None}
    if "function" not in call:
        rest = {name: call[name] for name in call if name in _OF_THE_CALL and name != "type"}
        function = {name: call[name] for name in call if name not in _OF_THE_CALL}
        return {**rest, "type": "function", "function": _function(fields, function, key, as_text)}
    beside = [name for name in _ARGUMENTS if name in call]
    if beside:
        raise fields.error(f"{key}.{beside[0]}", "stands beside `function`; put it into it")
    key = f"{key}.function"
    as_text = as_text or isinstance(call["function"], str)
    function = fields.from_json(call["function"], key)
    if not isinstance(function, dict):
        raise fields.error(key, f"must be an object, got {describe(function)}")
    whole = call if "type" in call else {"type": "function", **call}
    return whole | {"function": _function(fields, function, key, as_text)}


def _function(fields: Fields, given: dict[str, Any], key: str, as_text: bool) -> dict[str, Any]:
    function = {name: entry for name, entry in given.items() if entry is not None}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        found = describe(name) if name != "" else "an empty string"
        raise fields.error(f"{key}.name", f"must be the name of what is called, got {found}")
    fields.checked_text(name, f"{key}.name")
    spelled = [spelling for spelling in _ARGUMENTS if spelling in function]
    if len(spelled) > 1:
        raise fields.error(key, f"has arguments twice, as {spelled}; keep one of them")
    if not spelled:
        others = [entry for entry in function if entry not in _BESIDE_ARGUMENTS]
        if others:
            raise fields.error(key, f"has no `arguments` but {others}; name them `arguments`")
        return {**function, "arguments": Arguments()}
    arguments = _arguments(fields, function[spelled[0]], f"{key}.{spelled[0]}", as_text)
    return {
        "arguments" if entry == spelled[0] else entry: arguments if entry == spelled[0] else value
        for entry, value in function.items()
    }


def _arguments(fields: Fields, value: Any, key: str, as_text: bool) -> Arguments:
    if isinstance(value, str) and not value.strip():
        return Arguments()
    arguments = fields.from_json(value, key)
    if not isinstance(arguments, dict):
        raise fields.error(
            key, f"must be an object, or the JSON text of one, got {describe(arguments)}"
        )
    if not as_text and not isinstance(value, str):
        fields.remark(_NULL_ARGUMENTS, int(_holds_null(arguments)), 1)
    return Arguments(arguments)


def tool_definitions(fields: Fields) -> list[dict[str, Any]] | None:
    """The definitions in `tools`, as objects; None where there is none.

    Raises:
      RowError: it is no list of objects.
    """
    given, key = fields.get("tools"), fields.column("tools")
    tools = fields.from_json(given, key)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise fields.error(key, f"must be a list, got {describe(tools)}")
    definitions = []
    for index, tool in enumerate(tools):
        definitions.append(_definition(fields, tool, f"{key}[{index}]"))
        if not isinstance(given, str) and not isinstance(tool, str):
            found = _holds_null(definitions[-1], _MEANT_TO_BE_NULL)
            fields.remark(_NULL_DEFINITIONS, int(found), 1)
    return definitions or None


def _definition(fields: Fields, value: Any, key: str) -> dict[str, Any]:
    """A tool whose `function`, `parameters` and `properties` are objects, not text."""
    tool = _object(fields, value, key)
    if isinstance(tool.get("function"), str | dict):
        place = f"{key}.function"
        function = _object(fields, tool["function"], place)
        return tool | {"function": _with_parameters(fields, function, place)}
    return _with_parameters(fields, tool, key)


def _with_parameters(fields: Fields, function: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(function.get("parameters"), str | dict):
        return function
    key = f"{key}.parameters"
    parameters = _object(fields, function["parameters"], key)
    if isinstance(parameters.get("properties"), str):
        properties = _object(fields, parameters["properties"], f"{key}.properties")
        parameters = parameters | {"properties": properties}
    return function | {"parameters": parameters}


def _object(fields: Fields, value: Any, key: str) -> dict[str, Any]:
    found = fields.from_json(value, key)
    if not isinstance(found, dict):
        raise fields.error(
            key, f"must be an object, or the JSON text of one, got {describe(found)}"
        )
    return found


def _holds_null(value: Any, allowed: Collection[str] = ()) -> bool:
    """Whether a key anywhere in it has the value null."""
    if isinstance(value, dict):
        return any(
            (entry is None and name not in allowed) or _holds_null(entry, allowed)
            for name, entry in value.items()
        )
    return isinstance(value, list) and any(_holds_null(entry, allowed) for entry in value)
