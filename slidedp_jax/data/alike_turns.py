"""Answers of a long conversation that stand in its text as measured ones do.

Finding an answer by rendering beginnings of the conversation takes a time that grows with all of
it, for each answer. Most answers of a long conversation stand between the same words of the
template, though, so a few are measured and the others found by what surrounds them: the template's
text from the end of what is said before to the answer, and from the answer to what is said next,
is character for character that of measured answers whose message, neighbours and turn are of the
same make. What is said stands where one more rendering has private strings in its place, if all
else of that rendering is the text. Where it is not, or an answer differs, it is measured.

White space around what is said counts as part of it, as far as it is printed (a third rendering,
without it, tells that from the template's own): else hardly two answers of some conversations
would stand alike. Prompts may end in white space, too, and templates may cut it off where a message
is the last one. So each kind of it before words has to be seen in measured answers, and each kind
after words is tried in the last place; an answer with another kind is measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

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

_NEAREST = 2
"""Characters of white space that are compared; a prompt may end with one or two more."""

# Private-use characters, as in `spans`.
_OPEN, _SHUT, _ZERO = "\ue3b1", "\ue3b2", "\ue3c0"
_PLACES = re.compile(f"{_OPEN}([{_ZERO}-{chr(ord(_ZERO) + 9)}]+){_SHUT}")
_END_THINK = "</think>"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str | None]
"""Messages, and whether with a generation prompt -> text; None where the template fails."""

_Place = Literal["own", "after"]
_Kind = tuple[str, frozenset[str]]
"""Kind of white space: the characters next to what the template prints, and all that there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """What surrounds an answer.

    Attributes:
      printed: its words were found in the text. These and the words before and after include the
        white space around them that is printed.
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
      render: its template.
      special_texts: of which one may close a message.
    """

    def __init__(
        self,
        row: ChatRow,
        text: str,
        render: Render,
        special_texts: tuple[str, ...],
    ):
        self._messages, self._render = row.messages, render
        self._forms = [_form(message) for message in row.messages]
        self._makes = _makes(self._forms)
        self._text = text
        words = _words_in(row.messages, text, render)
        # Whether white space after these answers belongs to them is a question of their last word.
        self._closed = {
            i for i, span in words.items() if text[slice(*span)].endswith(special_texts)
        }
        self._blanks = _printed_blanks(row.messages, self._forms, text, words, render)
        self._words = {
            i: (begin - len(self._blank(i)[0]), end + len(self._blank(i)[1]))
            for i, (begin, end) in words.items()
        }
        in_order = sorted(self._words, key=lambda index: self._words[index])
        self._rank = {index: rank for rank, index in enumerate(in_order)}
        self._rules: dict[object, Counter[_Rule]] = {}
        self._kinds: Counter[tuple[object, _Rule, _Place, _Kind]] = Counter()
        self._kept: dict[tuple[_Form, _Kind], bool] = {}

    def span_of(self, index: int) -> Span | None:
        """Span of an answer by what was measured; None where that does not tell."""
        room = self._room(index)
        if room is None or index in self._closed:
            return None
        rules = self._rules.get(self._makes[index], Counter())
        found = {
            span
            for rule, times in rules.items()
            if times >= CONFIRMED
            and (span := self._by(rule, index, room)) is not None
            and all(self._kinds[key] >= CONFIRMED for key in self._kinds_around(index, rule))
        }
        if len(found) != 1 or not (self._ends_last(index - 1) and self._ends_last(index)):
            return None
        return found.pop()

    def measured(self, index: int, span: Span) -> None:
        """Learn from an answer where it stands."""
        room = self._room(index)
        if room is None or index in self._closed or not _within(span, room):
            return
        if (rule := self._rule(index, room, span)) is None:
            return
        rules = self._rules.setdefault(self._makes[index], Counter())
        if rule in rules or len(rules) < _MOST_RULES:
            rules[rule] += 1
            self._kinds.update(self._kinds_around(index, rule))

    def _blank(self, index: int) -> tuple[str, str]:
        return self._blanks.get(index, ("", ""))

    def _kinds_around(
        self, index: int, rule: _Rule
    ) -> Iterator[tuple[object, _Rule, _Place, _Kind]]:
        """Which kinds of white space there are before an answer's words and before the next."""
        make = self._makes[index]
        yield make, rule, "own", _beginning(self._blank(index)[0])
        yield make, rule, "after", _beginning(self._blank(index + 1)[0])

    def _ends_last(self, index: int) -> bool:
        """Whether white space after a message is printed where the message is the last, too."""
        blank = self._blank(index)[1]
        if not blank:
            return True
        key = self._forms[index], _ending(blank)
        if key not in self._kept:
            prompts = (False,) if self._forms[index].role == "assistant" else (False, True)
            self._kept[key] = all(self._printed_last(index, blank, prompt) for prompt in prompts)
        return self._kept[key]

    def _printed_last(self, index: int, blank: str, prompt: bool) -> bool:
        place = f"{_OPEN}{_ZERO}{_SHUT}"
        earlier, message = self._messages[:index], self._messages[index]
        texts = [
            self._render([*earlier, message | {"content": place + end}], prompt)
            for end in ("", blank)
        ]
        return texts[0] is not None and texts[1] == texts[0].replace(place, place + blank)

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


def _beginning(blank: str) -> _Kind:
    return blank[:_NEAREST], frozenset(blank)


def _ending(blank: str) -> _Kind:
    return blank[-_NEAREST:], frozenset(blank)


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


def _words_in(messages: Messages, text: str, render: Render) -> dict[int, Span]:
    """Where the words of messages stand: all but reasoning and white space around them.

    Empty where a rendering with private strings in their place does not tell.
    """
    if _OPEN in text:
        return {}
    said = {i: span for i, message in enumerate(messages) if (span := _words(message["content"]))}
    replaced = [_with_place(message, i, said.get(i)) for i, message in enumerate(messages)]
    pieces = _pieces(render(replaced, False))
    if pieces is None or not text.startswith(pieces.first):
        return {}
    found: dict[int, Span] = {}
    at = len(pieces.first)
    for index, between in pieces.others:
        begin, end = said[index]
        words = messages[index]["content"][begin:end]
        if index in found or not text.startswith(words + between, at):
            return {}
        found[index] = (at, at + len(words))
        at += len(words) + len(between)
    return found if at == len(text) else {}


def _printed_blanks(
    messages: Messages,
    forms: Sequence[_Form],
    text: str,
    words: dict[int, Span],
    render: Render,
) -> dict[int, tuple[str, str]]:
    """White space around words that is the message's own and printed, before and after them.

    Of messages that have some, as far as a rendering without it tells; not what stands between
    reasoning and words, or between words and calls.
    """
    said = {i: _words(messages[i]["content"]) for i in words}
    own = {
        i: (
            "" if forms[i].reasons else messages[i]["content"][: span[0]],
            "" if forms[i].calls else messages[i]["content"][span[1] :],
        )
        for i, span in said.items()
        if span is not None
    }
    if not any(map(any, own.values())):
        return {}
    bare = [
        _with_place(message, i, said.get(i), own.get(i, ("", "")))
        for i, message in enumerate(messages)
    ]
    pieces = _pieces(render(bare, False))
    in_order = sorted(words, key=lambda index: words[index])
    if pieces is None or [index for index, _ in pieces.others] != in_order:
        return {}
    edges = [0, *(edge for index in in_order for edge in words[index]), len(text)]
    begins, ends = dict[int, str](), dict[int, str]()
    for number, template in enumerate([pieces.first, *(between for _, between in pieces.others)]):
        before = in_order[number - 1] if number else None
        after = in_order[number] if number < len(in_order) else None
        end = "" if before is None else own[before][1]
        begin = "" if after is None else own[after][0]
        printed = _parted(text[edges[2 * number] : edges[2 * number + 1]], template, end, begin)
        if before is not None:
            ends[before] = printed[0]
        if after is not None:
            begins[after] = printed[1]
    return {index: (begins[index], ends[index]) for index in in_order}


def _parted(between: str, template: str, end: str, begin: str) -> tuple[str, str]:
    """How much of the white space at an end and a beginning is printed around the template's.

    A template may cut off their outer characters. None where there are several ways.
    """
    blank = len(between) - len(template)
    ways = {
        (end[:left], begin[len(begin) - (blank - left) :])
        for left in range(max(0, blank - len(begin)), min(blank, len(end)) + 1)
        if between[left : left + len(template)] == template
        and between.startswith(end[:left])
        and between.endswith(begin[len(begin) - (blank - left) :])
    }
    return ways.pop() if len(ways) == 1 else ("", "")


class _Pieces(NamedTuple):
    """What is printed before the first private string, and each one's number and what follows."""

    first: str
    others: list[tuple[int, str]]


def _pieces(text: str | None) -> _Pieces | None:
    if text is None:
        return None
    first, *rest = _PLACES.split(text)  # text, number, text, number, ..., text
    numbers = (int("".join(str(ord(digit) - ord(_ZERO)) for digit in n)) for n in rest[::2])
    return _Pieces(first, list(zip(numbers, rest[1::2], strict=True)))


def _words(content: str) -> Span | None:
    reasoned = content.rfind(_END_THINK)
    begin = 0 if reasoned < 0 else reasoned + len(_END_THINK)
    words = content[begin:].strip()
    if not words:
        return None
    begin += len(content[begin:]) - len(content[begin:].lstrip())
    return begin, begin + len(words)


def _with_place(
    message: dict[str, Any], index: int, words: Span | None, without: tuple[str, str] = ("", "")
) -> dict[str, Any]:
    """A message with a private string that names it instead of its words.

    Args:
      message: one.
      index: its number.
      words: where they stand in its content, if it has any.
      without: white space before and after them that is left out as well.
    """
    if words is None:
        return message
    number = "".join(chr(ord(_ZERO) + int(digit)) for digit in str(index))
    content = message["content"]
    begin, end = words[0] - len(without[0]), words[1] + len(without[1])
    return message | {"content": f"{content[:begin]}{_OPEN}{number}{_SHUT}{content[end:]}"}
