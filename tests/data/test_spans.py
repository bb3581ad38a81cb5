"""What the assistant said, found in renderings of differently built templates."""

from __future__ import annotations

import pytest
from template_texts import (
    CALLS_AS_JSON,
    CHATML,
    CHATML_MARKED,
    COUNTS_MESSAGES,
    DROPS_OLD_REASONING,
    EOS_AT_THE_END,
    INSTRUCTION,
    NO_GENERATION_PROMPT,
    PREFILLS_REASONING,
    REPEATS_CONTENT,
    SYSTEM_AFTER_QUESTION,
    SYSTEM_IN_PROMPTS_ONLY,
)

from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.data.records import RowError
from slidedp_jax.data.rows import ChatRow
from slidedp_jax.data.spans import locate

SPECIALS = ("<|im_start|>", "<|im_end|>", "</s>")


def chat(*turns, train=None, **extra):
    """Turns alternate user, assistant; a dict is a message of its own."""
    messages = []
    for i, turn in enumerate(turns):
        role = "assistant" if i % 2 else "user"
        messages.append(turn if isinstance(turn, dict) else {"role": role, "content": turn})
    said = tuple(message["role"] == "assistant" for message in messages)
    return ChatRow(source="f:1", messages=messages, train=train or said, **extra)


def learnt(row, source, specials=SPECIALS, **kwargs):
    template = ChatTemplate(source, origin="test", special_tokens={"eos_token": "</s>"})
    located = locate(row, template, specials, **kwargs)
    assert located.text == template.render(row.messages, tools=row.tools)
    return [located.text[begin:end] for begin, end in located.learnt]


@pytest.mark.parametrize("source", [CHATML, CHATML_MARKED, NO_GENERATION_PROMPT, COUNTS_MESSAGES])
def test_contents_and_the_closing_token(source):
    row = chat("q", "first", "q", "second\n", "q", "")
    assert learnt(row, source) == ["first<|im_end|>", "second\n<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("source", [CHATML, CHATML_MARKED, NO_GENERATION_PROMPT, COUNTS_MESSAGES])
def test_messages_after_the_last_answer_are_not_learnt(source):
    assert learnt(chat("q", "a", "and?"), source) == ["a<|im_end|>"]


@pytest.mark.parametrize("source", [CHATML, CHATML_MARKED, NO_GENERATION_PROMPT])
def test_content_that_looks_like_a_turn(source):
    said = "see <|im_start|>assistant\nhi<|im_end|>\n"
    assert learnt(chat("q", said, "q", "b"), source) == [f"{said}<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize("source", [CHATML, CHATML_MARKED, NO_GENERATION_PROMPT, COUNTS_MESSAGES])
def test_turns_can_be_left_out(source):
    row = chat("q", "a", "q", "b", train=(False, False, False, True))
    assert learnt(row, source) == ["b<|im_end|>"]
    row = chat("q", "a", "q", "b", train=(False, True, False, False))
    assert learnt(row, source) == ["a<|im_end|>"]


def test_answers_in_a_row_and_first():
    a = {"role": "assistant", "content": "a"}
    assert learnt(chat(a, {"role": "user", "content": "q"}, a, a), CHATML) == ["a<|im_end|>"] * 3


def test_space_before_the_first_word_is_learnt_without_generation_prompt():
    assert learnt(chat("q", "a", "q", "b"), INSTRUCTION) == [" a</s>", " b</s>"]


SYSTEM = {"role": "system", "content": "sys"}
MOVED_SYSTEM = (INSTRUCTION, SYSTEM_IN_PROMPTS_ONLY, SYSTEM_AFTER_QUESTION)


@pytest.mark.parametrize("specials", [SPECIALS, ()])
@pytest.mark.parametrize("system", [[SYSTEM], []])
@pytest.mark.parametrize("source", MOVED_SYSTEM)
def test_system_text_moved_to_the_last_question(source, system, specials):
    q, a = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    b = {"role": "assistant", "content": "b"}
    assert learnt(chat(*system, q, a), source, specials) == [" a</s>"]
    row = chat(*system, q, a, q, b, q, a)
    assert learnt(row, source, specials) == [" a</s>", " b</s>", " a</s>"]
    assert learnt(chat(*system, q, a, q), source, specials) == [" a</s>"]


def test_system_text_in_prompts_only_and_tools():
    q, a = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "3"}
    said = '[TOOL_CALLS][{"name": "f"}]</s>'
    for system in ([SYSTEM], []):
        row = chat(*system, q, called, result, a, q, a, q, called)
        assert learnt(row, SYSTEM_IN_PROMPTS_ONLY) == [said, " a</s>", " a</s>", said]


def test_a_header_before_the_words_is_not_learnt_where_the_head_changes():
    source = COUNTS_MESSAGES.split("{% if add", 1)[0]
    assert learnt(chat("q", "a", "q", "b"), source) == ["a<|im_end|>", "b<|im_end|>"]


def test_what_the_model_must_say_first_is_learnt_where_the_head_changes():
    source = "{{ messages | length }} messages\n" + EOS_AT_THE_END
    assert learnt(chat("q", "a", "q", "b"), source) == [
        "<think></think>a<|im_end|>",
        "<think></think>b<|im_end|>\n</s>",
    ]


# The tokenizer may list the closing token among its special ones or not.

OTHERS = ("</think>", "</tool_call>")


@pytest.mark.parametrize("specials", [(), OTHERS])
@pytest.mark.parametrize("source", [CHATML, NO_GENERATION_PROMPT, COUNTS_MESSAGES])
def test_closing_token_that_is_not_special(source, specials):
    row = chat("q", "first", "q", "second\n", "q", "")
    assert learnt(row, source, specials) == [
        "first<|im_end|>",
        "second\n<|im_end|>",
        "<|im_end|>",
    ]
    assert learnt(chat("q", "a", "and?"), source, specials) == ["a<|im_end|>"]


@pytest.mark.parametrize("specials", [SPECIALS, (), OTHERS])
def test_closing_token_that_is_not_special_and_old_reasoning(specials):
    row = chat("q", "<think>\nhm\n</think>\n\none", "q", "<think>\nso\n</think>\n\ntwo")
    assert learnt(row, DROPS_OLD_REASONING, specials) == [
        "one<|im_end|>",
        "<think>\nso\n</think>\n\ntwo<|im_end|>",
    ]
    assert learnt(chat("q", "one", "q", "two"), EOS_AT_THE_END, specials) == [
        "<think></think>one<|im_end|>",
        "<think></think>two<|im_end|>\n</s>",
    ]


@pytest.mark.parametrize("specials", [SPECIALS, (), OTHERS, (*SPECIALS, *OTHERS)])
@pytest.mark.parametrize("head", ["", "{{ messages | length }} messages\n"])
def test_tokens_of_the_content_do_not_close_it(head, specials):
    calls = [{"function": {"name": "f", "arguments": {}}}]
    called = {"role": "assistant", "content": "</think>\n", "tool_calls": calls}
    row = chat("q", called, "q", "b</tool_call>\n")
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert learnt(row, head + CALLS_AS_JSON, specials) == [
        f"</think>\n{said}<|im_end|>",
        "b</tool_call>\n<|im_end|>",
    ]


@pytest.mark.parametrize("head", ["", "{{ messages | length }} messages\n"])
def test_templates_without_a_closing_token(head):
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    assert learnt(chat("q", "a", "q", "b"), head + source) == ["a", "b"]
    lines = source.replace("m.content }}", "m.content + '\n' }}")
    assert learnt(chat("q", "a", "q", "b"), head + lines) == ["a\n", "b\n"]


def test_old_reasoning_is_dropped_and_new_is_learnt():
    row = chat("q", "<think>\nhm\n</think>\n\none", "q", "<think>\nso\n</think>\n\ntwo")
    assert learnt(row, DROPS_OLD_REASONING) == [
        "one<|im_end|>",
        "<think>\nso\n</think>\n\ntwo<|im_end|>",
    ]
    row = chat("q", "one", "q", "two")
    assert learnt(row, DROPS_OLD_REASONING) == [
        "one<|im_end|>",
        "<think>\n\n</think>\n\ntwo<|im_end|>",
    ]


def test_what_comes_before_the_words_is_learnt_where_the_model_must_say_it():
    row = chat("q", "one", "q", "two")
    assert learnt(row, EOS_AT_THE_END) == [
        "<think></think>one<|im_end|>",
        "<think></think>two<|im_end|>\n</s>",
    ]


def test_generation_prompt_that_the_rendered_answer_lacks():
    row = chat("q", "<think>\nhm\n</think>one", "q", "two")
    assert learnt(row, PREFILLS_REASONING) == ["one</s>", "two</s>"]


def test_tools_and_template_variables_reach_the_template():
    source = "{{ tools | tojson }}{{ mood }}" + CHATML
    row = chat("q", "a", tools=[{"name": "<f>"}], template_kwargs={"mood": "!"})
    template = ChatTemplate(source, origin="test")
    located = locate(row, template, SPECIALS, {"mood": "?"})
    assert located.text.startswith('[{"name": "<f>"}]!<|im_start|>user')
    assert [located.text[b:e] for b, e in located.learnt] == ["a<|im_end|>"]


def test_inseparable_turns_are_refused_with_the_choices():
    with pytest.raises(RowError, match=r"f:1: .*message 1 cannot be told.*generation.*all tokens"):
        learnt(chat("q", "one", "q", "two"), REPEATS_CONTENT)


def test_the_templates_own_refusal_has_the_rows_place():
    with pytest.raises(RowError, match=r"f:1: chat template test: roles must alternate"):
        learnt(chat("q", "a"), "{{ raise_exception('roles must alternate') }}")


def test_markers_that_do_not_match_the_turns_cannot_leave_turns_out():
    source = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    assert learnt(chat("q", "a", "q", "b"), source) == ["qaqb"]
    with pytest.raises(RowError, match=r"2 assistant messages.* enclose 1 spans"):
        learnt(chat("q", "a", "q", "b", train=(False, False, False, True)), source)


@pytest.mark.parametrize("source", [INSTRUCTION, SYSTEM_IN_PROMPTS_ONLY])
def test_contents_that_the_template_trims(source):
    assert learnt(chat("q", " a \n", "q", "\nb  "), source) == [" a</s>", " b</s>"]
