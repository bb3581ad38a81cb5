"""Rows: records whose fields were recognised and checked.

Field names may be mapped (`columns`), fields that mean nothing here are ignored, null counts as
absent. What is wrong is said with the place and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slidedp_jax.data.records import Record, RowError
from slidedp_jax.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "text",
    "input_ids",
    "labels",
    "attention_mask",
    "tools",
    "chat_template_kwargs",
)
"""Fields that mean something; `columns` may map each to another name in the files."""

_ABSENT = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation. `train[i]` is False where an assistant message must not be learnt."""

    source: str
    messages: list[dict[str, Any]]
    train: tuple[bool, ...]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRow:
    """A prompt and what should follow it."""

    source: str
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """A document; `whole_file` when it is a `.txt` file."""

    source: str
    text: str
    whole_file: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """Token ids made elsewhere; labels in the Hugging Face convention or None (all supervised)."""

    source: str
    input_ids: list[int]
    labels: list[int] | None = None


Row = ChatRow | CompletionRow | TextRow | TokenRow


def parse_row(record: Record, columns: Mapping[str, str] | None = None) -> Row:
    """The row in a record; the first kind whose fields are present and not null wins.

    Kinds, in that order: `input_ids` (with `labels`, `attention_mask`), `messages`, `conversations`
    (sharegpt: from/value), `prompt` and `completion` (two strings or two lists of messages),
    `instruction` (with `input`, `system`) and `output` (made into a conversation), `text`.

    Args:
      record: what `read_records` gave.
      columns: our field name -> name in the file, for files with other names.

    Raises:
      RowError: nothing usable in the record; the message has its place and the field.
    """
    if record.fields is None:
        raise RowError(f"{record.source}: {record.error}")
    if record.whole_file:
        return TextRow(source=record.source, text=record.fields["text"], whole_file=True)
    fields = _Fields(record, columns or {})
    if fields.has("input_ids"):
        return _token_row(fields)
    if fields.has("messages"):
        return _chat_row(fields, fields.get("messages"), "messages")
    if fields.has("conversations"):
        return _chat_row(fields, _from_sharegpt(fields), "conversations")
    if fields.has("prompt") or fields.has("completion"):
        return _completion_row(fields)
    if fields.has("instruction"):
        return _instruction_row(fields)
    if fields.has("text"):
        return TextRow(source=record.source, text=fields.text("text"))
    raise RowError(
        f"{record.source}: no usable field among {sorted(record.fields)}; a row needs `messages`, "
        "`conversations`, `prompt` and `completion`, `instruction` and `output`, `text`, or "
        "`input_ids`, not null (other names can be mapped with `columns`)"
    )


class _Fields:
    """Fields of one record under our names, with errors that name the place and the field."""

    def __init__(self, record: Record, columns: Mapping[str, str]):
        assert record.fields is not None
        unknown = sorted(set(columns) - set(FIELDS))
        if unknown:
            raise UserError(f"columns maps {unknown}, which are not fields; fields are {FIELDS}")
        self.source = record.source
        self._fields = record.fields
        self._columns = columns

    def column(self, name: str) -> str:
        return self._columns.get(name, name)

    def get(self, name: str) -> Any:
        return self._fields.get(self.column(name))

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def error(self, key: str, what: str) -> RowError:
        return RowError(f"{self.source}: `{key}` {what}")

    def text(self, name: str) -> str:
        value = self._fields.get(self.column(name), _ABSENT)
        if value is _ABSENT:
            raise self.error(self.column(name), "is missing")
        return self.checked_text(value, self.column(name))

    def checked_text(self, value: Any, key: str) -> str:
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {_describe(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.error(key, "holds half of a surrogate pair, which is not text") from error
        return value


def _describe(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _token_row(fields: _Fields) -> TokenRow:
    input_ids = _integers(fields, "input_ids")
    labels = _integers(fields, "labels") if fields.has("labels") else None
    if labels is not None and len(labels) != len(input_ids):
        raise fields.error(
            fields.column("labels"), f"has {len(labels)} entries, input_ids has {len(input_ids)}"
        )
    if fields.has("attention_mask"):
        mask = _integers(fields, "attention_mask")
        if len(mask) != len(input_ids):
            raise fields.error(
                fields.column("attention_mask"),
                f"has {len(mask)} entries, input_ids has {len(input_ids)}",
            )
        input_ids = [token for token, seen in zip(input_ids, mask, strict=True) if seen]
        if labels is not None:
            labels = [label for label, seen in zip(labels, mask, strict=True) if seen]
    return TokenRow(source=fields.source, input_ids=input_ids, labels=labels)


def _integers(fields: _Fields, name: str) -> list[int]:
    values = fields.get(name)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise fields.error(fields.column(name), "must be a flat list of integers")
    if values and not -(2**63) <= min(values) <= max(values) < 2**63:
        raise fields.error(fields.column(name), "has integers beyond 64 bits")
    return values


def _completion_row(fields: _Fields) -> Row:
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        checked = _chat_row(fields, [*prompt, *completion], "prompt + completion")
        train = tuple(keep and index >= len(prompt) for index, keep in enumerate(checked.train))
        return replace(checked, train=train)
    return CompletionRow(
        source=fields.source, prompt=fields.text("prompt"), completion=fields.text("completion")
    )


def _instruction_row(fields: _Fields) -> ChatRow:
    request = fields.text("instruction")
    if fields.has("input") and (given := fields.text("input")):
        request = f"{request}\n\n{given}"
    messages = [
        {"role": "user", "content": request},
        {"role": "assistant", "content": fields.text("output")},
    ]
    if fields.has("system") and (system := fields.text("system")):
        messages.insert(0, {"role": "system", "content": system})
    return _chat_row(fields, messages, "instruction")


def _from_sharegpt(fields: _Fields) -> list[Any]:
    turns = fields.get("conversations")
    if not isinstance(turns, list):
        raise fields.error("conversations", f"must be a list, got {_describe(turns)}")
    messages = []
    if fields.has("system") and (system := fields.text("system")):
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn:
            who = turn["from"]
            if who not in _SHAREGPT_ROLES:
                raise fields.error(
                    f"conversations[{index}].from", f"is {who!r}; known are {list(_SHAREGPT_ROLES)}"
                )
            rest = {key: turn[key] for key in ("train", "weight") if key in turn}
            turn = {"role": _SHAREGPT_ROLES[who], "content": turn.get("value"), **rest}
        messages.append(turn)
    return messages


def _chat_row(fields: _Fields, messages: Any, key: str) -> ChatRow:
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else _describe(messages)
        raise fields.error(key, f"must be a list of at least one message, got {found}")
    checked = [_message(fields, message, f"{key}[{i}]") for i, message in enumerate(messages)]
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise fields.error("tools", f"is a string but not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise fields.error("tools", f"must be a list, got {_describe(tools)}")
    template_kwargs = fields.get("chat_template_kwargs") or {}
    if not isinstance(template_kwargs, dict):
        raise fields.error("chat_template_kwargs", "must be an object")
    return ChatRow(
        source=fields.source,
        messages=[message for message, _ in checked],
        train=tuple(train for _, train in checked),
        tools=tools or None,
        template_kwargs=template_kwargs,
    )


def _message(fields: _Fields, message: Any, key: str) -> tuple[dict[str, Any], bool]:
    """The message without null entries (templates test for presence), and whether to learn it."""
    if not isinstance(message, dict):
        raise fields.error(
            key, f"must be an object with role and content, got {_describe(message)}"
        )
    role = message.get("role")
    if role not in ROLES:
        raise fields.error(f"{key}.role", f"is {role!r}; known are {list(ROLES)}")
    train = message.get("train", message.get("weight"))
    if train not in (None, True, False):  # 1 and 0 compare equal to these
        raise fields.error(f"{key}.train", f"must be true or false, got {train!r}")
    kept = {k: v for k, v in message.items() if v is not None and k not in ("train", "weight")}
    if "content" in kept:
        kept["content"] = fields.checked_text(kept["content"], f"{key}.content")
    elif role == "assistant" and kept.get("tool_calls"):
        kept["content"] = ""
    else:
        raise fields.error(f"{key}.content", "is missing or null; a message needs a string")
    return kept, role == "assistant" and train is not False and train != 0
