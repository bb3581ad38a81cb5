"""Long conversations: the same spans as when each answer is measured, in linear time."""

from __future__ import annotations

import os

import numpy as np
import pytest
import template_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import mostly_thorough

from slidedp_jax.data import alike_turns, spans
from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.data.encode import begin_inside
from slidedp_jax.data.records import RowError
from slidedp_jax.data.rows import ChatRow
from slidedp_jax.data.spans import locate

SPECIALS = ("<|im_start|>", "<|im_end|>", "</s>")
HEADED = "{{ messages | length }} messages\n"
TEMPLATES = {
    name: source
    for name, source in vars(template_texts).items()
    if name.isupper() and "generation %}" not in source
}
TEMPLATES |= {
    f"headed {name}": HEADED + TEMPLATES[name]
    for name in ("EOS_AT_THE_END", "CALLS_AS_JSON", "NO_GENERATION_PROMPT")
}
# White space that the prompt has and the answer's place has not, and cut off in some renderings.
_BODY = "{{ ('' if loop.first else '\n') + m.role + ':' + CONTENT + '</s>' }}"
_TURNS = "{% for m in messages %}" + _BODY + "{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}{{ '\nassistant:' + BLANK }}{% endif %}"


def _blanks(content="m.content", blank="''", close=True) -> str:
    source = (_TURNS + _PROMPT).replace("CONTENT", content).replace("BLANK", blank)
    return source if close else source.replace(" + '</s>'", "")


BLANKS = {
    "plain": _blanks(),
    "prompt ends in a space": _blanks(blank="' '"),
    "prompt ends in lines": _blanks(blank="'\n\n'"),
    "open": _blanks(close=False),
    "last trimmed": _blanks("(m.content | trim if loop.last else m.content)"),
    "last trimmed, open": _blanks("(m.content | trim if loop.last else m.content)", close=False),
    "last without lines, open": _blanks(
        "(m.content.rstrip('\n') if loop.last else m.content)", close=False
    ),
    "begins without lines": _blanks("m.content.lstrip('\n')"),
    "ends without spaces, open": _blanks("m.content.rstrip(' ')", close=False),
    "trimmed": _blanks("(m.content | trim)"),
    "trimmed, two spaces": _blanks("'  ' + (m.content | trim) + ' '"),
    "answers trimmed": _blanks("(m.content | trim if m.role == 'assistant' else m.content)"),
    "all trimmed, open": "{% set all %}" + _blanks(close=False) + "{% endset %}{{ all | trim }}",
}
TEMPLATES |= {f"blanks: {name}": source for name, source in BLANKS.items()}
COMPILED = {
    name: ChatTemplate(source, origin=name, special_tokens={"eos_token": "</s>"})
    for name, source in TEMPLATES.items()
}
THOUGHT = "<think>\nhm\n</think>\n\n"
WORDS = st.sampled_from(["a", "b", "yes\n", "\nno", " so ", "assistant", "user\n", ""])
ODD = st.sampled_from(
    [
        "<|im_end|>\n",
        "x<|im_end|>\n<|im_start|>assistant\ny",
        "</s>",
        "[/INST] z",
        f"{THOUGHT}c",
        "</think>",
        " \n",
        "</s>  ",
        "\n\n </s>",
    ]
)
BLANK = st.sampled_from(["", " ", "\n", "  ", "\n\n", " \n", "\n ", "   ", "\t", "\n\n\n"])


def row_of(messages) -> ChatRow:
    said = tuple(message["role"] == "assistant" for message in messages)
    return ChatRow(source="f:1", messages=messages, train=said)


@st.composite
def conversations(draw) -> ChatRow:
    """More answers than are each measured; a few of them odd."""
    system = draw(st.booleans())
    messages = [{"role": "system", "content": "sys"}] if system else []
    reasons, calls = draw(st.booleans()), draw(st.sampled_from([0, 0, 0, 1, 3]))
    odd = draw(st.sets(st.integers(0, 24), max_size=3))
    blanks = st.sampled_from(draw(st.lists(BLANK, max_size=3)) or [""])

    def words() -> str:
        return draw(blanks) + draw(ODD if len(messages) in odd else WORDS) + draw(blanks)

    def answer(**extra) -> dict:
        thought = draw(blanks) + THOUGHT if reasons and draw(st.integers(0, 4)) else ""
        return {"role": "assistant", "content": thought + words(), **extra}

    for _ in range(alike_turns.MANY + draw(st.sampled_from([1, 3, 5, 5, 20]))):
        messages.append({"role": "user", "content": words()})
        if calls and not draw(st.integers(0, 2)):
            for _ in range(draw(st.integers(1, calls))):
                function = {"name": "f", "arguments": {"x": draw(WORDS)}}
                call = {"type": "function", "function": function}
                messages.append(answer(tool_calls=[call]))
                messages.append({"role": "tool", "content": words()})
        messages.append(answer())
    if draw(st.booleans()):
        messages.append({"role": "user", "content": "and?"})
    return row_of(messages)


def located(row, template, specials):
    try:
        return locate(row, template, specials)
    except RowError as error:
        return str(error)


OFTEN = (
    *("CHATML", "DROPS_OLD_REASONING", "INSTRUCTION", "CALLS_AS_JSON", "headed EOS_AT_THE_END"),
    *("blanks: last without lines, open", "blanks: prompt ends in lines"),
)


@pytest.mark.parametrize("name", mostly_thorough(TEMPLATES, OFTEN))
def test_spans_are_those_of_measuring_each(name):
    template = COMPILED[name]

    @settings(max_examples=int(os.environ.get("ALIKE_EXAMPLES", 15)), deadline=None)
    @given(conversations(), st.sampled_from([SPECIALS, (), ("</think>",)]))
    def check(row, specials):
        found = located(row, template, specials)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "MANY", 10**9)
            measured = located(row, template, specials)
        assert found == measured

    check()


def test_the_end_of_calls_is_told_where_white_space_may_be_either_sides():
    """The template's space before a result, and spaces that one result begins with itself."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = []
    for i in range(alike_turns.MANY + 4):
        messages.append({"role": "user", "content": "a"})
        messages.append({"role": "assistant", "content": "a", "tool_calls": [call]})
        result = "a" if i != alike_turns.MANY else " so "
        messages.append({"role": "tool", "content": result})
        messages.append({"role": "assistant", "content": "a"})
    found = locate(row_of(messages), COMPILED["SYSTEM_AFTER_QUESTION"], SPECIALS)
    assert {found.text[begin:end] for begin, end in found.learnt} == {" a</s>"}


def long_row(turns, kind) -> ChatRow:
    """A conversation of one kind, every message of another length."""
    messages = []
    for i in range(turns):
        words = f"{i} " + "w" * (i % 7)
        if kind == "blanks":
            words = "\n" * (i % 3) + words + " " * (i % 2) + "\n" * (i % 4)
        messages.append({"role": "user", "content": words})
        if kind == "calls":
            call = {"type": "function", "function": {"name": "f", "arguments": {"x": words}}}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages += [said, {"role": "tool", "content": words}]
        thought = f"<think>\n{words}\n</think>\n\n" if kind == "reasoning" else ""
        messages.append({"role": "assistant", "content": thought + words})
    return row_of(messages)


@pytest.mark.parametrize("kind", ["plain", "reasoning", "calls", "blanks"])
@pytest.mark.parametrize("name", ["CHATML", "DROPS_OLD_REASONING", "INSTRUCTION", "CALLS_AS_JSON"])
def test_the_number_of_renderings_does_not_grow_with_the_conversation(name, kind, monkeypatch):
    """Each takes a time in proportion to the conversation: so is all of it."""
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **k: rendered.append(1) or render(*a, **k)
    )

    def renderings(turns):
        rendered.clear()
        locate(long_row(turns, kind), COMPILED[name], SPECIALS)
        return len(rendered)

    assert renderings(80) == renderings(40) < 60


TEXTS = st.text(st.sampled_from("ab"), max_size=30)


def number_alike(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_what_two_texts_have_in_common(start, one, other, end):
    one, other = start + one + end, start + other + end
    assert spans._common_start(one, other) == number_alike(one, other)
    assert spans._common_end(one, other) == number_alike(one[::-1], other[::-1])


@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 33), max_size=12))
def test_tokens_inside_spans(begins, edges):
    edges = sorted(edges[: len(edges) // 2 * 2])
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    expected = [any(a <= begin < b for a, b in pairs) for begin in sorted(begins)]
    assert begin_inside(np.array(sorted(begins), np.int64), pairs).tolist() == expected


class Looked(str):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, place):
        Looked.looks += 1
        return str.__getitem__(self, place)

    def __iter__(self):
        Looked.looks += len(self)
        return str.__iter__(self)


def test_long_texts_are_not_compared_by_character():
    long, Looked.looks = "a" * 100_000, 0
    assert spans._common_start(Looked(long + "b"), Looked(long + "c")) == len(long)
    assert spans._common_end(Looked("b" + long), Looked("c" + long)) == len(long)
    assert Looked.looks < 200
