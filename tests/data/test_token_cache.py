"""Tokenised rows on disk: read when nothing has changed, made anew when anything has."""

import datetime
import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import chat_rows, write_tokenizer
from template_texts import CHATML

from slidedp_jax.data import ExampleSettings, load_examples, load_tokenizer, token_cache
from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.data.token_cache import TokenCache
from slidedp_jax.errors import UserError

SETTINGS = ExampleSettings(max_seq_length=64)


@pytest.fixture
def cached(tmp_path, tokenizer_folder, write_rows):
    """Loads rows with a cache; what was said comes third."""
    rows = write_rows([*chat_rows(20), {"messages": []}])

    def load(*, paths=(rows,), folder=tokenizer_folder, now=None, **settings):
        said = []
        found = load_examples(
            paths,
            load_tokenizer(folder, now=now),
            ExampleSettings(**{"max_seq_length": 64, "skip_bad_rows": True} | settings),
            cache=tmp_path / "cache",
            say=said.append,
        )
        (what,) = said or [""]
        return *found, what

    load.rows, load.folder = rows, tmp_path / "cache"
    return load


def entries(folder):
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def arrays(examples):
    return [np.array(getattr(examples, n)).tolist() for n in ("coded", "offsets", "row_ids")]


def test_a_second_start_reads_what_the_first_has_made(cached):
    examples, report, said = cached()
    (entry,) = entries(cached.folder)
    assert f"kept in {entry}" in said and "--data_cache null" in said
    assert report.dropped == {"bad": 1} and report.bad_rows[0].startswith(f"{cached.rows}:21:")
    again, its_report, said = cached()
    assert f"read from {entry}" in said and its_report == report
    assert arrays(again) == arrays(examples) and again.fingerprint == examples.fingerprint
    assert isinstance(again.coded.base, np.memmap) and again.file_rows == (21,)
    plain = load_examples(
        [cached.rows],
        load_tokenizer(cached.folder.parent / "model"),
        ExampleSettings(max_seq_length=64, skip_bad_rows=True),
    )
    assert arrays(plain[0]) == arrays(again) and plain[1] == report


def test_files_are_known_by_content_and_the_report_names_them_as_they_are_now(cached, tmp_path):
    cached()
    moved = tmp_path / "moved.jsonl"
    cached.rows.rename(moved)
    _, report, said = cached(paths=[moved])
    assert "read from" in said and report.files == (str(moved),)
    assert report.bad_rows[0].startswith(f"{moved}:21:")
    assert report.longest_source.startswith(f"{moved}:")


def test_whatever_decides_the_rows_makes_an_entry_of_its_own(cached, tmp_path, monkeypatch):
    cached()
    merged = write_tokenizer(tmp_path / "merged", merges=[("a", "b")])
    other = write_tokenizer(tmp_path / "other", chat_template=CHATML.replace("system", "sys") + " ")
    changes = [
        {"max_seq_length": 63},
        {"loss_on": "all"},
        {"template_kwargs": {"a": 1}},
        {"max_rows": 5},
        {"folder": merged},
        {"folder": other},
        {"paths": [cached.rows, cached.rows]},
    ]
    for number, change in enumerate(changes, start=2):
        assert "kept in" in cached(**change)[2]
        assert len(entries(cached.folder)) == number
        assert "read from" in cached(**change)[2]
    text = cached.rows.read_text()
    cached.rows.write_text(text.replace("word", "ward"))
    assert "kept in" in cached()[2]
    cached.rows.write_text(text)
    assert "read from" in cached()[2]
    monkeypatch.setattr("slidedp_jax.data.token_cache._code", lambda: ["another version"])
    assert "kept in" in cached()[2]


def test_a_template_that_prints_the_time_is_kept_for_that_time_only(cached, tmp_path):
    clock = write_tokenizer(tmp_path / "clock", chat_template="{{ strftime_now('%H') }}" + CHATML)
    assert cached(folder=clock)[2] == "" and not cached.folder.exists()
    noon = datetime.datetime(2026, 1, 1, 12)
    assert "kept in" in cached(folder=clock, now=noon)[2]
    assert "read from" in cached(folder=clock, now=noon)[2]
    assert "kept in" in cached(folder=clock, now=noon.replace(hour=13))[2]


@pytest.mark.parametrize(
    ("text", "days_only"),
    [
        ("{%- if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}", True),
        ('{% macro day() %}{{- strftime_now("%Y-%m-%d") }}{% endmacro %}{{ day() }}', True),
        ("{% generation %}{{ strftime_now('%-d %B, 100%%') }}{% endgeneration %}", True),
        ("{{ strftime_now('%d %b %Y') ~ strftime_now('%%%H') }}", False),
        ("{{ strftime_now('%c') }}", False),
        ("{{ strftime_now('%d' ~ '%H') }}", False),
        ("{% set now = strftime_now %}{{ now('%H') ~ strftime_now('%d') }}", False),
        ("{{ [strftime_now][0]('%d') }}", False),
    ],
)
def test_a_template_that_prints_the_day_is_known_by_the_day(text, days_only):
    noon = datetime.datetime(2026, 1, 1, 12, 30, 15, 17)
    clock = {
        now: ChatTemplate(text, origin="here", now=now).clock
        for now in (noon, noon.replace(hour=13), noon.replace(day=2))
    }
    assert len(set(clock.values())) == (2 if days_only else 3)
    assert ChatTemplate(text, origin="here").clock is None


def test_another_start_on_the_same_day_reads_the_rows(cached, tmp_path):
    text = "{{ strftime_now('%d %b %Y') }}" + CHATML
    clock = write_tokenizer(tmp_path / "clock", chat_template=text)
    noon = datetime.datetime(2026, 1, 1, 12)
    assert "kept in" in cached(folder=clock, now=noon)[2]
    assert "read from" in cached(folder=clock, now=noon.replace(microsecond=5))[2]
    assert "kept in" in cached(folder=clock, now=noon.replace(day=2))[2]


def test_a_data_file_that_cannot_be_read_is_not_the_caches_fault(cached, monkeypatch):
    def read(block):
        raise OSError(errno.EIO, "Input/output error", str(cached.rows))

    with monkeypatch.context() as patch:
        patch.setattr("slidedp_jax.data.encode_block.records_in", read)
        with pytest.raises(OSError, match=r"Input/output error: .*rows.jsonl"):
            cached()
    assert list(cached.folder.iterdir()) == []
    assert "kept in" in cached()[2]


def test_a_full_disk_says_how_to_do_without(cached, monkeypatch):
    """Linux's /dev/full is one; what is buffered fails when it is closed."""
    cached.folder.mkdir()
    plain = Path.open

    def full(path, mode="r", **settings):
        return plain(Path("/dev/full") if path.name == "coded.bin" else path, mode, **settings)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match=r"cannot be kept in .*No space left.*or null"):
        cached()
    assert list(cached.folder.iterdir()) == []


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: flip(entry / "coded.bin"),
        lambda entry: flip(entry / "row_ids.bin"),
        lambda entry: os.truncate(entry / "lengths.bin", 8),
        lambda entry: (entry / "coded.bin").unlink(),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text(json.dumps({"file_rows": [1]})),
    ],
)
def test_a_damaged_entry_is_made_anew_with_a_word(cached, damage, monkeypatch, tmp_path):
    examples, report, _ = cached()
    expected = arrays(examples)
    (entry,) = entries(cached.folder)
    damage(entry)
    said = []
    found = TokenCache(cached.folder, said.append).read(entry.name, [str(cached.rows)])
    assert found is None and "are damaged" in said[0] and str(entry) in said[0]
    again, its_report, what = cached()
    assert "kept in" in what and arrays(again) == expected and its_report == report


def test_two_runs_at_once_make_one_entry(cached):
    results = []
    threads = [threading.Thread(target=lambda: results.append(cached())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(entries(cached.folder)) == 1
    assert len({examples.fingerprint for examples, *_ in results}) == 1
    assert [p.name for p in cached.folder.iterdir() if p.name.startswith(".")] == []


def test_what_a_killed_run_left_goes_and_what_is_being_written_stays(cached):
    cached()
    left, held = cached.folder / ".left.partial", cached.folder / ".held.partial"
    for folder in (left, held):
        folder.mkdir()
        os.utime(folder, (0, 0))
    (new := cached.folder / ".new.partial").mkdir()
    descriptor = os.open(held, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
        cached(loss_on="all")
    finally:
        os.close(descriptor)
    assert not left.exists() and held.exists() and new.exists()


def test_nothing_is_left_of_an_entry_whose_rows_are_refused(cached, write_rows):
    bad = write_rows([{"text": 1}], "bad.jsonl")
    with pytest.raises(UserError, match="none of the 1 row"):
        cached(paths=[bad])
    assert list(cached.folder.iterdir()) == []


def test_files_that_change_while_they_are_read_are_refused(cached, monkeypatch):
    def read(block):
        cached.rows.write_text(cached.rows.read_text() + "\n")
        return iter(())

    monkeypatch.setattr("slidedp_jax.data.encode_block.records_in", read)
    with pytest.raises(UserError, match=r"rows.jsonl: changed while being read"):
        cached()
    assert list(cached.folder.iterdir()) == []


def test_a_file_that_changes_while_another_is_digested_is_not_kept(tmp_path, monkeypatch):
    """Same size, and soon enough that the file system's clock may not have gone on."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"

    def write(path, token):
        path.write_text(json.dumps({"input_ids": [token, token + 1]}) + "\n")

    def digest(path, plain=token_cache._digest_of):
        found = plain(path)
        if path == first:
            stat = first.stat()
            write(first, 50)
            os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return found

    write(first, 10)
    write(second, 20)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "_digest_of", digest)
        with pytest.raises(UserError, match=r"a.jsonl, .*b.jsonl: changed while being read"):
            load_examples([first, second], None, SETTINGS, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    write(first, 10)
    examples, _ = load_examples([first, second], None, SETTINGS, cache=tmp_path / "cache")
    assert examples.input_ids(0).tolist() == [10, 11]


def test_a_folder_that_cannot_be_used_says_how_to_do_without(cached):
    cached.folder.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be kept in .*cache.*data_cache\), or null"):
        cached()
