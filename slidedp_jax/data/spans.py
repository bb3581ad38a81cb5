"""Which characters of a rendered conversation the assistant said.

With `{% generation %}` in the template, what it encloses. Without, two methods that check
themselves:

1. Incremental rendering: the conversation up to an assistant message, with the generation prompt,
   is text P; with that message it is F. If F begins with P and the whole rendering begins with F,
   the message is F without P, up to and with the token that closes it.
2. Substitution, for templates that render an earlier message differently once others follow (Qwen3
   removes old reasoning, Mistral moves the system text): the message's content is replaced by a
   private string S and the whole is rendered again. If the two renderings differ in one place only
   and S is all that stands there, that place is the message, with what `_Rendering` finds to be its
   lead and its close.

What neither can separate is refused; nothing is guessed. In long conversations, where each of these
renderings takes long, answers are found by others that stand alike (`alike_turns`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slidedp_jax.data.alike_turns import MANY, AlikeTurns, Messages
from slidedp_jax.data.chat_template import ChatTemplate, ChatTemplateError, Span
from slidedp_jax.data.records import RowError
from slidedp_jax.data.rows import ChatRow

# Private-use characters: no case, no white space, and in no data that is text.
_STAND_IN = "\ue3a1\ue3a7\ue3a5\ue3ad"

CHOICES = (
    "add `{% generation %}` and `{% endgeneration %}` to the template around what the assistant "
    "says, name another template file, or set the loss on all tokens"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A rendered conversation.

    Attributes:
      text: all of it.
      learnt: spans of what is to be learnt, in order.
      said: span of each assistant message; None where they were not looked for, or where the
        template's markers do not enclose one span for each.
      marked: the spans are those of the template's markers, which may leave out what a message says
        beside the marked part.
    """

    text: str
    learnt: list[Span]
    said: list[Span] | None
    marked: bool = False


def locate(
    row: ChatRow,
    template: ChatTemplate,
    special_texts: Sequence[str],
    template_kwargs: Mapping[str, Any] | None = None,
) -> Located:
    """Text of a conversation, and the spans of its assistant messages.

    Args:
      row: the conversation; `row.train` says which messages are to be learnt.
      template: how it is rendered.
      special_texts: texts of the tokenizer's special tokens, one of which may close a message.
      template_kwargs: variables for the template, overruled by the row's own.

    Raises:
      RowError: the template failed on the row, or its messages cannot be separated.
    """
    try:
        rendering = _Rendering(row, template, special_texts, template_kwargs)
        if not any(row.train):
            return Located(text=rendering.text, learnt=[], said=None)
        if template.has_generation_markers:
            return _marked(row, template, rendering.template_kwargs)
        said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        spans = rendering.spans_of(said)
    except ChatTemplateError as error:
        raise RowError(f"{row.source}: {error}") from error
    for before, after in itertools.pairwise(spans):
        if after[0] < before[1]:
            raise _inseparable(row, template, said[1])
    learnt = [span for i, span in zip(said, spans, strict=True) if row.train[i]]
    return Located(text=rendering.text, learnt=learnt, said=spans)


def _marked(row: ChatRow, template: ChatTemplate, template_kwargs: Mapping[str, Any]) -> Located:
    said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    text, spans = template.render_marked(
        row.messages, tools=row.tools, template_kwargs=template_kwargs
    )
    if len(spans) == len(said):
        learnt = [span for i, span in zip(said, spans, strict=True) if row.train[i]]
        return Located(text=text, learnt=learnt, said=spans, marked=True)
    if all(row.train[i] for i in said):
        return Located(text=text, learnt=spans, said=None, marked=True)
    raise RowError(
        f"{row.source}: {len(said)} assistant messages, but the generation markers of "
        f"{template.origin} enclose {len(spans)} spans, so it is not known which are the ones not "
        "to be learnt"
    )


class _Rendering:
    """One conversation's renderings."""

    def __init__(
        self,
        row: ChatRow,
        template: ChatTemplate,
        special_texts: Sequence[str],
        template_kwargs: Mapping[str, Any] | None,
    ):
        self.row = row
        self.template = template
        self.special_texts = tuple(special_texts)
        self.template_kwargs = {**(template_kwargs or {}), **row.template_kwargs}
        self.text = self._render(row.messages)
        self._leads: list[tuple[str, str]] = []
        self._headed: set[str] = set()  # roles after which a header follows, as far as is known

    def _render(self, messages: Messages, generation_prompt: bool = False) -> str:
        return self.template.render(
            messages,
            tools=self.row.tools,
            add_generation_prompt=generation_prompt,
            template_kwargs=self.template_kwargs,
        )

    def _try_render(self, messages: Messages, generation_prompt: bool = False) -> str | None:
        """A changed conversation, or None where the template does not take it."""
        try:
            return self._render(messages, generation_prompt)
        except ChatTemplateError:
            return None

    def spans_of(self, said: Sequence[int]) -> list[Span]:
        """Spans of assistant messages.

        Raises:
          RowError: one cannot be separated.
        """
        if len(said) <= MANY:
            return [self.span_of(index) for index in said]
        alike = AlikeTurns(self.row, self.text, self._try_render, self.special_texts)
        spans = []
        for index in said:
            if (span := alike.span_of(index)) is None:
                span = self.span_of(index)
                alike.measured(index, span)
            spans.append(span)
        return spans

    def span_of(self, index: int) -> Span:
        """Span of an assistant message.

        Raises:
          RowError: it cannot be separated.
        """
        earlier = self.row.messages[:index]
        before = self._beginning(earlier, generation_prompt=True)
        upto = None if before is None else self._beginning(self.row.messages[: index + 1])
        prompted = before is not None and before != self._try_render(earlier)
        if before is not None and upto is not None and prompted and upto.startswith(before):
            return self._closed(len(before), len(upto))
        content = self._content(index)
        if content is None:
            raise _inseparable(self.row, self.template, index)
        if before is None or len(before) > content[0]:
            return self._begin(index, content[0]), self._end(content[1])
        # No generation prompt: what precedes the content may be a header (not learnt) or a mere
        # space (part of the first word).
        blank = not self.text[len(before) : content[0]].strip()
        begin = len(before) if prompted or blank else content[0]
        if not prompted and upto is not None and content[1] <= len(upto):
            return self._closed(begin, len(upto))
        return begin, self._end(content[1])

    def _beginning(
        self, messages: list[dict[str, Any]], generation_prompt: bool = False
    ) -> str | None:
        """The first messages alone, if that is how the whole text begins."""
        if len(messages) == len(self.row.messages):
            return self.text
        text = self._try_render(messages, generation_prompt)
        return text if text is not None and self.text.startswith(text) else None

    def _with_stand_in(self, index: int) -> list[dict[str, Any]]:
        """The messages up to one, whose content is the private string."""
        message = self.row.messages[index]
        kept = {"role": "assistant"} if message["role"] == "assistant" else message
        return [*self.row.messages[:index], {**kept, "content": _STAND_IN}]

    def _content(self, index: int) -> Span | None:
        """Span of what the template prints for a message, by a stand-in for its content.

        A stand-in without the message's calls may break a rule of the template (Mistral counts
        messages without calls). Then the conversation up to the message has to do, if that is how
        the whole begins.
        """
        whole = self._substituted(index, self.row.messages, self.text)
        if whole is not None or index + 1 == len(self.row.messages):
            return whole
        upto = self.row.messages[: index + 1]
        text = self._beginning(upto)
        return None if text is None else self._substituted(index, upto, text)

    def _substituted(self, index: int, messages: list[dict[str, Any]], text: str) -> Span | None:
        """Where messages, rendered as the text, differ from the same with a stand-in in one."""
        other = self._try_render([*self._with_stand_in(index), *messages[index + 1 :]])
        if other is None:
            return None
        begin, tail = _common_start(text, other), _common_end(text, other)
        # Calls may stand without the space that precedes words.
        if other[begin : len(other) - tail].lstrip() != _STAND_IN:
            return None
        return begin, len(text) - tail

    def _begin(self, index: int, content: int) -> int:
        """Where a message begins whose prompt, rendered alone, is not how the text begins."""
        for ending, spoken in self._leads:
            if self.text.endswith(ending + spoken, 0, content):
                return content - len(spoken)
        role = self.row.messages[index - 1]["role"] if index else None
        if role is None or role in self._headed:
            return content
        if (lead := self._lead(index, content)) is None:
            self._headed.add(role)
            return content
        self._leads.append(lead)
        return content - len(lead[1])

    def _lead(self, index: int, content: int) -> tuple[str, str] | None:
        """How a prompt ends after the message before, and what the model then says before words.

        Between that message's content and this one's stands what ends the prompt when the model is
        used, and then: with a generation prompt what the model must say first, without one a mere
        space, which is part of the first word, or a header, which is not learnt (None, as is what
        cannot be told).
        """
        before = self._content(index - 1)
        if before is None or before[1] > content:
            return None
        earlier = self._with_stand_in(index - 1)
        prompt = self._try_render(earlier, generation_prompt=True)
        if prompt is None or prompt.count(_STAND_IN) != 1:
            return None
        ending, between = prompt.split(_STAND_IN)[1], self.text[before[1] : content]
        if prompt == self._try_render(earlier):
            # Text that the template puts into the last question may follow the question.
            ending = next((e for e in _ends(ending) if between.startswith(e)), "")
            if between[len(ending) :].strip():
                return None
        if not ending.strip() or not between.startswith(ending):
            return None
        return ending, between[len(ending) :]

    @cached_property
    def _close(self) -> str | None:
        """What the template prints after an answer that is the last message; None: not known."""
        said = [i for i, message in enumerate(self.row.messages) if message["role"] == "assistant"]
        ended = self._try_render(self._with_stand_in(said[-1]))
        if ended is None or ended.count(_STAND_IN) != 1:
            return None
        return ended.split(_STAND_IN)[1]

    def _closed(self, begin: int, end: int) -> Span:
        """Without white space after the token that closes the message, if one does."""
        trimmed = begin + len(self.text[begin:end].rstrip())
        if self.text[begin:trimmed].endswith(self.special_texts):
            return begin, trimmed
        if self._close is not None and self._close.strip():
            blank = self._close[len(self._close.rstrip()) :]
            if self.text.endswith(blank, begin, end):
                return begin, end - len(blank)
        return begin, end

    def _end(self, content: int) -> int:
        """End of a message whose content ends there: with the token that closes it, if any."""
        rest = self.text[content:]
        blank = len(rest) - len(rest.lstrip())
        found = [text for text in self.special_texts if rest.startswith(text, blank)]
        special = max(found, key=len) if found else ""
        answered = self.row.messages[-1]["role"] == "assistant"
        if special and answered and self.text.rstrip().endswith(special):
            return content + blank + len(special)  # it closes the last message, too
        if (close := self._close) is not None:
            if not close.strip():
                return content + len(close) if rest.startswith(close) else content
            for closing in (close.rstrip(), close[: _first_word_end(close)]):
                if rest.startswith(closing):
                    return content + len(closing)
        return content + blank + len(special) if special else content


def _ends(text: str) -> Iterator[str]:
    """The text, and what is left of it without its first, first two, ... characters."""
    return (text[start:] for start in range(len(text)))


def _first_word_end(text: str) -> int:
    blank = len(text) - len(text.lstrip())
    return blank + len(text.split()[0])


def _common_start(one: str, other: str) -> int:
    """Number of characters with which both texts begin."""
    most = min(len(one), len(other))
    return _largest(most, lambda a, b: one[a:b] == other[a:b])


def _common_end(one: str, other: str) -> int:
    """Number of characters with which both texts end."""
    most, last, its_last = min(len(one), len(other)), len(one), len(other)
    return _largest(
        most, lambda a, b: one[last - b : last - a] == other[its_last - b : its_last - a]
    )


def _largest(most: int, alike: Callable[[int, int], bool]) -> int:
    """Largest n up to `most` of which `alike(0, n)`: by halves, since slices compare fast."""
    low, high = 0, most  # alike(0, low), and not alike(0, high + 1) or high is most
    while low < high:
        middle = (low + high + 1) // 2
        if alike(low, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _inseparable(row: ChatRow, template: ChatTemplate, index: int) -> RowError:
    return RowError(
        f"{row.source}: what the assistant says in message {index} cannot be told from the rest, "
        f"since the chat template {template.origin} has no generation markers and renders a "
        f"message differently once others follow; {CHOICES}"
    )
