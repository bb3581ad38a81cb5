"""Parquet rows have the keys that they were written with, at any depth."""

from __future__ import annotations

import json

import pytest

from slidedp_jax.data.records import read_records
from slidedp_jax.data.rows import parse_row

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def round_trip(path, rows, schema=None):
    """The rows' fields after having been a parquet file; null columns left out."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return [
        {name: value for name, value in record.fields.items() if value is not None}
        for record in read_records([path])
    ]


def tool(name, properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chat(name, arguments, properties):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [tool(name, properties)],
    }


ROWS = [
    chat("f", {"city": "Oslo"}, {"city": {"type": "string", "enum": ["Oslo"]}}),
    chat("g", {"amount": 3, "deep": {"x": 1}}, {"amount": {"type": "integer"}}),
    chat("h", {"deep": {"y": [{"a": 1}, {"b": 2}]}}, {"deep": {"type": "object"}}),
    chat("i", {}, {}),
]


def test_rows_keep_their_own_keys(tmp_path):
    assert round_trip(tmp_path / "t.parquet", ROWS) == ROWS


def test_rows_with_different_tools_are_the_same_from_parquet_and_from_lines(tmp_path, write_rows):
    lines = write_rows(ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    parsed = [
        [(row.messages, row.tools) for row in map(parse_row, read_records([path]))]
        for path in (lines, tmp_path / "t.parquet")
    ]
    assert parsed[0] == parsed[1]
    assert parsed[1][3][0][1]["tool_calls"][0]["function"]["arguments"] == {}


def test_other_nested_columns_lose_their_nulls_too(tmp_path):
    rows = [
        {"chat_template_kwargs": {"enable_thinking": False}, "text": "a"},
        {"chat_template_kwargs": {"date": "today"}, "text": "b"},
    ]
    assert round_trip(tmp_path / "t.parquet", rows) == rows


def test_elements_of_lists_stay(tmp_path):
    rows = [{"a": {"list": [1, None, 3]}, "b": [None, {"x": None, "y": 1}]}, {"a": {"other": 1}}]
    expected = [{"a": {"list": [1, None, 3]}, "b": [None, {"y": 1}]}, {"a": {"other": 1}}]
    assert round_trip(tmp_path / "t.parquet", rows) == expected


def test_nulls_in_json_text_stay(tmp_path):
    text = json.dumps({"city": None})
    rows = [chat("f", text, {"city": {"type": "string"}})] * 2
    path = tmp_path / "t.parquet"
    assert round_trip(path, rows)[0]["messages"][1]["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": text,
    }
    calls = parse_row(next(iter(read_records([path])))).messages[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"city": None}


def test_maps_become_objects_with_their_own_keys(tmp_path):
    struct = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    schema = pa.schema(
        [
            ("flat", pa.map_(pa.string(), pa.string())),
            ("deep", pa.list_(pa.struct([("m", pa.map_(pa.string(), struct))]))),
        ]
    )
    rows = [
        {"flat": {"a": "1", "b": None}, "deep": [{"m": {"k": {"x": 1}, "l": None}}]},
        {"flat": {}, "deep": None},
    ]
    assert round_trip(tmp_path / "t.parquet", rows, schema) == [rows[0], {"flat": {}}]


def test_every_layout_of_lists_and_dictionaries(tmp_path):
    struct = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    schema = pa.schema(
        [
            ("large", pa.large_list(struct)),
            ("fixed", pa.list_(struct, 1)),
            ("coded", pa.dictionary(pa.int32(), pa.string())),
            ("outer", pa.struct([("inner", pa.list_(struct)), ("z", pa.string())])),
        ]
    )
    rows = [
        {"large": [{"x": 1}], "fixed": [{"y": 2}], "coded": "a", "outer": {"inner": [{"x": 3}]}},
        {"large": [], "fixed": [{}], "coded": "b", "outer": {"z": "z"}},
    ]
    assert round_trip(tmp_path / "t.parquet", rows, schema) == rows
