"""What a conversation says and its chat template did not print.

Templates drop what they do not know or do not want: tool calls (Llama 3), reasoning of earlier
turns (Qwen3), all reasoning (DeepSeek-R1's), a content beside tool calls (Llama 3.1), tools, system
texts. The model then does not learn it, and only a count can say so.

What a message says is cut into pieces: its content, its reasoning, names and values of its calls.
Each must have a place of its own in the rendered text, so that what is dropped here and printed
there is missed. Most templates print all pieces as they are and in order, which one pass over the
text finds. Only where that fails, pieces may stand in any order, escaped (JSON, HTML) and with
white space changed; the longest is placed first, so that no short one takes its place.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slidedp_jax.data.chat_template import Span
from slidedp_jax.data.remarks import Remark
from slidedp_jax.data.rows import ChatRow
from slidedp_jax.data.spans import Located

_UNPRINTED = "in what the chat template prints; the model does not"
CONTENT = f"the content of {{}} assistant messages does not occur {_UNPRINTED} learn it"
REASONING = f"the reasoning of {{}} assistant messages does not occur {_UNPRINTED} learn it"
CALLS = f"the tool calls of {{}} assistant messages do not occur {_UNPRINTED} learn them"
SYSTEM = f"the system text of {{}} conversations does not occur {_UNPRINTED} see it"
GIVEN = f"the content of {{}} user and tool messages does not occur {_UNPRINTED} see it"
NAME = f"the name of {{}} messages does not occur {_UNPRINTED} see it"
TOOLS = f"the tool definitions of {{}} conversations do not occur {_UNPRINTED} see them"

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_THINK, _END_THINK = "<think>", "</think>"

Piece = tuple[str, ...]
"""A text that must be printed, in each of the spellings that templates usually give it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """Something that a conversation says.

    Attributes:
      kind: the remark that counts its like.
      message: index of the message that says it.
      pieces: all of them must be printed.
      area: between which characters of the text.
      own_area: no other message stands there.
    """

    kind: str
    message: int
    pieces: list[Piece]
    area: Span
    own_area: bool


def unprinted(row: ChatRow, located: Located) -> list[Remark]:
    """How many things of each kind a conversation says, and how many of them are not printed."""
    said = list(_all_said(row, located))
    missing = _not_in_order(located.text, said)
    if missing:
        missing = _not_anywhere(located, said, missing)
    remarks = [
        Remark(
            text=kind,
            count=len({said[i].message for i in missing if said[i].kind == kind}),
            of=len({thing.message for thing in said if thing.kind == kind}),
        )
        for kind in dict.fromkeys(thing.kind for thing in said)
    ]
    return [*remarks, *_names(row, located), *_tools(row, located, said, missing)]


def _all_said(row: ChatRow, located: Located) -> Iterator[_Said]:
    """Contents, reasoning and calls, message by message."""
    spans = located.said
    exact = spans is not None and not located.marked
    begins = [*(begin for begin, _ in spans or ()), len(located.text)]
    ends = [0, *(end for _, end in spans or ())]
    answers = 0  # so far
    for index, message in enumerate(row.messages):
        area = (0, len(located.text))
        if message["role"] == "assistant":
            if spans is not None:
                area = spans[answers] if exact else (ends[answers], begins[answers + 1])
            for kind, pieces in _pieces_of(message):
                yield _Said(kind=kind, message=index, pieces=pieces, area=area, own_area=exact)
            answers += 1
        elif content := message["content"].strip():
            if spans is not None:
                area = (ends[answers], begins[answers])
            system = message["role"] in ("system", "developer")
            yield _Said(
                kind=SYSTEM if system else GIVEN,
                message=0 if system else index,  # system texts count once
                pieces=[(content,)],
                area=area,
                own_area=False,
            )


def _pieces_of(message: dict[str, Any]) -> Iterator[tuple[str, list[Piece]]]:
    """What an assistant message says, kind by kind."""
    thoughts, words = _parted(message["content"])
    thoughts += [message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str)]
    calls = [piece for call in message.get("tool_calls", ()) for piece in _call_pieces(call)]
    thoughts = list(dict.fromkeys(text for thought in thoughts if (text := thought.strip())))
    found: dict[str, list[Piece]] = {
        REASONING: [(thought,) for thought in thoughts],
        CONTENT: [(text,) for word in words if (text := word.strip())],
        CALLS: calls,
    }
    for kind, pieces in found.items():
        if pieces:
            yield kind, pieces


def _parted(content: str) -> tuple[list[str], list[str]]:
    """What stands inside and outside of `<think>` blocks; the first may lack its beginning."""
    thoughts, words, position = [], [], 0
    while (end := content.find(_END_THINK, position)) >= 0:
        begin = content.rfind(_THINK, position, end)
        words.append(content[position : max(begin, position)])
        thoughts.append(content[position if begin < 0 else begin + len(_THINK) : end])
        position = end + len(_END_THINK)
    return thoughts, [*words, content[position:]]


def _call_pieces(call: dict[str, Any]) -> Iterator[Piece]:
    function = call["function"]
    yield (function["name"],)
    yield from _leaves(function["arguments"])


def _leaves(value: Any) -> Iterator[Piece]:
    """Keys and values of arguments, which templates print in forms of their own."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _leaves(str(key))
            yield from _leaves(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _leaves(entry)
    elif value != "":
        as_json = json.dumps(value, ensure_ascii=False)
        as_json = as_json[1:-1] if isinstance(value, str) else as_json
        yield (as_json,) if as_json == str(value) else (as_json, str(value))


def _not_in_order(text: str, said: Sequence[_Said]) -> list[int]:
    """Indices of what is not found in its area, after all that was found before it."""
    missing, cursor = [], 0
    for index, thing in enumerate(said):
        begin, end = thing.area
        at = max(cursor, begin)
        for piece in thing.pieces:
            found = (_find(text, spelling, at, end) for spelling in piece)
            place = next((place for place in found if place is not None), None)
            if place is None:
                missing.append(index)
                break
            at = place[1]
        else:
            cursor = at
    return missing


def _find(text: str, piece: str, begin: int, end: int) -> Span | None:
    """First place of a piece that is not in the middle of a word."""
    at = text.find(piece, begin, end)
    while at >= 0:
        after = at + len(piece)
        if not (text[at - 1 : at].isalnum() and text[after : after + 1].isalnum()):
            return at, after
        at = text.find(piece, at + 1, end)
    return None


def _not_anywhere(located: Located, said: Sequence[_Said], missing: Sequence[int]) -> list[int]:
    """Indices of what has no place, in any order, where it and its like may stand."""
    still: list[int] = []
    for group in dict.fromkeys(_group(said[i]) for i in missing):
        members = [i for i, thing in enumerate(said) if _group(thing) == group]
        if group is not None:
            begin, end = said[members[0]].area
            still += _unplaced([located.text[begin:end]], said, members)
        elif others := _unplaced(_outside(located), said, members):
            # Last, anywhere that all else leaves free: a tool's answer may stand within a turn.
            still += _unplaced([located.text], said, others, first=range(len(said)))
    return still


def _group(thing: _Said) -> int | None:
    return thing.message if thing.own_area else None


def _outside(located: Located) -> list[str]:
    """The parts of the text that belong to no assistant message, as far as that is known."""
    if located.said is None or located.marked:
        return [located.text]
    edges = [0, *(edge for span in located.said for edge in span), len(located.text)]
    return [located.text[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]


def _unplaced(
    parts: Sequence[str],
    said: Sequence[_Said],
    members: Sequence[int],
    first: Sequence[int] = (),
) -> list[int]:
    """Which members have a piece without a place of its own in the parts.

    Args:
      parts: of the text.
      said: all that the conversation says.
      members: indices of what is looked for; the longest piece is placed first.
      first: what takes its places before, if it finds them.
    """
    free = _Places(parts)
    spellings = {i: [_all_spellings(piece) for piece in said[i].pieces] for i in {*members, *first}}
    # What is nowhere takes no places with the rest of its pieces.
    lost = {i for i, pieces in spellings.items() if not all(map(free.occurs, pieces))}
    for wanted in ([i for i in first if i not in members], members):
        # Of equals, reasoning comes last: it is what templates drop.
        pieces = [
            (-len(piece[0]), said[i].kind == REASONING, i, piece)
            for i in wanted
            if i not in lost
            for piece in spellings[i]
        ]
        for *_, index, piece in sorted(pieces, key=lambda entry: entry[:3]):
            if not free.take(piece):
                lost.add(index)
    return [i for i in members if i in lost]


class _Places:
    """A text without white space, whose characters are given away."""

    def __init__(self, parts: Sequence[str]):
        words = [word for part in parts for word in (*part.split(), "\0")]
        self._text = "".join(words)
        self._taken = bytearray(len(self._text))
        self._begins_word = bytearray(len(self._text) + 1)
        for begin in itertools.accumulate(map(len, words)):
            self._begins_word[begin] = 1
        self._search_from: dict[str, int] = {}

    def occurs(self, spellings: Sequence[str]) -> bool:
        """Whether a piece stands there at all."""
        return any(self._find(spelling, 0) >= 0 for spelling in spellings)

    def take(self, spellings: Sequence[str]) -> bool:
        """Give a free place to a piece, if there is one."""
        return any(map(self._take, spellings))

    def _find(self, spelling: str, at: int) -> int:
        """As `str.find`, for places that are not in the middle of a word."""
        while (at := self._text.find(spelling, at)) >= 0:
            end = at + len(spelling)
            if not (self._joined(at) and self._joined(end)):
                break
            at += 1
        return at

    def _joined(self, place: int) -> bool:
        around = self._text[max(0, place - 1) : place + 1]
        return not self._begins_word[place] and len(around) == 2 and around.isalnum()

    def _take(self, spelling: str) -> bool:
        at = self._find(spelling, self._search_from.get(spelling, 0))
        while at >= 0:
            end = at + len(spelling)
            if (used := self._taken.find(1, at, end)) < 0:
                self._taken[at:end] = b"\1" * len(spelling)
                self._search_from[spelling] = end
                return True
            free = self._taken.find(0, used)
            at = -1 if free < 0 else self._find(spelling, free)
        self._search_from[spelling] = len(self._text)
        return False


def _all_spellings(piece: Piece) -> list[str]:
    """As it is, and escaped as JSON, Python and HTML do; without white space."""
    spellings = [
        spelling
        for text in piece
        for spelling in (
            text,
            json.dumps(text, ensure_ascii=False)[1:-1],
            json.dumps(text)[1:-1],
            repr(text)[1:-1],
            html.escape(text),
            html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;"),  # Jinja's
        )
    ]
    return list(dict.fromkeys(map(_without_blanks, spellings)))


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _names(row: ChatRow, located: Located) -> list[Remark]:
    """Who speaks, where messages say so beside their role."""
    names = [
        name
        for message in row.messages
        if message["role"] != "tool" and isinstance(name := message.get("name"), str) and name
    ]
    lost = sum(name not in located.text for name in names)
    return [Remark(text=NAME, count=lost, of=len(names))] if names else []


def _tools(
    row: ChatRow, located: Located, said: Sequence[_Said], missing: Sequence[int]
) -> list[Remark]:
    """Whether the names of all tools stand outside of what the assistant says."""
    names = [name for tool in row.tools or () if (name := _tool_name(tool))]
    if not names:
        return []
    text = "\0".join(_outside(located))
    lost = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is None for name in names)
    if not lost and any(thing.kind == CALLS and not thing.own_area for thing in said):
        # The names must stand there once more than what has been found of the calls says them.
        tools = _Said(
            kind=TOOLS,
            message=0,
            pieces=[(name,) for name in names],
            area=(0, len(text)),
            own_area=False,
        )
        found = [i for i in range(len(said)) if i not in missing]
        lost = bool(_unplaced([text], [*said, tools], [len(said)], first=found))
    return [Remark(text=TOOLS, count=int(lost), of=1)]


def _tool_name(tool: dict[str, Any]) -> str | None:
    function = tool.get("function")
    name = (function if isinstance(function, dict) else tool).get("name")
    return name if isinstance(name, str) else None
