"""Messages in the forms that public data has them -> the messages that templates are written for.

A turn is `role` and `content` (OpenAI, ms-swift) or `from` and `value` (sharegpt). A content may be
a list of text parts (`content_parts.py`). A turn that is
nothing but calls (`function_call`, `tool_call`, ...) becomes an assistant message with
`tool_calls`; it belongs to the turn before it where that is the assistant's too, since a model says
all of it before it is answered. Whatever else a message says is kept, under its own key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slidedp_jax.data.content_parts import text_of_parts
from slidedp_jax.data.fields import Fields, describe
from slidedp_jax.data.tool_calls import calls_in, calls_said, looks_like_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "function": "tool",
    "ipython": "tool",
}
_CALLS = ("function_call", "function_calls", "tool_call", "tool_calls")
"""Roles of turns that are nothing but calls."""

_KNOWN = {role: role for role in ROLES} | _OTHER_NAMES | dict.fromkeys(_CALLS, "assistant")
_FLAGS = ("train", "weight", "loss")
REASONING = ("reasoning_content", "reasoning", "thinking")

_TRAIN_ON_OTHERS = (
    "{} [message that is not the assistant's asks|messages that are not the assistant's ask] to be "
    "learnt and [is|are] not"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A message as templates take it.

    Attributes:
      message: without null entries (templates test for presence) and without flags.
      train: an assistant message that is to be learnt.
      calls_apart: the row had its calls as turns of their own.
    """

    message: dict[str, Any]
    train: bool
    calls_apart: bool = False


def read_turns(fields: Fields, turns: Any, key: str) -> list[Turn]:
    """The turns of a list of messages in any form.

    Args:
      fields: of the row.
      turns: the list.
      key: its place.

    Raises:
      RowError: something else than a list of messages; with the place of what is wrong.
    """
    turns = fields.from_json(turns, key)
    if not isinstance(turns, list):
        raise fields.error(key, f"must be a list of at least one message, got {describe(turns)}")
    joined: list[Turn] = []
    for index, given in enumerate(turns):
        turn = _read_turn(fields, given, f"{key}[{index}]")
        if joined and _belongs_to(turn, joined[-1]):
            turn = _with_calls(joined.pop(), turn)
        joined.append(turn)
    return joined


def with_system(fields: Fields, turns: list[Turn]) -> list[Turn]:
    """The turns after the text of the column `system`, unless they begin with that text."""
    if not (system := fields.optional_text("system")):
        return turns
    first = turns[0].message if turns else {}
    if first.get("role") in ("system", "developer") and first["content"] == system:
        return turns
    return [Turn(message={"role": "system", "content": system}, train=False), *turns]


def _belongs_to(turn: Turn, before: Turn) -> bool:
    return (
        turn.calls_apart
        and before.message["role"] == "assistant"
        and (before.calls_apart or "tool_calls" not in before.message)
        and before.train == turn.train
        and not turn.message["content"]  # it has no thought of its own
    )


def _with_calls(before: Turn, turn: Turn) -> Turn:
    calls = [*before.message.get("tool_calls", ()), *turn.message["tool_calls"]]
    return Turn(
        message=before.message | {"tool_calls": calls}, train=before.train, calls_apart=True
    )


def _read_turn(fields: Fields, turn: Any, key: str) -> Turn:
    if not isinstance(turn, dict):
        raise fields.error(key, f"must be an object with role and content, got {describe(turn)}")
    who, what = "role", "content"
    if turn.get("role") is None and turn.get("from") is not None:
        who, what = "from", "value"
    said = turn.get(who)
    if not isinstance(said, str) or said not in _KNOWN:
        raise fields.error(f"{key}.{who}", f"is {said!r}; known are {list(_KNOWN)}")
    role = _KNOWN[said]
    if said == "function" and turn.get("name") is None and looks_like_calls(turn.get(what)):
        raise fields.error(
            f"{key}.{who}",
            "is 'function', but what it says looks like a call, not like a result; say "
            "'function_call' for what the model says and 'tool' for what it is answered",
        )
    flags = [name for name in _FLAGS if name in turn and _is_flag(name, turn[name])]
    message = {
        "role" if name == who else "content" if name == what else name: value
        for name, value in turn.items()
        if value is not None and name not in flags
    }
    message["role"] = role
    if "tool_calls" in message or "function_call" in message:
        _settle_calls(fields, message, key)
    apart = said in _CALLS and "tool_calls" not in message
    if apart:
        thought, calls = calls_said(fields, turn.get(what), f"{key}.{what}")
        message |= {"content": thought, "tool_calls": calls}
    else:
        _check_content(fields, message, f"{key}.{what}")
    for name in REASONING:
        if message.get(name) == "":  # no reasoning; templates may test for the key
            del message[name]
    train = role == "assistant"
    if flags:
        train = _train(fields, turn, flags, role, key)
    return Turn(message=message, train=train, calls_apart=apart)


def _settle_calls(fields: Fields, message: dict[str, Any], key: str) -> None:
    """`tool_calls` in the templates' form, `function_call` (older) among them; none: no key."""
    calls = calls_in(fields, message.get("tool_calls"), f"{key}.tool_calls")
    place = f"{key}.function_call"
    older = fields.from_json(message.pop("function_call", None), place)
    if older and not (isinstance(older, dict) and all(v is None for v in older.values())):
        if calls:
            raise fields.error(place, "stands beside `tool_calls`; keep one of them")
        _, calls = calls_said(fields, older, place)
    if calls:
        message["tool_calls"] = calls
    else:
        message.pop("tool_calls", None)


def _check_content(fields: Fields, message: dict[str, Any], key: str) -> None:
    content, calls = message.get("content"), "tool_calls" in message
    if isinstance(content, list) and (content or not calls):
        message["content"] = text_of_parts(fields, content, key)
    elif content not in (None, []):
        message["content"] = fields.checked_text(content, key)
    elif message["role"] == "assistant" and calls:
        message["content"] = ""
    else:
        raise fields.error(key, "is missing or null; a message needs a string")


def _is_flag(name: str, value: Any) -> bool:
    """Whether an entry says if the message is learnt; a `loss` may also be a measured one."""
    return name != "loss" or isinstance(value, bool)


def _train(fields: Fields, turn: dict[str, Any], flags: list[str], role: str, key: str) -> bool:
    """Whether to learn the message, by the first of its flags that is not null."""
    for name in flags:
        if (flag := turn[name]) is None:
            continue
        if flag not in (True, False):  # 1 and 0 compare equal to these
            raise fields.error(f"{key}.{name}", f"must be true or false, got {flag!r}")
        if flag and role != "assistant":
            fields.remark(_TRAIN_ON_OTHERS)
        return role == "assistant" and bool(flag)
    return role == "assistant"
