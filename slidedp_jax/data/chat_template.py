"""Chat templates: Jinja from the model folder, rendered in a sandbox.

The environment offers what published templates expect: block trimming, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that does not escape for HTML, and the tag
`{% generation %}` ... `{% endgeneration %}` around what the model should learn to say. A template
is somebody else's program: it sees plain data only, in Jinja's immutable sandbox.

How marked spans are found: the template is compiled twice, once with the tag passing its body
through and once with the tag also printing two private strings that no data contains. Taking those
strings out must leave the first rendering, else the template is refused: then it does something to
its own output (trimming, measuring) that depends on the marks.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slidedp_jax.errors import UserError

Span = tuple[int, int]
"""Start and end of a piece of text, in characters."""

# Fresh in each process, so no data file can hold them.
_BEGIN = f"\x02{secrets.token_hex(8)}\x02"
_END = f"\x03{secrets.token_hex(8)}\x03"
_MARKS = re.compile(f"({_BEGIN}|{_END})")


_DATES = re.compile(r"([^%]|%%|%[-_0^#]?[aAbBdeDFgGhjmuUVwWxyYC])*")
"""A format whose codes tell the day only."""


class ChatTemplateError(UserError):
    """The template refused a conversation or failed on it."""


class _Generation(Extension):
    """`{% generation %}`: prints its body, in a scope of its own."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by Jinja
    marks: ClassVar[tuple[str, str] | None] = None

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if self.marks is not None:
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in self.marks)
            body = [begin, *body, end]
        return nodes.Scope(body).set_lineno(line)


class _MarkedGeneration(_Generation):
    """The same with private strings around the body."""

    marks = (_BEGIN, _END)


@final
class ChatTemplate:
    """A compiled chat template.

    Attributes:
      source: the Jinja text.
      origin: where it came from, for messages.
      has_generation_markers: it uses `{% generation %}`.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        special_tokens: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ):
        """Compile a template.

        Args:
          source: the Jinja text.
          origin: where it came from, for messages.
          special_tokens: `bos_token`, `eos_token`, ... as the template sees them.
          now: the time that `strftime_now` prints; None is the time of rendering. Fix it where
            token ids must be the same on another day.

        Raises:
          UserError: a syntax error, with its line.
        """
        self.source = source
        self.origin = origin
        self._special_tokens = dict(special_tokens or {})
        self._now = now
        self._plain = self._compile(_Generation, now)
        self.has_generation_markers = bool(re.search(r"\{%-?\+?\s*generation\s*[-+]?%\}", source))
        self._marked = (
            self._compile(_MarkedGeneration, now) if self.has_generation_markers else None
        )

    @property
    def clock(self) -> str | None:
        """The time that it prints: empty if it prints none, None if that of rendering.

        The day alone if that is all that it prints.
        """
        if "strftime_now" not in self.source:
            return ""
        if self._now is None:
            return None
        now = self._now
        return now.date().isoformat() if _prints_days_only(self.source) else now.isoformat()

    def __reduce__(self) -> Any:
        """Other processes compile it anew."""
        return _compiled, (self.source, self.origin, self._special_tokens, self._now)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation.

        Raises:
          ChatTemplateError: the template raised, or failed on these messages.
        """
        return self._render(self._plain, messages, tools, add_generation_prompt, template_kwargs)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Text of a conversation and the spans inside `{% generation %}`, in order.

        Raises:
          ChatTemplateError: as `render`, or marks and text cannot be told apart.
        """
        assert self._marked is not None, "the template has no generation markers"
        plain = self._render(self._plain, messages, tools, False, template_kwargs)
        marked = self._render(self._marked, messages, tools, False, template_kwargs)
        text, spans = _take_out_marks(marked)
        if text != plain:
            raise ChatTemplateError(
                f"{self.origin}: the generation markers cannot be located, because the template "
                "changes its own output around them; remove the markers or set the loss on all "
                "tokens"
            )
        return text, spans

    def _compile(self, generation: type[Extension], now: datetime | None) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
        try:
            template = environment.from_string(self.source)
            template.globals = dict(template.globals)  # copied at each rendering: a chain is slow
            return template
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"chat template {self.origin}, line {error.lineno}: {error.message}"
            ) from error

    def _render(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(template_kwargs or {}),
        }
        try:
            return template.render(variables)
        except Exception as error:  # a template may fail in any way a program can
            detail = str(error) or type(error).__name__
            raise ChatTemplateError(f"chat template {self.origin}: {detail}") from error


def _prints_days_only(source: str) -> bool:
    """Whether each use of `strftime_now` is a call with a literal format of date codes."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    tree = environment.parse(source)
    understood = set[int]()
    for test in tree.find_all(nodes.Test):
        if test.name in ("defined", "undefined"):
            understood.add(id(test.node))
    for call in tree.find_all(nodes.Call):
        match call.args:
            case [nodes.Const(value=str(form))] if _DATES.fullmatch(form):
                understood.add(id(call.node))
    names = [name for name in tree.find_all(nodes.Name) if name.name == "strftime_now"]
    texts = source.count("strftime_now")  # others may be reached in ways that are not followed
    return len(names) == texts and all(id(name) in understood for name in names)


def _compiled(
    source: str, origin: str, special_tokens: Mapping[str, Any], now: datetime | None
) -> ChatTemplate:
    return ChatTemplate(source, origin=origin, special_tokens=special_tokens, now=now)


def _take_out_marks(marked: str) -> tuple[str, list[Span]]:
    pieces: list[str] = []
    spans: list[Span] = []
    position, begin = 0, None
    for piece in _MARKS.split(marked):
        if piece == _BEGIN:
            begin = position
        elif piece == _END:
            assert begin is not None
            spans.append((begin, position))
        else:
            pieces.append(piece)
            position += len(piece)
    return "".join(pieces), spans


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
