"""Inputs on which other tools, and this one, were reported to teach something else than they say.

Each is loaded as a run loads it and compared as text, supervised tokens in ⟦ ⟧.
"""

from __future__ import annotations

import json

import pytest

from slidedp_jax.data import ExampleSettings, load_examples, load_tokenizer, preview

TOOLS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- if m.tool_calls %}{%- for c in m.tool_calls %}"
    "{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
INST = (
    "{%- if messages[0].role == 'system' %}{%- set s = messages[0].content %}"
    "{%- set ms = messages[1:] %}{%- else %}{%- set ms = messages %}{%- endif %}"
    "{%- for m in ms %}{%- if m.role == 'user' %}{{- '[INST]' }}"
    "{%- if s is defined and m == (ms | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{- s + '\n' }}{%- endif %}{{- m.content + '[/INST]' }}"
    "{%- else %}{{- ' ' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
)
R1 = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|im_start|>' + m.content }}"
    "{%- else %}{{- '<|im_start|>A' + m.content.split('</think>')[-1] + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>A<think>\n' }}{%- endif %}"
)
CALL_KEY = (
    "{%- for m in messages %}{%- if 'tool_calls' in m %}"
    "{{- '[TOOL_CALLS] ' + m.tool_calls | tojson }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
ASKED = {"role": "user", "content": "q"}
TURNS = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "Python"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "Python"},
]


def called(arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]}


@pytest.fixture
def seen(tokenizer_folder):
    """Previews of a file's rows without their headings, and the notes without the file."""

    def seen(path, template):
        (tokenizer_folder / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(tokenizer_folder)
        examples, report = load_examples([path], tokenizer, ExampleSettings(max_seq_length=4096))
        texts = [preview(examples, tokenizer, i).split("\n", 1)[1] for i in range(len(examples))]
        return texts, [note.removeprefix(f"{path}: ") for note in report.notes]

    return seen


def tool_text(arguments):
    return (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        f'⟦<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call><|im_end|>⟧\n'
    )


def test_arguments_as_text_and_as_object(seen, write_rows):
    rows = [called('{"city": "Oslo"}'), called({"city": "Oslo"})]
    assert seen(write_rows(rows), TOOLS) == ([tool_text('{"city": "Oslo"}')] * 2, [])


def test_arguments_of_different_tools_in_parquet(seen, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [called({"city": "Oslo"}), called({"amount": 3}), called({})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    expected = [tool_text('{"city": "Oslo"}'), tool_text('{"amount": 3}'), tool_text("{}")]
    assert seen(tmp_path / "rows.parquet", TOOLS) == (expected, [])


def test_null_in_lines_is_said_and_counted(seen, write_rows):
    rows = [called({"city": "Oslo", "amount": None}), called({"city": "Oslo"})]
    texts, notes = seen(write_rows(rows), TOOLS)
    assert texts[0] == tool_text('{"city": "Oslo", "amount": null}')
    assert len(notes) == 1 and notes[0].startswith("the arguments of 1 of 2 tool calls hold null")


def test_an_empty_list_of_calls(seen, write_rows):
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": "yes", "tool_calls": none}]}
        for none in ([], None, "", "[]")
    ]
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    assert seen(write_rows(rows), CALL_KEY) == ([text] * 4, [])


def test_calls_of_sharegpt(seen, write_rows):
    call = json.dumps({"name": "f", "arguments": {"city": "Oslo"}})
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": call}]
    expected = [tool_text('{"city": "Oslo"}')]
    assert seen(write_rows([{"conversations": turns}]), TOOLS) == (expected, [])


def test_first_words_where_the_system_text_is_moved(seen, write_rows):
    system = {"role": "system", "content": "S"}
    rows = [{"messages": [system, *TURNS]}, {"messages": TURNS}]
    first = "[INST]q1[/INST]⟦ Python<|im_end|>⟧[INST]"
    second = "q2[/INST]⟦ Python<|im_end|>⟧"
    assert seen(write_rows(rows), INST) == ([f"{first}S\n{second}", f"{first}{second}"], [])


def test_reasoning_that_the_template_cuts(seen, write_rows):
    said = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nthe answer"}
    texts, notes = seen(write_rows([{"messages": [ASKED, said]}]), R1)
    assert texts == ["<|im_start|>q<|im_start|>A⟦\n\nthe answer<|im_end|>⟧"]
    assert notes == [
        "the reasoning of 1 of 1 assistant messages does not occur in what the chat template "
        "prints; the model does not learn it"
    ]


def test_calls_that_the_template_does_not_know(seen, write_rows):
    texts, notes = seen(write_rows([called({"city": "Oslo"})]), INST)
    assert texts == ["[INST]q[/INST]⟦ <|im_end|>⟧"]
    assert notes == [
        "the tool calls of 1 of 1 assistant messages do not occur in what the chat template "
        "prints; the model does not learn them"
    ]


def test_an_answer_that_was_said_before_word_for_word(seen, write_rows):
    turns = [{"role": role, "content": "Python"} for role in ("user", "assistant")] * 2
    once = "<|im_start|>user\nPython<|im_end|>\n<|im_start|>assistant\n⟦Python<|im_end|>⟧\n"
    assert seen(write_rows([{"messages": turns}]), TOOLS) == ([once * 2], [])
