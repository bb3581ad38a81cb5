"""Files in blocks: the same records, places and reports, however they are cut and by whom read."""

import json
import os
import random
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import chat_rows

from slidedp_jax.data import ExampleSettings, RowError, load_examples, load_tokenizer
from slidedp_jax.data.encode_block import BlockEncoder
from slidedp_jax.data.parquet import parquet_parts, parquet_rows
from slidedp_jax.data.records import blocks_of, read_records, records_in
from slidedp_jax.data.workers import _Process, encoded_in_processes
from slidedp_jax.errors import UserError

LINES = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "\xe2\x80\xa8"}\nnot json\n\n{"text": "last"}'


@pytest.fixture
def files(tmp_path):
    """One of each kind; lines with a byte order mark, blank lines, no last LF and a bad one."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.json").write_text(json.dumps([{"text": f"b{i}"} for i in range(5)], indent=1))
    (tmp_path / "c.txt").write_text("whole\nfile")
    pq.write_table(
        pa.Table.from_pylist([{"text": f"d{i}"} for i in range(11)]),
        tmp_path / "d.parquet",
        row_group_size=4,
    )
    return [tmp_path / name for name in ("a.jsonl", "b.json", "c.txt", "d.parquet")]


def content(records):
    return [(r.source.rsplit("/", 1)[-1], r.fields, bool(r.error)) for r in records]


@pytest.mark.parametrize("size", [1, 7, 20, 1000])
def test_blocks_of_any_size_hold_the_same_records(files, monkeypatch, size):
    monkeypatch.setattr("slidedp_jax.data.records.BLOCK_BYTES", size)
    monkeypatch.setattr("slidedp_jax.data.records._VALUES_AT_ONCE", min(size, 3))
    monkeypatch.setattr("slidedp_jax.data.parquet._LEAST_ROWS", min(size, 3))
    assert content(read_records(files)) == [
        ("a.jsonl:1", {"text": "a"}, False),
        ("a.jsonl:4", {"text": "\u2028"}, False),
        ("a.jsonl:5", None, True),
        ("a.jsonl:7", {"text": "last"}, False),
        *((f"b.json:row {i + 1}", {"text": f"b{i}"}, False) for i in range(5)),
        ("c.txt", {"text": "whole\nfile"}, False),
        *((f"d.parquet:row {i + 1}", {"text": f"d{i}"}, False) for i in range(11)),
    ]
    blocks = list(blocks_of(files))
    for place in range(4):
        assert sum(b.share for b in blocks if b.place == place) == pytest.approx(1)
    for rows in range(1, 22):
        first = [r for block in blocks_of(files, rows) for r in records_in(block)]
        assert content(first) == content(read_records(files))[:rows]


def test_parts_of_a_parquet_file_are_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("slidedp_jax.data.parquet._ROWS_AT_ONCE", 5)
    monkeypatch.setattr("slidedp_jax.data.parquet._LEAST_ROWS", 7)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": list(range(100))}), path, row_group_size=60)
    parts = list(parquet_parts(path))
    assert len(parts) == 8 + 6 and [part["first"] for part in parts[7:10]] == [57, 61, 68]
    rows = [row["n"] for part in parts for row in parquet_rows(path, *list(part.values())[:3])]
    assert rows == list(range(100))


def same(one, other):
    assert one[1] == other[1]
    for name in ("coded", "offsets", "row_ids"):
        assert getattr(one[0], name).tolist() == getattr(other[0], name).tolist()
    assert one[0].file_rows == other[0].file_rows


def test_processes_give_what_one_gives(tokenizer_folder, write_rows, files, monkeypatch):
    rows = [*chat_rows(150), {"messages": []}, {"text": "x" * 700}, {"text": 5}]
    random.Random(0).shuffle(rows)
    paths = [write_rows(rows, "chat.jsonl"), *files]
    settings = ExampleSettings(max_seq_length=64, skip_bad_rows=True, over_long="drop")
    tokenizer = load_tokenizer(tokenizer_folder)
    alone = load_examples(paths, tokenizer, settings, num_proc=1)
    assert alone[1].bad_rows and alone[1].dropped["over_long"] > 0
    assert alone[0].file_rows == (153, 4, 5, 1, 11)
    monkeypatch.setattr("slidedp_jax.data.records.BLOCK_BYTES", 2000)
    same(load_examples(paths, tokenizer, settings, num_proc=3), alone)


def test_the_first_error_in_order_comes_from_a_process(tokenizer_folder, write_rows, monkeypatch):
    monkeypatch.setattr("slidedp_jax.data.records.BLOCK_BYTES", 50)
    rows = [{"text": f"row {i}"} for i in range(30)]
    rows[7] = rows[20] = {"text": 3}
    path, tokenizer = write_rows(rows), load_tokenizer(tokenizer_folder)
    with pytest.raises(RowError, match=r"rows.jsonl:8: `text` must be a string"):
        load_examples([path], tokenizer, ExampleSettings(max_seq_length=8), num_proc=2)


def test_a_process_that_is_killed_is_told_and_none_is_left(tokenizer_folder, write_rows):
    work = BlockEncoder(
        tokenizer=load_tokenizer(tokenizer_folder),
        settings=ExampleSettings(max_seq_length=8),
        vocab_size=None,
    )
    (block,) = blocks_of([write_rows([{"text": "a"}])])
    process = _Process(work)
    assert process.encode(block)[1].rows_in == 1
    os.kill(process._process.pid, signal.SIGTERM)  # it is the caller's to answer
    assert process.encode(block)[1].rows_in == 1
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"rows.jsonl ended by signal 9.*dataset_num_proc"):
        process.encode(block)
    process.end()
    done = encoded_in_processes(work, iter([block] * 3), 2)
    next(done)
    done.close()  # ends the processes, or this would not return


def test_num_proc_is_checked(tokenizer_folder, write_rows):
    with pytest.raises(UserError, match="num_proc is 0"):
        load_examples(
            [write_rows([{"text": "a"}])],
            load_tokenizer(tokenizer_folder),
            ExampleSettings(max_seq_length=8),
            num_proc=0,
        )
