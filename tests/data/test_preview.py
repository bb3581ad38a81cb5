"""Examples as text."""

from __future__ import annotations

import re

import pytest

from slidedp_jax.data import (
    ExampleSettings,
    account,
    load_examples,
    load_tokenizer,
    packing_line,
    preview,
)

ASKED = {"role": "user", "content": "hé?"}


def said(content):
    return {"messages": [ASKED, {"role": "assistant", "content": content}]}


@pytest.fixture
def loaded(tokenizer_folder, write_rows):
    def loaded(rows, **settings):
        tokenizer = load_tokenizer(tokenizer_folder)
        settings = ExampleSettings(**{"max_seq_length": 4096} | settings)
        return (*load_examples([write_rows(rows)], tokenizer, settings), tokenizer)

    return loaded


def test_supervised_tokens_are_marked(loaded):
    examples, _, tokenizer = loaded(
        [{"messages": []}, said("yes"), {"text": "abc"}], skip_bad_rows=True
    )
    heading, text = preview(examples, tokenizer).split("\n", 1)
    assert heading == "example 0 (row 1): 28 tokens, 4 supervised, marked ⟦ ⟧"
    assert text == "<|im_start|>user\nhé?<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    assert preview(examples, tokenizer, 1).endswith("a⟦bc<|im_end|>⟧")
    with pytest.raises(IndexError, match="index 2"):
        preview(examples, tokenizer, 2)


def test_colours_are_beside_the_marks(loaded):
    examples, _, tokenizer = loaded([said("yes " * 100)])
    for run_tokens in (None, 40):
        plain = preview(examples, tokenizer, run_tokens=run_tokens)
        coloured = preview(examples, tokenizer, run_tokens=run_tokens, colour=True)
        assert "\x1b[32m⟦yes" in coloured
        assert re.sub("\x1b\\[[0-9]+m", "", coloured) == plain and "\x1b" not in plain


def test_long_runs_are_shown_by_their_ends(loaded):
    examples, _, tokenizer = loaded([said("0123456789" * 9)])
    text = preview(examples, tokenizer, run_tokens=40)
    assert "⟦012345678901234567890123456789 [... 51 tokens ...] 123456789<|im_end|>⟧" in text
    whole = preview(examples, tokenizer, run_tokens=73)  # a quarter more is shown whole
    assert whole == preview(examples, tokenizer) and "0123456789" * 9 in whole


def test_many_runs_are_shown_by_the_first_and_last(loaded):
    turns = [*said("a")["messages"]] * 10
    examples, _, tokenizer = loaded([{"messages": turns}])
    whole, short = (preview(examples, tokenizer, run_tokens=n) for n in (None, 99))
    runs = re.split("[⟦⟧]", whole.split("\n", 1)[1])
    assert len(runs) == 21
    left = len(tokenizer.encode("".join(runs[8:17])))
    assert f" [... {left} tokens in 9 parts ...] " in short
    assert short.count("⟦") == 1 + 6  # the heading has one
    assert whole.split("⟧")[-1] == short.split("⟧")[-1]


def test_what_would_change_a_terminal_is_written_as_an_escape(loaded):
    examples, _, tokenizer = loaded([said("a\x1b[31m\r\u202eb\tc\n")])
    assert "⟦a\\x1b[31m\\r\\u202eb\tc\n<|im_end|>⟧" in preview(examples, tokenizer)


def test_without_a_tokenizer_ids_are_shown(write_rows):
    path = write_rows([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}])
    examples, _ = load_examples([path], None, ExampleSettings(max_seq_length=8))
    assert preview(examples, None).endswith("\n5 6⟦7 8⟧")


def test_the_account_is_the_report_and_examples(loaded):
    examples, report, tokenizer = loaded([said("yes"), said("no " * 500)])
    text = account(examples, report, tokenizer)
    assert text.startswith(f"{report}\n\nexample 0 (row 0): ") and "example 1" not in text
    both = account(examples, report, tokenizer, indices=(1, 0))
    assert both.index("example 1") < both.index("example 0") and "[... " in both
    assert account(examples, report, tokenizer, indices=()) == str(report)


def test_how_full_rows_would_be(loaded):
    examples, _, _ = loaded([{"text": "x" * (9 if i < 4 else 19)} for i in range(6)])
    # 4 of 10 tokens and 2 of 20, with eos; two rows of 40 hold them.
    assert packing_line(examples, 40) == (
        "packing  one example per row: 6 rows of 13 tokens on average; packed: 2 rows of 40 "
        "tokens, 100.0% full"
    )
