"""Which characters of a rendered conversation the assistant said.

With `{% generation %}` in the template, what it encloses. Without, two methods that check
themselves:

1. Incremental rendering: the conversation up to an assistant message, with the generation prompt,
   is text P; with that message it is F. If F begins with P and the whole rendering begins with F,
   the message is F without P, up to and with the special token that closes it.
2. Substitution, for templates that render an earlier message differently once others follow (Qwen3
   removes old reasoning): the message's content is replaced by a private string S and the whole is
   rendered again. If the two renderings differ in one place only and S is all that stands there,
   that place is the message; the special token after it, if any, closes it.

What neither can separate is refused; nothing is guessed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from slidedp_jax.data.chat_template import ChatTemplate, ChatTemplateError, Span
from slidedp_jax.data.records import RowError
from slidedp_jax.data.rows import ChatRow

# Private-use characters: no case, no white space, and in no data that is text.
_STAND_IN = "\ue3a1\ue3a7\ue3a5\ue3ad"

CHOICES = (
    "add `{% generation %}` and `{% endgeneration %}` to the template around what the assistant "
    "says, name another template file, or set the loss on all tokens"
)


def assistant_spans(
    row: ChatRow,
    template: ChatTemplate,
    special_texts: Sequence[str],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, list[Span]]:
    """Text of a conversation, and the span of each assistant message that is to be learnt.

    Args:
      row: the conversation; `row.train` says which messages count.
      template: how it is rendered.
      special_texts: texts of the tokenizer's special tokens, one of which may close a message.
      template_kwargs: variables for the template, overruled by the row's own.

    Raises:
      RowError: the template failed on the row, or its messages cannot be separated.
    """
    said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    try:
        rendering = _Rendering(row, template, special_texts, template_kwargs)
        if not any(row.train):
            return rendering.text, []
        if template.has_generation_markers:
            text, spans = template.render_marked(
                row.messages, tools=row.tools, template_kwargs=rendering.template_kwargs
            )
            if all(row.train[i] for i in said):
                return text, spans
            if len(spans) != len(said):
                raise RowError(
                    f"{row.source}: {len(said)} assistant messages, but the generation markers of "
                    f"{template.origin} enclose {len(spans)} spans, so it is not known which are "
                    "the ones not to be learnt"
                )
            return text, [span for i, span in zip(said, spans, strict=True) if row.train[i]]
        spans = [rendering.span_of(i) for i in said]
    except ChatTemplateError as error:
        raise RowError(f"{row.source}: {error}") from error
    for before, after in itertools.pairwise(spans):
        if after[0] < before[1]:
            raise _inseparable(row, template, said[1])
    return rendering.text, [span for i, span in zip(said, spans, strict=True) if row.train[i]]


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

    def _render(self, messages: list[dict[str, Any]], generation_prompt: bool = False) -> str:
        return self.template.render(
            messages,
            tools=self.row.tools,
            add_generation_prompt=generation_prompt,
            template_kwargs=self.template_kwargs,
        )

    def _render_part(self, count: int, generation_prompt: bool = False) -> str | None:
        """The first messages alone, or None where the template does not take them."""
        try:
            return self._render(self.row.messages[:count], generation_prompt)
        except ChatTemplateError:
            return None

    def span_of(self, index: int) -> Span:
        """Span of an assistant message.

        Raises:
          RowError: it cannot be separated.
        """
        last = index + 1 == len(self.row.messages)
        before = self._render_part(index, generation_prompt=True)
        if before is not None and not self.text.startswith(before):
            before = None
        upto = self.text if last else self._render_part(index + 1)
        prompted = before is not None and before != self._render_part(index)
        if before is not None and upto is not None and self.text.startswith(upto):
            if prompted and upto.startswith(before):
                return self._closed(len(before), len(upto))
            content = self._substituted(index)
            if content is not None and len(before) <= content[0] <= content[1] <= len(upto):
                # No generation prompt: what precedes the content may be a header (not learnt) or a
                # mere space (part of the first word).
                blank = not self.text[len(before) : content[0]].strip()
                return self._closed(len(before) if blank else content[0], len(upto))
        content = self._substituted(index)
        if content is None:
            raise _inseparable(self.row, self.template, index)
        begin = content[0]
        if prompted and before is not None and len(before) <= begin:
            begin = len(before)
        return begin, self._closing_token(content[1])

    def _substituted(self, index: int) -> Span | None:
        """Span of a message's content, by rendering the conversation with a stand-in for it."""
        messages = list(self.row.messages)
        messages[index] = {"role": "assistant", "content": _STAND_IN}
        try:
            other = self._render(messages)
        except ChatTemplateError:
            return None
        begin = _common_start(self.text, other)
        tail = _common_start(self.text[::-1], other[::-1])
        if other[begin : len(other) - tail] != _STAND_IN:
            return None
        return begin, len(self.text) - tail

    def _closed(self, begin: int, end: int) -> Span:
        """Without white space after the special token that closes the message, if one does."""
        trimmed = begin + len(self.text[begin:end].rstrip())
        if self.text[begin:trimmed].endswith(self.special_texts):
            return begin, trimmed
        return begin, end

    def _closing_token(self, end: int) -> int:
        """End of the special token that follows, white space between allowed; else `end`."""
        rest = self.text[end:]
        blank = len(rest) - len(rest.lstrip())
        closing = [text for text in self.special_texts if rest.startswith(text, blank)]
        return end + blank + max(map(len, closing)) if closing else end


def _common_start(one: str, other: str) -> int:
    """Number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _inseparable(row: ChatRow, template: ChatTemplate, index: int) -> RowError:
    return RowError(
        f"{row.source}: what the assistant says in message {index} cannot be told from the rest, "
        f"since the chat template {template.origin} has no generation markers and renders a "
        f"message differently once others follow; {CHOICES}"
    )
