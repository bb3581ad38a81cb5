"""Files -> records -> rows."""

from __future__ import annotations

import json

import pytest

from slidedp_jax.data.records import RowError, read_records
from slidedp_jax.data.remarks import Remarks
from slidedp_jax.data.rows import ChatRow, CompletionRow, TextRow, TokenRow, parse_row
from slidedp_jax.errors import UserError

USER = {"role": "user", "content": "hi"}


def rows_of(*paths, columns=None):
    return [parse_row(record, columns) for record in read_records(paths)]


def row_of(fields, write_rows, columns=None):
    return rows_of(write_rows([fields]), columns=columns)[0]


def test_lines_end_at_lf_only(tmp_path):
    texts = ["a\u2028b", "c\u2029d", "e\u0085f", "g", "h\u000bi\u000cj\u001ck", "last"]
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    path = tmp_path / "odd.jsonl"
    body = f"{lines[0]}\n{lines[1]}\r\n\n{lines[2]}\n \t\r\n{lines[3]}\n{lines[4]}\n{lines[5]}"
    path.write_bytes(b"\xef\xbb\xbf" + body.encode("utf-8"))
    assert [row.text for row in rows_of(path)] == texts


def test_sources_count_lines_including_blank_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert [row.source for row in rows_of(path)] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_array_files_are_detected_whatever_their_name(tmp_path, name):
    path = tmp_path / name
    path.write_text('\ufeff\n [{"text": "a"},\n {"text": "b"}]', encoding="utf-8")
    rows = rows_of(path)
    assert [row.text for row in rows] == ["a", "b"]
    assert rows[1].source == f"{path}:row 2"


def test_lines_named_json_are_read_as_lines(write_rows):
    assert len(rows_of(write_rows([{"text": "a"}, {"text": "b"}], "rows.json"))) == 2


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\u2028three\n".encode())
    assert rows_of(path) == [
        TextRow(source=str(path), text="one\n\ntwo\u2028three\n", whole_file=True)
    ]


def test_several_files_in_the_order_given(write_rows):
    b = write_rows([{"text": "1"}], "b.jsonl")
    a = write_rows([{"text": "2"}], "a.jsonl")
    assert [row.text for row in rows_of(b, a)] == ["1", "2"]


def test_columns_may_change_type_and_be_null(write_rows):
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [
        {"messages": [USER], "tools": None if i < 150 else [tool], "extra": i if i % 2 else "x"}
        for i in range(200)
    ]
    read = rows_of(write_rows(rows))
    assert [row.tools for row in read] == [None] * 150 + [[tool]] * 50


def test_parquet_with_nested_rows_in_several_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [
        {
            "messages": [USER, {"role": "assistant", "content": f"row {i}", "tool_calls": None}],
            "blob": b"\xff\x00",
        }
        for i in range(20)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7, use_dictionary=True)
    read = rows_of(path)
    assert [row.messages[1] for row in read] == [
        {"role": "assistant", "content": f"row {i}"} for i in range(20)
    ]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("slidedp_jax.data.records.importlib.util.find_spec", lambda name: None)
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"rows\.parquet.*pip install pyarrow"):
        read_records([path])


# Kinds.


def test_kinds(write_rows):
    chat = row_of({"messages": [USER, {"role": "assistant", "content": "yo"}]}, write_rows)
    assert isinstance(chat, ChatRow) and chat.train == (False, True)
    pair = row_of({"prompt": "a", "completion": "b"}, write_rows)
    assert isinstance(pair, CompletionRow) and (pair.prompt, pair.completion) == ("a", "b")
    tokens = row_of({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, write_rows)
    assert isinstance(tokens, TokenRow) and tokens.labels == [-100, 2, 3]
    assert row_of({"text": "t", "messages": None}, write_rows).text == "t"


def test_attention_mask_takes_padding_out(write_rows):
    fields = {"input_ids": [0, 5, 6], "labels": [-100, 5, 6], "attention_mask": [0, 1, 1]}
    row = row_of(fields, write_rows)
    assert (row.input_ids, row.labels) == ([5, 6], [5, 6])


def test_alpaca_and_sharegpt_become_conversations(write_rows):
    alpaca = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be right."}
    assert row_of(alpaca, write_rows).messages == [
        {"role": "system", "content": "Be right."},
        {"role": "user", "content": "Add\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert row_of({"conversations": turns}, write_rows).messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]


ALPACA = {"instruction": "q", "output": "a"}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("history", [[["q1", "a1"], ["q2", "a2"]], '[["q1", "a1"], ["q2", "a2"]]'])
def test_alpaca_history_becomes_earlier_turns(write_rows, history):
    row = row_of(ALPACA | {"history": history, "system": "s"}, write_rows)
    said = ["s", "q1", "a1", "q2", "a2", "q", "a"]
    assert [message["content"] for message in row.messages] == said
    assert [m["role"] for m in row.messages] == ["system", *["user", "assistant"] * 3]
    assert row.train == (False, *[False, True] * 3)


@pytest.mark.parametrize("history", [None, [], "", "[]"])
def test_no_history(write_rows, history):
    assert row_of(ALPACA | {"history": history}, write_rows).messages == TURNS


def test_history_from_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [ALPACA | {"history": [["q1", "a1"]]}, ALPACA | {"history": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = rows_of(tmp_path / "rows.parquet")
    assert [message["content"] for message in first.messages] == ["q1", "a1", "q", "a"]
    assert second.messages == TURNS


def remarks_of(fields, write_rows, columns=None):
    return [remark.text for remark in row_of(fields, write_rows, columns).remarks]


@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        ({"messages": TURNS, "text": "t", "prompt": "p"}, ["text", "prompt"]),
        ({"messages": TURNS, "system": "s", "tools": [], "labels": None, "input": ""}, []),
        ({"prompt": "p", "completion": "c", "tools": [{"name": "f"}]}, ["tools"]),
        ({"prompt": "p", "completion": "c", "system": "s"}, ["system"]),
        ({"text": "t", "labels": [1], "chat_template_kwargs": {"a": 1}}, None),
        ({"input_ids": [1], "labels": [1], "attention_mask": [1]}, []),
        ({"input_ids": [1], "text": "t"}, ["text"]),
        (ALPACA | {"input": "i", "text": "t", "other": 1}, ["text"]),
    ],
)
def test_what_a_row_of_its_kind_does_not_read_is_remarked(write_rows, fields, unread):
    unread = ["labels", "chat_template_kwargs"] if unread is None else unread
    assert [text.split("`")[1] for text in remarks_of(fields, write_rows)] == unread


def test_unread_columns_are_named_as_in_the_file(write_rows):
    fields = {"chat": TURNS, "doc": "t", "text": "no field"}
    remarks = remarks_of(fields, write_rows, {"messages": "chat", "text": "doc"})
    assert remarks == ["`doc` beside `chat` is not read ({} [row|rows])"]


def test_messages_that_ask_to_be_learnt_and_are_not_the_assistants(write_rows):
    turns = [USER | {"train": True}, {"role": "assistant", "content": "a", "weight": 1}]
    row = row_of({"messages": turns}, write_rows)
    assert row.train == (False, True)
    (remark,) = row.remarks
    notes = Remarks()
    notes.add("f", row.remarks)
    said = "that is not the assistant's asks to be learnt and is not"
    assert remark.count == 1 and notes.lines() == (f"f: 1 message {said}",)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"a": None}, True),
        ({"a": [{"b": None}]}, True),
        ({"a": [None]}, False),
        ({"a": 1}, False),
        ('{"a": null}', False),
    ],
)
def test_null_in_arguments_stays_and_is_counted(write_rows, arguments, found):
    calls = [{"function": {"name": "f", "arguments": arguments}}] * 2
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    row = row_of({"messages": [USER, said]}, write_rows)
    as_object = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == as_object
    assert sum(remark.count for remark in row.remarks) == 2 * found


def test_null_in_definitions_is_counted_where_it_is_not_meant(write_rows):
    tools = [
        {"name": "f", "parameters": {"properties": {"a": {"default": None}, "b": None}}},
        {"name": "g", "parameters": {"properties": {"a": {"default": None}}}},
    ]
    row = row_of({"messages": [USER], "tools": tools}, write_rows)
    assert all("tool definitions hold null" in remark.text for remark in row.remarks)
    assert [remark.count for remark in row.remarks] == [1, 0]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_masks_of_what_is_learnt(write_rows, name):
    fields = {"input_ids": [5, 6, 7], name: [0, 1, 1]}
    assert row_of(fields, write_rows).labels == [-100, 6, 7]
    assert row_of(fields | {"labels": [5, 6, -100]}, write_rows).labels == [-100, 6, -100]
    assert row_of(fields | {name: [False, True, True]}, write_rows).labels == [-100, 6, 7]
    padded = fields | {"attention_mask": [1, 1, 0]}
    assert row_of(padded, write_rows).labels == [-100, 6]
    with pytest.raises(RowError, match=f"`{name}` has 1 entries, input_ids has 3"):
        row_of(fields | {name: [1]}, write_rows)


def test_message_lists_as_prompt_and_completion_train_the_completion(write_rows):
    said = {"role": "assistant", "content": "x"}
    row = row_of({"prompt": [USER, said, USER], "completion": [said]}, write_rows)
    assert row.train == (False, False, False, True)


@pytest.mark.parametrize(("flag", "learnt"), [({"train": False}, False), ({"weight": 0}, False)])
def test_per_turn_flag(write_rows, flag, learnt):
    said = {"role": "assistant", "content": "x"}
    row = row_of({"messages": [USER, said | flag, USER, said]}, write_rows)
    assert row.train == (False, learnt, False, True)
    assert row.messages[1] == said


def test_columns_map_names(write_rows):
    row = row_of({"q": "a", "a": "b"}, write_rows, {"prompt": "q", "completion": "a"})
    assert (row.prompt, row.completion) == ("a", "b")
    with pytest.raises(UserError, match="promt"):
        row_of({"q": "a"}, write_rows, {"promt": "q"})


# What is wrong is said with its place.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, r"`messages` must be a list of at least one message, got an empty list"),
        ({"messages": [{"role": "user", "content": None}]}, r"`messages\[0\].content` is missing"),
        ({"messages": [USER, {"role": "bot", "content": ""}]}, r"`messages\[1\].role` is 'bot'"),
        (
            {"messages": [{"role": "user", "content": []}]},
            r"`messages\[0\].content` is an empty list",
        ),
        ({"messages": ["hi"]}, r"`messages\[0\]` must be an object"),
        ({"messages": [USER | {"train": "no"}]}, r"`messages\[0\].train`"),
        ({"prompt": "a"}, "`completion` is missing"),
        ({"prompt": "a", "completion": None}, "`completion` must be a string, got null"),
        ({"input_ids": [1, 2.5]}, "`input_ids` must be a flat list of integers"),
        ({"input_ids": [[1]]}, "`input_ids` must be a flat list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 entries, input_ids has 2"),
        ({"input_ids": [2**70]}, "beyond 64 bits"),
        ({"content": "a"}, r"no usable field among \['content'\]"),
        ({"conversations": [{"from": "alien", "value": ""}]}, r"conversations\[0\].from"),
        ({"messages": [USER], "tools": "{"}, "`tools` is a string but not JSON"),
        ({"instruction": "q", "output": "a", "history": "x"}, "`history` is a string but not"),
        ({"instruction": "q", "output": "a", "history": {}}, "`history` must be a list of"),
        (
            {"instruction": "q", "output": "a", "history": [["q", "a"], ["q"]]},
            r"`history\[1\]` must be a \[question, answer\] pair, got 1 entries",
        ),
        (
            {"instruction": "q", "output": "a", "history": [{"q": "a"}]},
            r"`history\[0\]` must be a .*pair, got dict",
        ),
        (
            {"instruction": "q", "output": "a", "history": [["q", None]]},
            r"`history\[0\]\[1\]` must be a string, got null",
        ),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an"),
        (3, "a row must be a JSON object"),
    ],
)
def test_bad_rows(write_rows, fields, message):
    path = write_rows([{"text": "fine"}, fields])
    with pytest.raises(RowError, match=message) as caught:
        rows_of(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_lone_surrogate_is_not_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "\\ud800"}\n')
    with pytest.raises(RowError, match=r"rows\.jsonl:1: `text` holds half of a surrogate pair"):
        rows_of(path)


def test_malformed_line_has_the_parsers_message(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": }\n')
    with pytest.raises(RowError, match=r"rows\.jsonl:2: not valid JSON: Expecting value at column"):
        rows_of(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_parsers_message_that_ends_in_at(tmp_path, name):
    path = tmp_path / name
    path.write_text('[{"text": "a}]' if name == "rows.json" else '{"text": "a}\n')
    with pytest.raises(UserError, match=r"Unterminated string starting at column \d+$"):
        rows_of(path)


def test_not_utf8(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(RowError, match=r":1: not UTF-8"):
        rows_of(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b" \r\n\n"])
def test_empty_file_is_named_before_any_row_is_read(tmp_path, write_rows, name, content):
    good = write_rows([{"text": "a"}])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is empty"):
        read_records([good, tmp_path / name])


def test_missing_file_folder_and_type(tmp_path, write_rows):
    write_rows([{"text": "a"}], "train.jsonl")
    with pytest.raises(UserError, match=r"trian\.jsonl does not exist.*train\.jsonl"):
        read_records([tmp_path / "trian.jsonl"])
    with pytest.raises(UserError, match=r"is a folder.*train\.jsonl"):
        read_records([tmp_path])
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"unknown type '\.csv'"):
        read_records([tmp_path / "a.csv"])
    with pytest.raises(UserError, match="no data file"):
        read_records([])


def test_broken_array_names_its_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n{"text" 3}]')
    with pytest.raises(UserError, match=r"a\.json:2: the file begins as a JSON array"):
        rows_of(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="empty array"):
        rows_of(path)


def test_object_over_several_lines_gets_a_hint(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n"text": "a"\n}')
    with pytest.raises(RowError, match="write one row per line"):
        rows_of(path)
