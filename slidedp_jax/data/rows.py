"""Rows: records whose fields were recognised and checked.

Field names may be mapped (`columns`), fields that mean nothing here are ignored, null counts as
absent. What is wrong is said with the place and the field; what means something and is not read in
a row of its kind is remarked upon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slidedp_jax.data.conversations import Turn, read_turns, with_system
from slidedp_jax.data.examples import IGNORED
from slidedp_jax.data.fields import Fields, describe
from slidedp_jax.data.records import Record, RowError
from slidedp_jax.data.remarks import Remark
from slidedp_jax.data.tool_calls import tool_definitions

_OF_CONVERSATIONS = ("system", "tools", "chat_template_kwargs")
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Beside `input_ids`: 1 where a token is learnt (TRL's names, and the common one)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation. `train[i]` is False where an assistant message must not be learnt."""

    source: str
    messages: list[dict[str, Any]]
    train: tuple[bool, ...]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRow:
    """A prompt and what should follow it."""

    source: str
    prompt: str
    completion: str
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """A document; `whole_file` when it is a `.txt` file."""

    source: str
    text: str
    whole_file: bool = False
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """Token ids made elsewhere; labels in the Hugging Face convention or None (all supervised)."""

    source: str
    input_ids: list[int]
    labels: list[int] | None = None
    remarks: tuple[Remark, ...] = ()


Row = ChatRow | CompletionRow | TextRow | TokenRow


def parse_row(record: Record, columns: Mapping[str, str] | None = None) -> Row:
    """The row in a record; the first kind whose fields are present and not null wins.

    Kinds, in that order: `input_ids` (with `labels`, `attention_mask` and masks of what is learnt),
    `messages`, `conversations` (either has messages of any form that `conversations.py` knows),
    `prompt` and `completion` (two strings or two lists of messages), `instruction` (with `input`,
    `history`) and `output` (made into a conversation), `text`. Conversations of any kind may have
    `system`, `tools` and `chat_template_kwargs` beside them.

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
    fields = Fields(record, columns or {})
    for names, build in _KINDS:
        name = next(filter(fields.has, names), None)
        if name is not None:
            row, read = build(fields)
            _remark_unread(fields, name, read)
            return replace(row, remarks=tuple(fields.remarks)) if fields.remarks else row
    raise RowError(
        f"{record.source}: no usable field among {sorted(record.fields)}; a row needs `messages`, "
        "`conversations`, `prompt` and `completion`, `instruction` and `output`, `text`, or "
        "`input_ids`, not null (other names can be mapped with `columns`)"
    )


def _remark_unread(fields: Fields, name: str, read: tuple[str, ...]) -> None:
    """What would mean something in a row of another kind."""
    for other in fields.given():
        if other != name and other not in read:
            unread, beside = fields.column(other), fields.column(name)
            fields.remark(f"`{unread}` beside `{beside}` is not read ({{}} [row|rows])")


def _token_row(fields: Fields) -> tuple[TokenRow, tuple[str, ...]]:
    read = ("labels", "attention_mask", *_MASKS)
    input_ids = _integers(fields, "input_ids")
    lists = {name: _integers(fields, name, name != "labels") for name in read if fields.has(name)}
    for name, values in lists.items():
        if len(values) != len(input_ids):
            raise fields.error(
                fields.column(name), f"has {len(values)} entries, input_ids has {len(input_ids)}"
            )
    labels = lists.get("labels")
    for name in _MASKS:
        if name in lists:
            told = input_ids if labels is None else labels
            labels = [
                label if learnt else IGNORED
                for label, learnt in zip(told, lists[name], strict=True)
            ]
    if "attention_mask" in lists:
        mask = lists["attention_mask"]
        input_ids = [token for token, seen in zip(input_ids, mask, strict=True) if seen]
        if labels is not None:
            labels = [label for label, seen in zip(labels, mask, strict=True) if seen]
    return TokenRow(source=fields.source, input_ids=input_ids, labels=labels), read


def _integers(fields: Fields, name: str, or_booleans: bool = False) -> list[int]:
    values = fields.get(name)
    allowed = {int, bool} if or_booleans else {int}
    if not isinstance(values, list) or not allowed.issuperset(map(type, values)):
        raise fields.error(fields.column(name), "must be a flat list of integers")
    if values and not -(2**63) <= min(values) <= max(values) < 2**63:
        raise fields.error(fields.column(name), "has integers beyond 64 bits")
    return values


def _messages_row(fields: Fields, name: str = "messages") -> tuple[ChatRow, tuple[str, ...]]:
    key = fields.column(name)
    turns = with_system(fields, read_turns(fields, fields.get(name), key))
    return _chat_row(fields, turns, key), _OF_CONVERSATIONS


def _conversations_row(fields: Fields) -> tuple[ChatRow, tuple[str, ...]]:
    return _messages_row(fields, "conversations")


def _completion_row(fields: Fields) -> tuple[Row, tuple[str, ...]]:
    prompt, completion = fields.get("prompt"), fields.get("completion")
    pair = ("prompt", "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = [
            replace(turn, train=False)
            for turn in read_turns(fields, prompt, fields.column("prompt"))
        ]
        said = read_turns(fields, completion, fields.column("completion"))
        turns = [*with_system(fields, asked), *said]
        row = _chat_row(fields, turns, "prompt + completion")
        return row, (*pair, *_OF_CONVERSATIONS)
    prompt, completion = fields.text("prompt"), fields.text("completion")
    return CompletionRow(source=fields.source, prompt=prompt, completion=completion), pair


def _instruction_row(fields: Fields) -> tuple[ChatRow, tuple[str, ...]]:
    request = fields.text("instruction")
    if given := fields.optional_text("input"):
        request = f"{request}\n\n{given}"
    said = [*_history(fields), (request, fields.text("output"))]
    turns = []
    for question, answer in said:
        turns.append(Turn(message={"role": "user", "content": question}, train=False))
        turns.append(Turn(message={"role": "assistant", "content": answer}, train=True))
    row = _chat_row(fields, with_system(fields, turns), fields.column("instruction"))
    return row, ("input", "output", "history", *_OF_CONVERSATIONS)


def _history(fields: Fields) -> list[tuple[str, str]]:
    """Earlier questions and answers of an alpaca row."""
    key = fields.column("history")
    history = fields.from_json(fields.get("history"), key)
    if history is None:
        return []
    if not isinstance(history, list):
        raise fields.error(
            key, f"must be a list of [question, answer] pairs, got {describe(history)}"
        )
    pairs = []
    for index, pair in enumerate(history):
        place = f"{key}[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"{len(pair)} entries" if isinstance(pair, list) else describe(pair)
            raise fields.error(place, f"must be a [question, answer] pair, got {found}")
        question, answer = (
            fields.checked_text(text, f"{place}[{part}]") for part, text in enumerate(pair)
        )
        pairs.append((question, answer))
    return pairs


def _chat_row(fields: Fields, turns: list[Turn], key: str) -> ChatRow:
    if not turns:
        raise fields.error(key, "must be a list of at least one message, got an empty list")
    kwargs_key = fields.column("chat_template_kwargs")
    template_kwargs = fields.from_json(fields.get("chat_template_kwargs"), kwargs_key)
    if not isinstance(template_kwargs, dict | None):
        raise fields.error(kwargs_key, f"must be an object, got {describe(template_kwargs)}")
    return ChatRow(
        source=fields.source,
        messages=[turn.message for turn in turns],
        train=tuple(turn.train for turn in turns),
        tools=tool_definitions(fields),
        template_kwargs=template_kwargs or {},
    )


def _text_row(fields: Fields) -> tuple[TextRow, tuple[str, ...]]:
    return TextRow(source=fields.source, text=fields.text("text")), ()


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Fields], tuple[Row, tuple[str, ...]]]], ...] = (
    (("input_ids",), _token_row),
    (("messages",), _messages_row),
    (("conversations",), _conversations_row),
    (("prompt", "completion"), _completion_row),
    (("instruction",), _instruction_row),
    (("text",), _text_row),
)
"""Fields that tell a kind -> what makes its row, and which further fields it reads."""
