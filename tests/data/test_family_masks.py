"""What is learnt of conversations of six families, against templates that mark it.

The reference is another implementation all the way: transformers renders the marked template and
makes its assistant mask; here the template without marks is rendered and the answers are found.
"""

from __future__ import annotations

import json
import random

import pytest
from byte_tokenizer import write_tokenizer
from family_templates import CHATML, LLAMA3, MISTRAL, QWEN3, QWEN25, SMOLLM2, SPECIALS, plain
from lanes import mostly_thorough

from slidedp_jax.data import IGNORED, ExampleSettings, load_examples, load_tokenizer
from slidedp_jax.data import spans as all_spans
from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.data.rows import ChatRow
from slidedp_jax.data.spans import locate

FAMILIES = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}
MERGES = [("a", "b"), ("Ġ", "a"), ("Ġ", "P"), ("y", "t"), ("\u010a", "\u010a")]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def called(*calls, text=""):
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return said(text, tool_calls=[{"type": "function", "function": f} for f in functions])


SYSTEM = {"role": "system", "content": "Be brief about a Python."}
RESULT = {"role": "tool", "content": '{"degrees": 21}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
OSLO = ("weather", {"city": "Oslo"})
CHATS = {
    "one turn": [user("What is Python?"), said("a Python is a snake")],
    "system": [SYSTEM, user("ab?"), said("ab. "), user("Again?"), said(" ab")],
    "alike": [user("Python"), said("Python"), user("Python"), said("Python")],
    "long": [m for i in range(30) for m in (user(f"{i} Python?"), said(f"a Python {i * 37}"))],
    "blank and newlines": [user("q\n\n"), said("a\n\nb\n"), user("r"), said("c")],
    "looks like a turn": [user("<s>[INST] x"), said("to [/INST] or <|im_end|>, ab")],
}
ONE_CALL = [SYSTEM, user("Oslo?"), called(OSLO), RESULT, said("21 degrees"), user("Ok?"), said("a")]
THOUGHT = "<think>\nab Python\n</think>\n\n"
REASONING = {
    "in the content": [user("q"), said(f"{THOUGHT}an answer")],
    "by itself": [user("q"), said("an answer", reasoning_content="ab Python")],
    "earlier": [user("q"), said(f"{THOUGHT}ab"), user("r"), said(f"{THOUGHT}an answer")],
    "none": [user("q"), said("ab"), user("r"), said("an answer")],
}
CASES = [
    *((family, name, None, {}) for family in FAMILIES for name in CHATS),
    *((family, "tools", TOOLS, {}) for family in ("qwen2.5", "qwen3", "llama3", "mistral")),
    *((family, "two calls", TOOLS, {}) for family in ("qwen2.5", "qwen3", "mistral")),
    *(("qwen3", name, None, {}) for name in REASONING),
    ("qwen3", "none", None, {"enable_thinking": False}),
    ("qwen3", "thinks and calls", TOOLS, {}),
]
ALL = CHATS | REASONING
ALL["tools"] = ONE_CALL
ALL["two calls"] = [user("Both?"), called(OSLO, OSLO), RESULT, RESULT, said("21, both")]
ALL["thinks and calls"] = [
    user("Oslo?"),
    {**called(OSLO), "reasoning_content": "ab"},
    RESULT,
    said("21", reasoning_content="yt"),
]


def folder_of(family, folder):
    listed = {
        str(259 + len(MERGES) + i): {"content": text, "special": True, "normalized": False}
        for i, text in enumerate(SPECIALS)
    }
    return write_tokenizer(
        folder,
        chat_template=plain(FAMILIES[family]),
        merges=MERGES,
        config={"added_tokens_decoder": listed},
    )


@pytest.mark.parametrize(("family", "name", "tools", "kwargs"), CASES)
def test_the_spans_are_those_that_the_marks_enclose(family, name, tools, kwargs, tmp_path):
    messages = ALL[name]
    marked = ChatTemplate(FAMILIES[family], origin="marked")
    text, spans = marked.render_marked(messages, tools=tools, template_kwargs=kwargs)
    row = ChatRow(
        source="f:1",
        messages=messages,
        train=tuple(m["role"] == "assistant" for m in messages),
        tools=tools,
        template_kwargs=kwargs,
    )
    template = ChatTemplate(plain(FAMILIES[family]), origin="plain")
    assert not template.has_generation_markers
    located = locate(row, template, ("<|im_end|>", "<|im_start|>", *SPECIALS))
    assert located.text == text
    assert [text[slice(*span)] for span in located.learnt] == [text[slice(*s)] for s in spans]
    assert located.learnt == spans


def blank_row(turns):
    """Every message with white space around it, hardly two of the same."""
    rng, messages = random.Random(0), []
    for i in range(turns // 2):
        asked, answered = (f"{i} Python{' ab' * rng.randrange(5)}" for _ in range(2))
        blanks = ["".join(rng.choices(" \n", k=rng.randrange(6))) for _ in range(4)]
        messages += [user(blanks[0] + asked + blanks[1]), said(blanks[2] + answered + blanks[3])]
    train = tuple(m["role"] == "assistant" for m in messages)
    return ChatRow(source="f:1", messages=messages, train=train)


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_hundred_turns_with_white_space_around_them(family, monkeypatch):
    """The marked template's spans, by few renderings though each takes long."""
    row = blank_row(800)
    text, expected = ChatTemplate(FAMILIES[family], origin="marked").render_marked(row.messages)
    template, rendered = ChatTemplate(plain(FAMILIES[family]), origin="plain"), []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **k: rendered.append(1) or render(*a, **k)
    )
    located = locate(row, template, SPECIALS)
    assert (located.text, located.learnt) == (text, expected)
    assert len(expected) == 400 and len(rendered) < 200


@pytest.mark.parametrize("family", mostly_thorough(FAMILIES, {"chatml"}))
def test_white_space_is_whose_it_is_where_each_answer_is_measured(family, monkeypatch):
    row, template = blank_row(800), ChatTemplate(plain(FAMILIES[family]), origin="plain")
    found = locate(row, template, SPECIALS)
    monkeypatch.setattr(all_spans, "MANY", 10**9)
    assert locate(row, template, SPECIALS) == found


@pytest.mark.parity
@pytest.mark.parametrize("family", mostly_thorough(FAMILIES, {"qwen3"}))
def test_tokens_and_masks_are_those_of_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = folder_of(family, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    cases = [case[1:] for case in CASES if case[0] == family]
    rows = [
        {"messages": ALL[name], "tools": tools, "chat_template_kwargs": kwargs}
        for name, tools, kwargs in cases
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(folder)
    examples, _ = load_examples([path], tokenizer, ExampleSettings(max_seq_length=8192))
    for index, (name, tools, kwargs) in enumerate(cases):
        expected = theirs.apply_chat_template(
            ALL[name],
            tools=tools,
            chat_template=FAMILIES[family],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **kwargs,
        )
        assert examples.input_ids(index).tolist() == expected["input_ids"], name
        learnt = (examples.labels(index) != IGNORED).astype(int).tolist()
        assert learnt == expected["assistant_masks"], name
