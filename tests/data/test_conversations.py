"""Conversations in the forms of other tools."""

from __future__ import annotations

import json

import pytest

from slidedp_jax.data.records import Record, RowError
from slidedp_jax.data.rows import parse_row

USER = {"role": "user", "content": "q"}
CALL = {"name": "f", "arguments": {"city": "Oslo"}}
CALLED = {"type": "function", "function": CALL}


def row_of(**fields):
    return parse_row(Record(source="f:1", fields=fields))


def messages_of(**fields):
    return row_of(**fields).messages


def sharegpt(*turns):
    """Turns after a question, as (from, value)."""
    turns = [("human", "q"), *turns]
    return {"conversations": [{"from": who, "value": value} for who, value in turns]}


def swift(*turns):
    """Turns after a question, as (role, content)."""
    turns = [("user", "q"), *turns]
    return {"messages": [{"role": who, "content": value} for who, value in turns]}


@pytest.mark.parametrize("form", [sharegpt, swift])
@pytest.mark.parametrize("who", ["function_call", "tool_call", "tool_calls"])
@pytest.mark.parametrize(
    "said", [json.dumps(CALL), json.dumps([CALL]), CALL, json.dumps(CALL | {"arguments": "{}"})]
)
def test_turns_that_are_calls(form, who, said):
    row = row_of(**form((who, said)))
    function = CALL | ({"arguments": {}} if '"{}"' in str(said) else {})
    assert row.messages == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]
    assert row.train == (False, True)


@pytest.mark.parametrize("form", [sharegpt, swift])
@pytest.mark.parametrize(
    "who", ["observation", "tool", "tool_response", "function_response", "function"]
)
def test_turns_that_are_results(form, who):
    row = row_of(**form(("function_call", json.dumps(CALL)), (who, '{"name": "x"}')))
    assert row.messages[2] == {"role": "tool", "content": '{"name": "x"}'}
    assert row.train == (False, True, False)


def test_the_older_role_of_results_keeps_its_name():
    result = {"role": "function", "name": "f", "content": json.dumps(CALL)}
    assert messages_of(messages=[USER, result])[1] == result | {"role": "tool"}


def test_a_function_turn_that_looks_like_a_call_is_refused():
    with pytest.raises(RowError, match=r"conversations\[1\].from` is 'function'.*function_call"):
        row_of(**sharegpt(("function", json.dumps(CALL))))


@pytest.mark.parametrize("form", [sharegpt, swift])
def test_calls_belong_to_the_turn_before_them(form):
    other = {"name": "g", "arguments": {}}
    said = [("tool_call", json.dumps(call)) for call in (CALL, other)]
    calls = [CALLED, {"type": "function", "function": other}]
    assert messages_of(**form(*said))[1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls}
    ]
    assert messages_of(**form(("assistant", "let me look"), *said))[1:] == [
        {"role": "assistant", "content": "let me look", "tool_calls": calls}
    ]
    # What is to be learnt apart stays apart.
    row = form(("assistant", "let me look"), said[0])
    row[next(iter(row))][1]["train"] = False
    assert row_of(**row).train == (False, False, True)


def test_a_turn_of_calls_may_have_them_under_their_own_key():
    turn = {"role": "tool_calls", "content": None, "tool_calls": [CALL], "function_call": None}
    assert messages_of(messages=[turn])[0] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALLED],
    }
    turn = {"role": "tool_call", "content": json.dumps(CALL), "tool_calls": []}
    assert messages_of(messages=[turn])[0]["tool_calls"] == [CALLED]


def test_a_thought_before_a_call():
    said = "<think>\nhm\n</think>\n\n" + json.dumps(CALL)
    assert messages_of(**sharegpt(("function_call", said)))[1] == {
        "role": "assistant",
        "content": "<think>\nhm\n</think>",
        "tool_calls": [CALLED],
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("f(x)", r"`conversations\[1\].value` is a string but not JSON"),
        ("<think>hm</think>", r"`conversations\[1\].value` must be a call"),
        (None, r"`conversations\[1\].value` must be a call.* got null"),
        ("[]", r"`conversations\[1\].value` must be a call.* got list"),
        ("3", r"`conversations\[1\].value` must be a call.* got int"),
        ('{"arguments": {}}', r"`conversations\[1\].value.name` must be the name"),
        ('[{"name": "f", "arguments": 1}]', r"`conversations\[1\].value\[0\].arguments` must be"),
    ],
)
def test_calls_that_are_none(said, message):
    with pytest.raises(RowError, match=message):
        row_of(**sharegpt(("function_call", said)))


def test_other_keys_of_a_turn_are_kept():
    turn = {"from": "gpt", "value": "a", "reasoning_content": "r", "tool_calls": [CALL]}
    assert messages_of(conversations=[turn])[0] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [CALLED],
    }


def test_a_content_of_text_parts_is_their_text():
    parts = [
        {"type": "text", "text": "a ", "image_url": None},
        {"type": "output_text", "text": "b", "annotations": []},
    ]
    assert messages_of(messages=[USER, {"role": "assistant", "content": parts}])[1] == {
        "role": "assistant",
        "content": "a b",
    }
    assert messages_of(**sharegpt(("gpt", parts)))[1]["content"] == "a b"
    assert messages_of(prompt=[USER | {"content": parts}], completion=[USER])[0]["content"] == "a b"
    called = {"role": "assistant", "content": [], "tool_calls": [CALL]}
    assert messages_of(messages=[called])[0]["content"] == ""


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "u"}}, r"\.type` is 'image_url'; .* only text"),
        (
            {"type": "thinking", "thinking": "t"},
            r"\.type` is 'thinking'; .* belongs in `reasoning_content`",
        ),
        ({"text": "b"}, r"\.type` is None; "),
        ({"type": "text"}, r"\.text` must be a string, got null"),
        ({"type": "text", "text": 3}, r"\.text` must be a string, got int"),
        ("b", r"` must be an object with type and text, got str"),
    ],
)
def test_parts_that_are_not_text_are_named(part, message):
    said = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    with pytest.raises(RowError, match=r"f:1: `messages\[0\].content\[1\]" + message):
        row_of(messages=[said])


def test_either_form_of_a_turn_in_either_field():
    turns = [{"from": "human", "value": "q"}, {"role": None, "from": "gpt", "value": "a"}]
    expected = [USER, {"role": "assistant", "content": "a"}]
    assert messages_of(messages=turns) == messages_of(conversations=expected) == expected
    assert messages_of(messages=json.dumps(turns)) == expected


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_empty_reasoning_is_none(key):
    said = {"role": "assistant", "content": "a"}
    assert messages_of(messages=[said | {key: ""}]) == [said]
    assert messages_of(messages=[said | {key: " "}]) == [said | {key: " "}]


@pytest.mark.parametrize(
    ("flags", "learnt"),
    [
        ({"train": None, "weight": 0}, False),
        ({"train": True, "weight": 0}, True),
        ({"loss": False}, False),
        ({"loss": True}, True),
    ],
)
def test_flags_of_a_turn(flags, learnt):
    said = {"role": "assistant", "content": "a"}
    row = row_of(messages=[said | flags])
    assert (row.train, row.messages) == ((learnt,), [said])


def test_a_measured_loss_is_no_flag():
    said = {"role": "assistant", "content": "a", "loss": 0.0}
    row = row_of(messages=[said])
    assert (row.train, row.messages) == ((True,), [said])


def test_flags_that_are_none_are_named():
    with pytest.raises(RowError, match=r"`messages\[0\].weight` must be true or false, got 0.5"):
        row_of(messages=[{"role": "assistant", "content": "a", "weight": 0.5}])


def test_the_column_system_begins_conversations_of_every_form():
    system, said = {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}
    for fields in (
        {"messages": [USER, said]},
        {"conversations": [USER, said]},
        {"prompt": [USER], "completion": [said]},
        {"instruction": "q", "output": "a"},
        {"messages": [system, USER, said]},  # it says so itself
    ):
        assert messages_of(system="s", **fields) == [system, USER, said]
    assert messages_of(system="", messages=[USER, said]) == [USER, said]
    other = {"role": "system", "content": "t"}
    assert messages_of(system="s", messages=[other, USER]) == [system, other, USER]
