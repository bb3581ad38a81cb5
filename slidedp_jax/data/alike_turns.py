"""Answers of a long conversation that stand in its text as measured ones do.

Finding an answer by rendering beginnings of the conversation takes a time that grows with all of
it, for each answer. Most answers of a long conversation stand between the same words of the
template, though, so a few are measured and the others found by what surrounds them: the template's
text from the end of what is said before to the answer, and from the answer to what is said next,
is character for character that of measured answers whose message, neighbours and turn are of the
same make. What is said stands where one more rendering has private strings in its place, if all
else of that rendering is the text. Where it is not, or an answer differs, it is measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from slidedp_jax.data.chat_template import Span
from slidedp_jax.data.rows import ChatRow

MANY = 8
"""Answers up to which each is measured."""

CONFIRMED = 2
"""Measured answers that must agree before another is found by them."""

_MOST_RULES = 64
"""Ways to stand of one make, beyond which every answer of it is measured."""

_ENDS = 4
"""Characters of an answer that are compared where what it begins or ends with is its own."""

# Private-use characters, as in `spans`.
_OPEN, _SHUT, _ZERO = "\ue3b1", "\ue3b2", "\ue3c0"
_PLACES = re.compile(f"{_OPEN}([{_ZERO}-{chr(ord(_ZERO) + 9)}]+){_SHUT}")
_END_THINK = "</think>"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """What surrounds an answer.

    Attributes:
      printed: its words were found in the text.
      head: from the end of the words before, to the answer.
      lead: from the answer's beginning to its words, or to its end where these are not known; of
        reasoning that may stand there the first characters.
      close: from the end of its words, or its beginning, to its end; of calls that may stand there
        the last characters.
      tail: from its end to the words that follow.
    """

    printed: bool
    head: str
    lead: str
    close: str
    tail: str


@final
class AlikeTurns:
    """The answers of one conversation that were measured, and those that stand as they do.

    Args:
      row: the conversation.
      text: it, rendered.
      render: messages -> text, None where the template does not take them.
    """

    def __init__(self, row: ChatRow, text: str, render: Callable[[Messages], str | None]):
        self._forms = [_form(message) for message in row.messages]
        self._makes = _makes(self._forms)
        self._text = text
        self._words = _words_in(row.messages, text, render)
        in_order = sorted(self._words, key=lambda index: self._words[index])
        self._rank = {index: rank for rank, index in enumerate(in_order)}
        self._rules: dict[object, Counter[_Rule]] = {}

    def span_of(self, index: int) -> Span | None:
        """Span of an answer by what was measured; None where that does not tell."""
        room = self._room(index)
        if room is None:
            return None
        rules = self._rules.get(self._makes[index], Counter())
        found = {
            span
            for rule, times in rules.items()
            if times >= CONFIRMED and (span := self._by(rule, index, room)) is not None
        }
        return found.pop() if len(found) == 1 else None

    def measured(self, index: int, span: Span) -> None:
        """Learn from an answer where it stands."""
        room = self._room(index)
        if room is None or not _within(span, room):
            return
        if (rule := self._rule(index, room, span)) is None:
            return
        rules = self._rules.setdefault(self._makes[index], Counter())
        if rule in rules or len(rules) < _MOST_RULES:
            rules[rule] += 1

    def _by(self, rule: _Rule, index: int, room: Span) -> Span | None:
        """The span where the rule puts it, if all that surrounds it is as the rule says."""
        span = room[0] + len(rule.head), room[1] - len(rule.tail)
        fits = _within(span, room) and self._rule(index, room, span) == rule
        return span if fits else None

    def _rule(self, index: int, room: Span, span: Span) -> _Rule | None:
        """What surrounds an answer with that span; None where its words are not in it."""
        text, words, form = self._text, self._words.get(index), self._forms[index]
        if words is not None and not _within(words, span):
            return None
        lead = span[0], span[1] if words is None else words[0]
        close = span[0] if words is None else words[1], span[1]
        if words is None or form.reasons:
            lead = lead[0], min(lead[1], lead[0] + _ENDS)
        if words is None or form.calls:
            close = max(close[0], close[1] - _ENDS), close[1]
        return _Rule(
            printed=words is not None,
            head=text[room[0] : span[0]],
            lead=text[slice(*lead)],
            close=text[slice(*close)],
            tail=text[span[1] : room[1]],
        )

    def _room(self, index: int) -> Span | None:
        """From the end of the words before an answer to the beginning of the words after it."""
        before, after = self._words.get(index - 1), self._words.get(index + 1)
        if before is None or (after is None and index + 1 < len(self._forms)):
            return None
        room = before[1], len(self._text) if after is None else after[0]
        # Nothing else that was said stands between.
        ranks = [self._rank[i] for i in (index - 1, index, index + 1) if i in self._rank]
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            return None
        return room if room[0] <= room[1] else None


def _within(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] <= inner[1] <= outer[1]


class _Form(NamedTuple):
    """Of what make a message is."""

    role: str
    keys: frozenset[str]
    empty: bool
    reasons: bool
    calls: bool


def _form(message: dict[str, Any]) -> _Form:
    content = message["content"]
    reasons = _END_THINK in content or any(key in message for key in _REASONING_KEYS)
    return _Form(
        role=message["role"],
        keys=frozenset(message),
        empty=not content.strip(),
        reasons=reasons,
        calls="tool_calls" in message,
    )


def _makes(forms: Sequence[_Form]) -> list[object]:
    """What a template may tell messages apart by, beside what they say and their number.

    That is the message, two before and two after it, all that its turn has had (from the last
    question on), and whether it is the last turn.
    """
    users = [index for index, form in enumerate(forms) if form.role == "user"]
    last_question = users[-1] if users else -1
    makes: list[object] = []
    turn: frozenset[_Form] = frozenset()
    for index, form in enumerate(forms):
        turn = frozenset({form}) if form.role == "user" else turn | {form}
        around = (tuple(forms[max(0, index - 2) : index]), *forms[index : index + 3])
        makes.append((turn, around, index > last_question))
    return makes


def _words_in(
    messages: Messages, text: str, render: Callable[[Messages], str | None]
) -> dict[int, Span]:
    """Where the words of messages stand: all but reasoning and white space around them.

    Empty where a rendering with private strings in their place does not tell.
    """
    if _OPEN in text:
        return {}
    said = {i: span for i, message in enumerate(messages) if (span := _words(message["content"]))}
    replaced = [_with_place(message, i, said.get(i)) for i, message in enumerate(messages)]
    other = render(replaced)
    if other is None:
        return {}
    pieces = _PLACES.split(other)  # text, number, text, number, ..., text
    found: dict[int, Span] = {}
    at = len(pieces[0])
    if not text.startswith(pieces[0]):
        return {}
    for number, between in zip(pieces[1::2], pieces[2::2], strict=True):
        index = int("".join(str(ord(digit) - ord(_ZERO)) for digit in number))
        begin, end = said[index]
        words = messages[index]["content"][begin:end]
        if index in found or not text.startswith(words + between, at):
            return {}
        found[index] = (at, at + len(words))
        at += len(words) + len(between)
    return found if at == len(text) else {}


def _words(content: str) -> Span | None:
    reasoned = content.rfind(_END_THINK)
    begin = 0 if reasoned < 0 else reasoned + len(_END_THINK)
    words = content[begin:].strip()
    if not words:
        return None
    begin += len(content[begin:]) - len(content[begin:].lstrip())
    return begin, begin + len(words)


def _with_place(message: dict[str, Any], index: int, words: Span | None) -> dict[str, Any]:
    """A message with a private string that names it instead of its words."""
    if words is None:
        return message
    number = "".join(chr(ord(_ZERO) + int(digit)) for digit in str(index))
    content = message["content"]
    return message | {
        "content": f"{content[: words[0]]}{_OPEN}{number}{_SHUT}{content[words[1] :]}"
    }
