"""Tool calls and definitions in every form that data has them."""

from __future__ import annotations

import json

import pytest
from template_texts import CALLS_AS_JSON, CALLS_AS_TEXT

from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.data.records import Record, RowError
from slidedp_jax.data.rows import parse_row

ARGUMENTS = {"z": "Oslo", "a": {"deep": [1, None, "é"]}, "n": None}
WHOLE = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
TEXT = json.dumps(ARGUMENTS)


def row_of(**fields):
    return parse_row(Record(source="f:1", fields=fields))


def row_with(calls, **message):
    said = {"role": "assistant", "content": None, "tool_calls": calls} | message
    return row_of(messages=[{"role": "user", "content": "q"}, said])


def calls_of(calls):
    return row_with(calls).messages[1]["tool_calls"]


def function(**entries):
    return [{"id": "c1", "type": "function", "function": {"name": "f"} | entries}]


@pytest.mark.parametrize(
    "calls",
    [
        [WHOLE],
        function(arguments=TEXT),
        function(arguments=TEXT, description=None),
        function(parameters=ARGUMENTS),
        function(parameters=TEXT),
        [{"id": "c1", "name": "f", "arguments": ARGUMENTS}],
        [{"id": "c1", "name": "f", "arguments": TEXT, "type": "tool_use"}],
        [{"id": "c1", "name": "f", "input": ARGUMENTS, "function": None}],
        [{"id": "c1", "type": "function", "function": json.dumps({"name": "f", "args": TEXT})}],
        [json.dumps(WHOLE)],
        json.dumps([WHOLE]),
        json.dumps([{"id": "c1", "name": "f", "parameters": TEXT}]),
    ],
)
def test_one_call_in_many_forms(calls):
    assert calls_of(calls) == [WHOLE]
    assert list(calls_of(calls)[0]["function"]["arguments"]) == ["z", "a", "n"]


@pytest.mark.parametrize("template", [CALLS_AS_JSON, CALLS_AS_TEXT])
def test_arguments_render_alike_as_text_and_as_object(template):
    template = ChatTemplate(template, origin="t")
    texts = {
        template.render(row_with(function(arguments=form)).messages)
        for form in (TEXT, ARGUMENTS, json.dumps(ARGUMENTS, indent=1))
    }
    assert len(texts) == 1
    assert '{"z": "Oslo", "a": {"deep": [1, null, "é"]}, "n": null}' in texts.pop()


@pytest.mark.parametrize("none", [{}, {"arguments": ""}, {"arguments": None}, {"arguments": "{}"}])
def test_a_call_without_arguments_has_an_empty_object(none):
    assert calls_of(function(**none))[0]["function"]["arguments"] == {}


def test_what_else_a_call_says_is_kept():
    call = {"index": 0, "function": {"description": "d", "name": "f", "arguments": "{}"}, "id": "x"}
    kept = calls_of([call])[0]
    assert list(kept) == ["type", "index", "function", "id"]
    assert list(kept["function"]) == ["description", "name", "arguments"]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            function(arguments="{"),
            r"`messages\[1\].tool_calls\[0\].function.arguments` is a string",
        ),
        (function(arguments="Oslo"), r"tool_calls\[0\].function.arguments` is a string but not"),
        (function(arguments="null"), r"function.arguments` must be an object.* got null"),
        (function(arguments="[1]"), r"function.arguments` must be an object.* got list"),
        (function(arguments=[1]), r"function.arguments` must be an object.* got list"),
        (function(arguments=3), r"function.arguments` must be an object.* got int"),
        (function(parameters="x"), r"function.parameters` is a string but not JSON"),
        (function(arguments={}, parameters={}), "has arguments twice"),
        (function(argument={"x": 1}), r"has no `arguments` but \['argument'\]"),
        (function(name=None), r"function.name` must be the name .*got null"),
        (function(name=""), r"function.name` must be the name .*got an empty string"),
        ([{"arguments": {}}], r"tool_calls\[0\].name` must be the name"),
        ([{"name": "f", "arguments": "x"}], r"tool_calls\[0\].arguments` is a string but not"),
        ([{"function": "f", "arguments": {}}], r"tool_calls\[0\].arguments` stands beside"),
        ([{"function": 3}], r"tool_calls\[0\].function` must be an object, got int"),
        ([WHOLE, None], r"tool_calls\[1\]` must be an object, a call, got null"),
        (WHOLE, r"`messages\[1\].tool_calls` must be a list of calls, got dict"),
        ("f(x)", r"`messages\[1\].tool_calls` is a string but not JSON"),
    ],
)
def test_structural_errors_have_their_place(calls, message):
    with pytest.raises(RowError, match=message) as caught:
        row_with(calls)
    assert str(caught.value).startswith("f:1: ")


@pytest.mark.parametrize("none", [[], None, "", "[]", " ", "null", {}])
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_no_calls_means_no_key(none, key):
    message = {"role": "assistant", "content": "yes"}
    assert row_of(messages=[message | {key: none}]).messages == [message]


def test_the_answer_beside_no_calls_is_printed_by_templates_that_test_for_the_key():
    source = (
        "{% for m in messages %}{% if 'tool_calls' in m %}[TOOL_CALLS] {{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    row = row_of(messages=[{"role": "assistant", "content": "yes", "tool_calls": []}])
    assert ChatTemplate(source, origin="t").render(row.messages) == "yes"


def test_the_older_form_of_a_call():
    for older in ({"name": "f", "arguments": TEXT}, json.dumps({"name": "f", "arguments": TEXT})):
        row = row_with(None, function_call=older)
        assert row.messages[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": WHOLE["function"]}],
        }
    assert (
        "tool_calls"
        not in row_with(
            None, content="x", function_call={"name": None, "arguments": None}
        ).messages[1]
    )
    with pytest.raises(RowError, match=r"`messages\[1\].function_call.arguments` is a string but"):
        row_with(None, function_call={"name": "f", "arguments": "x"})
    with pytest.raises(RowError, match=r"function_call` stands beside `tool_calls`"):
        row_with([WHOLE], function_call={"name": "f", "arguments": "{}"})


# Definitions.

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [TOOL | {"function": json.dumps(TOOL["function"])}],
        [TOOL | {"function": {"name": "f", "parameters": json.dumps(SCHEMA)}}],
        [
            TOOL
            | {
                "function": {
                    "name": "f",
                    "parameters": SCHEMA | {"properties": json.dumps(SCHEMA["properties"])},
                }
            }
        ],
    ],
)
def test_definitions_in_many_forms(tools):
    row = row_of(messages=[{"role": "user", "content": "q"}], tools=tools)
    assert row.tools == [TOOL]
    assert list(row.tools[0]["function"]["parameters"]["properties"]) == ["z", "a"]


def test_flat_definitions_stay_flat():
    flat = {"name": "f", "parameters": json.dumps(SCHEMA)}
    row = row_of(messages=[{"role": "user", "content": "q"}], tools=[flat])
    assert row.tools == [{"name": "f", "parameters": SCHEMA}]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_definitions(tools):
    assert row_of(messages=[{"role": "user", "content": "q"}], tools=tools).tools is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "f"}, "`tools` must be a list, got dict"),
        ([3], r"`tools\[0\]` must be an object.* got int"),
        (["f"], r"`tools\[0\]` is a string but not JSON"),
        ([{"name": "f", "parameters": "x"}], r"`tools\[0\].parameters` is a string but not JSON"),
        (
            [{"function": {"name": "f", "parameters": "[]"}}],
            r"`tools\[0\].function.parameters` must be an object.* got list",
        ),
    ],
)
def test_definitions_that_are_none(tools, message):
    with pytest.raises(RowError, match=message):
        row_of(messages=[{"role": "user", "content": "q"}], tools=tools)
