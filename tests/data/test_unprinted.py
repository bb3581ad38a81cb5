"""What rows say and templates do not print is counted; what is printed, in any form, is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from template_texts import (
    CALLS_AS_JSON,
    CALLS_AS_TEXT,
    CHATML,
    CHATML_MARKED,
    DROPS_OLD_REASONING,
    EOS_AT_THE_END,
    INSTRUCTION,
    PREFILLS_REASONING,
    SYSTEM_IN_PROMPTS_ONLY,
)

from slidedp_jax.data import unprinted as kinds
from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.data.records import Record
from slidedp_jax.data.rows import parse_row
from slidedp_jax.data.spans import locate
from slidedp_jax.data.unprinted import unprinted

SPECIALS = ("<|im_start|>", "<|im_end|>", "</s>")
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "function": {
        "name": "get_weather",
        "arguments": {"city": "Oslo", "deep": {"n": [3, True, None, 1.5]}, "code": 'a\n"b" <c>'},
    }
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def user(content):
    return {"role": "user", "content": content}


def said(content="", **entries):
    return {"role": "assistant", "content": content} | entries


def lost(source, *messages, loss_on_all=False, **fields):
    """Kind -> (number lost, number said) of what was lost."""
    row = parse_row(Record(source="f:1", fields={"messages": list(messages)} | fields))
    template = ChatTemplate(source, origin="t", special_tokens={"eos_token": "</s>"})
    if loss_on_all:
        row = replace(row, train=(False,) * len(row.train))
    located = locate(row, template, SPECIALS)
    return {r.text: (r.count, r.of) for r in unprinted(row, located) if r.count}


# Nothing was lost.

CHAT = [SYSTEM, user(" q\n"), said("\n one\ttwo  \n"), user("Python"), said("Python")]
TOOLS = [user("q"), said("I look", tool_calls=[CALL]), {"role": "tool", "content": '{"t": "3"}'}]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ m.content | trim | e }}",
        "{{ m.content.split() | join(' ') }}",
        "{{ m.content | indent }}",
        "{{ {'said': m.content} | tojson(ensure_ascii=True, indent=2) }}",
    ],
)
@pytest.mark.parametrize("content", ['say "é" & <b>\n\n\tdone', "a", "\\", "im_start user"])
def test_contents_in_any_form_are_printed(body, content, everything):
    messages = [user(content), said(content), user("q"), said(content)]
    assert lost(HEAD + body + TAIL, *messages, loss_on_all=everything) == {}


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    "source", [CHATML, CHATML_MARKED, CALLS_AS_JSON, EOS_AT_THE_END, INSTRUCTION]
)
def test_whole_conversations_are_printed(source, everything):
    assert lost(source, *CHAT, loss_on_all=everything) == {}


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    "calls",
    [
        "{{ c.function | tojson }}",
        "{{ c | tojson(indent=1, ensure_ascii=True, sort_keys=True) }}",
        "{{ c.function.name + c.function.arguments }}",
        "{{ c.function.name }}{{ [c.function.arguments.values() | list] }}"
        "{{ c.function.arguments.keys() | list }}",
        "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }},"
        "{% endfor %})",
        "<{{ c.function.name | e }}>{% for k, v in c.function.arguments | items %}<{{ k }}>"
        "{{ v | tojson if v is not string else v }}</{{ k }}>{% endfor %}",
        "{{ {'args': c.function.arguments | tojson, 'name': c.function.name} | tojson }}",
    ],
)
def test_calls_in_any_form_are_printed(calls, everything):
    body = f"{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}{{{{ m.content }}}}"
    source = "{{ tools | tojson }}" + HEAD + body + TAIL
    assert lost(source, *TOOLS, said("cold"), tools=[TOOL], loss_on_all=everything) == {}


def test_reasoning_under_any_name_is_printed():
    body = "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    messages = [user("q"), said("a", reasoning=" why\n"), user("q"), said("<think>so</think>b")]
    assert lost(HEAD + body + TAIL, *messages) == {}


def test_an_answer_of_a_tool_within_the_assistants_turn_is_printed():
    body = (
        "{% if m.role != 'tool' %}<{{ m.role }}>"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{{ messages[loop.index].content }}"
        "{% endif %}{{ m.content }}<|im_end|>{% endif %}"
    )
    source = "{% for m in messages %}" + body + "{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert lost(source, *TOOLS, said("cold")) == {}


# Something was lost.


@pytest.mark.parametrize("everything", [False, True])
def test_reasoning(everything):
    thought = said("<think>\nwhy\n</think>\n\none")
    for message in (thought, said("one", reasoning_content="why"), said("one", thinking="why")):
        assert lost(PREFILLS_REASONING, user("q"), message, loss_on_all=everything) == {
            kinds.REASONING: (1, 1)
        }
    messages = [user("q"), thought, user("q"), said("two"), user("q"), thought]
    assert lost(DROPS_OLD_REASONING, *messages, loss_on_all=everything) == {kinds.REASONING: (1, 2)}
    # The same thought twice is one; a thought that is also the answer needs a place of its own.
    both = said("<think>one</think>one", reasoning_content="one")
    assert lost(PREFILLS_REASONING, user("q"), both) == {kinds.REASONING: (1, 1)}


@pytest.mark.parametrize("source", [CHATML, CHATML_MARKED, SYSTEM_IN_PROMPTS_ONLY])
def test_calls_and_definitions(source):
    if source == SYSTEM_IN_PROMPTS_ONLY:
        assert lost(source, *TOOLS[:2], tools=[TOOL]) == {
            kinds.CONTENT: (1, 1),  # it stands beside calls
            kinds.TOOLS: (1, 1),
        }
    else:
        assert lost(source, *TOOLS, said("cold"), tools=[TOOL]) == {
            kinds.CALLS: (1, 1),
            kinds.TOOLS: (1, 1),
        }


def test_definitions_beside_printed_calls():
    marked = CALLS_AS_JSON.replace("m.content }}", "m.content }}{% generation %}")
    marked = marked.replace("{{ '<|im_end|>", "{% endgeneration %}{{ '<|im_end|>")
    for source in (CALLS_AS_JSON, CALLS_AS_TEXT, marked):
        for everything in (False, True):
            found = lost(source, *TOOLS[:2], tools=[TOOL], loss_on_all=everything)
            assert found == {kinds.TOOLS: (1, 1)}
            printed = "{{ tools | tojson }}" + source
            assert lost(printed, *TOOLS[:2], tools=[TOOL], loss_on_all=everything) == {}


def test_arguments_without_their_values():
    body = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    assert lost(HEAD + body + TAIL, *TOOLS) == {kinds.CALLS: (1, 1)}


def test_system_text():
    assert lost(SYSTEM_IN_PROMPTS_ONLY, *CHAT) == {kinds.SYSTEM: (1, 1)}
    twice = [SYSTEM, {"role": "developer", "content": "Now."}, *CHAT[1:]]
    assert lost(CHATML, *twice) == {}
    first_only = HEAD + "{{ m.content if m.role != 'developer' else '' }}" + TAIL
    assert lost(first_only, *twice) == {kinds.SYSTEM: (1, 1)}


DROPS_ONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 != drop %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("text", ["Python", "yes"])
def test_a_dropped_text_that_is_said_elsewhere_too(text, everything):
    messages = [user(text), said(text), user(f"{text}, sure"), said(text), user(text), said(text)]
    for drop in range(len(messages)):
        found = lost(DROPS_ONE.replace("drop", str(drop)), *messages, loss_on_all=everything)
        assert sum(count for count, _ in found.values()) == 1, drop
        if not everything and drop != 2:
            kind = kinds.CONTENT if drop % 2 else kinds.GIVEN
            assert found == {kind: (1, 3)}


def test_a_text_dropped_between_markers_is_told_from_the_users():
    body = (
        "{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.index0 != 1 else '' }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    )
    messages = [user("Python"), said("Python"), user("Python"), said("Python")]
    source = HEAD + body + TAIL.removeprefix("<|im_end|>")
    assert lost(source, *messages) == {kinds.CONTENT: (1, 2)}


def test_content_around_a_thought():
    body = "{{ m.content.split('</think>')[-1] }}"
    messages = [user("q"), said("hello <think>why</think> a")]
    assert lost(HEAD + body + TAIL, *messages) == {
        kinds.REASONING: (1, 1),
        kinds.CONTENT: (1, 1),
    }


@pytest.mark.parametrize("everything", [False, True])
def test_a_letter_of_a_word_is_no_place_for_a_short_text(everything):
    short = [{"role": "system", "content": "S"}, user("q"), said("a")]
    assert lost(SYSTEM_IN_PROMPTS_ONLY, *short, loss_on_all=everything) == {kinds.SYSTEM: (1, 1)}
    beside = "{% for m in messages %}{{ m.role[0] + m.content + m.role[0] }}{% endfor %}"
    assert lost(INSTRUCTION, *short, loss_on_all=everything) == {}
    assert lost(beside, user("?"), said("!"), loss_on_all=everything) == {}


def test_names():
    named = [user("q") | {"name": "Ann"}, said("a", name="Bob"), {"role": "tool", "content": "3"}]
    named[2]["name"] = "f"
    assert lost(CHATML, *named) == {kinds.NAME: (2, 2)}
    printed = CHATML.replace("message['content']", "message.name + message['content']")
    assert lost(printed, *named) == {}


def test_long_conversations_take_linear_time():
    """The slow way, of 400 messages with the same words in all of them."""
    words = "a b c d e f g h " * 60
    messages = [message for i in range(200) for message in (user(words), said(f"{words}{i}"))]
    source = DROPS_ONE.replace("!= drop", "> 2")
    row = parse_row(Record(source="f:1", fields={"messages": [SYSTEM, *messages]}))
    row = replace(row, train=(False,) * len(row.train))
    located = locate(row, ChatTemplate(source, origin="t"), SPECIALS)
    found = {r.text: (r.count, r.of) for r in unprinted(row, located)}
    assert found == {kinds.SYSTEM: (1, 1), kinds.GIVEN: (1, 200), kinds.CONTENT: (1, 200)}
