"""Rows -> examples: what is supervised, ends, lengths and counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from byte_tokenizer import BOS, ENDOFTEXT, IM_END, chat_rows, learnt_text, write_tokenizer
from template_texts import CHATML, CHATML_MARKED

from slidedp_jax.data import (
    IGNORED,
    BatchSource,
    ExampleSettings,
    RowError,
    load_examples,
    load_tokenizer,
)
from slidedp_jax.data.encode import begin_inside, token_begins
from slidedp_jax.errors import UserError

# What is supervised.


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_chat_learns_the_answers_and_their_ends(load, tmp_path, template):
    folder = write_tokenizer(tmp_path / "t", chat_template=template)
    tokenizer, rows = load_tokenizer(folder), chat_rows(12)
    examples, report = load(rows, folder=folder)
    assert len(examples) == report.rows_kept == 12
    for i, row in enumerate(rows):
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert learnt_text(examples, tokenizer, i) == "|".join(f"{s}<|im_end|>" for s in said)
        assert examples.input_ids(i).tolist() == tokenizer.encode_chat(row["messages"])


def test_loss_on_choices(load, tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "b"},
        ]
    }
    whole = tokenizer.chat_template().render(row["messages"])
    expected = {
        "auto": "a<|im_end|>|b<|im_end|>",
        "assistant": "a<|im_end|>|b<|im_end|>",
        "completion": "b<|im_end|>",
        "all": whole.removeprefix("<|im_start|>"),  # nothing precedes the first token
    }
    for loss_on, text in expected.items():
        examples, report = load([row], loss_on=loss_on)
        assert learnt_text(examples, tokenizer, 0) == text
        assert report.num_supervised_tokens == (examples.labels(0) != IGNORED).sum()


def test_loss_on_the_last_answer_obeys_its_flag_and_needs_an_answer(load):
    question, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [[question, said], [question, said, question, said | {"train": False}], [question]]
    examples, report = load([{"messages": m} for m in rows], loss_on="completion")
    assert examples.row_ids.tolist() == [0]
    assert report.dropped == {"no_supervised_tokens": 1, "no_assistant_message": 1}


def test_completion_rows(load, tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    row = {"prompt": "2+2=", "completion": "4"}
    for loss_on in ("auto", "completion", "assistant"):
        assert learnt_text(load([row], loss_on=loss_on)[0], tokenizer, 0) == "4<|im_end|>"
    assert learnt_text(load([row], loss_on="all")[0], tokenizer, 0) == "+2=4<|im_end|>"


def test_text_rows_learn_all_and_refuse_other_losses(load, tokenizer_folder):
    examples, _ = load([{"text": "abc"}])
    assert examples.labels(0).tolist() == [IGNORED, *examples.input_ids(0)[1:]]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: a text has no assistant to learn"):
        load([{"text": "abc"}], loss_on="assistant")


def test_a_prompt_is_tokenised_as_it_will_be_when_used(load, tmp_path):
    folder = write_tokenizer(tmp_path / "t", merges=[("a", "b")])
    tokenizer = load_tokenizer(folder)
    row = {"prompt": "xa", "completion": "b"}
    examples, report = load([row], folder=folder)
    assert examples.input_ids(0).tolist() == [
        *tokenizer.encode("xa"),
        *tokenizer.encode("b"),
        IM_END,
    ]
    assert len(tokenizer.encode("xab")) == 2
    assert "tokenised apart (1 row)" in report.notes[0]


def test_markers_without_the_closing_token_get_a_note(load, tmp_path):
    marked = CHATML_MARKED.replace(
        "content'] + '<|im_end|>' }}{% endgen", "content'] }}{% endgen"
    ).replace("{% endgeneration %}{{ '", "{% endgeneration %}{{ '<|im_end|>")
    folder = write_tokenizer(tmp_path / "t", chat_template=marked)
    examples, report = load(chat_rows(4), folder=folder)
    assert IM_END not in examples.labels(0)
    assert "not taught to stop (4 rows)" in report.notes[0]


def test_tokens_are_told_by_where_they_begin():
    def tokens_in_spans(offsets, spans):
        return begin_inside(token_begins(offsets), spans)

    # Text "ab cd", spans as a tokenizer reports them with leading spaces cut off.
    assert tokens_in_spans([(0, 2), (3, 5)], [(2, 5)]).tolist() == [False, True]
    assert tokens_in_spans([(0, 2), (3, 5)], [(3, 5)]).tolist() == [False, False]
    assert tokens_in_spans([(0, 2), (2, 5)], [(0, 1)]).tolist() == [True, False]
    # Two tokens of one character.
    assert tokens_in_spans([(0, 1), (0, 1), (1, 2)], [(0, 1)]).tolist() == [True, True, False]
    assert tokens_in_spans([], [(0, 1)]).tolist() == []


def test_characters_of_several_tokens_are_learnt_whole(load, tokenizer_folder):
    row = {
        "messages": [{"role": "user", "content": "日"}, {"role": "assistant", "content": "日本🙂"}]
    }
    examples, _ = load([row])
    text = learnt_text(examples, load_tokenizer(tokenizer_folder), 0)
    assert text == "日本🙂<|im_end|>"


# Ends and specials.


@pytest.mark.parametrize("ending", ["", "<|endoftext|>"])
@pytest.mark.parametrize("pad", ["<|endoftext|>", None])
def test_exactly_one_eos_supervised_although_it_pads(load, tmp_path, ending, pad):
    folder = write_tokenizer(tmp_path / "t", eos="<|endoftext|>", pad=pad)
    rows = [{"prompt": "p" * (i + 1), "completion": "c" * i + ending} for i in range(4)]
    rows += [{"text": "t" * (i + 1) + ending} for i in range(4)]
    examples, report = load(rows, folder=folder)
    source = BatchSource(examples, max_seq_length=512, step_size=8, shuffle=False, pad_id=256)
    batch = next(source)
    for r in range(8):
        ids, labels = batch.arrays["input_ids"][r], batch.arrays["labels"][r]
        real = len(examples.input_ids(r))
        assert (ids[:real] == ENDOFTEXT).sum() == 1 and labels[real - 1] == ENDOFTEXT
        assert (ids[real:] == ENDOFTEXT).all() and (labels[real:] == IGNORED).all()
    by_hand = sum(i + 1 for i in range(4)) * 2  # c * i and eos; t * (i + 1) and eos less the first
    assert batch.num_supervised_tokens == report.num_supervised_tokens == by_hand


@pytest.mark.parametrize("packing", [False, True])
def test_eos_survives_packing_and_can_be_switched_off(load, packing):
    rows = [{"text": "abc"}, {"text": "de<|im_end|>"}]
    for append_eos, count in ((True, 2), (False, 1)):
        examples, _ = load(rows, append_eos=append_eos)
        batch = next(BatchSource(examples, max_seq_length=64, step_size=4, packing=packing))
        assert (batch.arrays["input_ids"] == IM_END).sum() == count


def test_no_eos_token_is_an_error_unless_switched_off(load, tokenizer_folder):
    config = tokenizer_folder / "tokenizer_config.json"
    config.write_text("{}")
    with pytest.raises(UserError, match=r"names no eos token.*append_eos"):
        load([{"text": "abc"}])
    examples, _ = load([{"text": "abc"}], append_eos=False)
    assert len(examples.input_ids(0)) == 3


def test_one_bos_per_row(load, tmp_path):
    template = "{{ bos_token }}" + CHATML
    folder = write_tokenizer(tmp_path / "t", chat_template=template, bos=True)
    rows = [*chat_rows(2), {"text": "abc"}, {"prompt": "a", "completion": "b"}]
    examples, _ = load(rows, folder=folder)
    for ids, labels in examples:
        assert ids[0] == BOS and (ids == BOS).sum() == 1 and BOS not in labels
    assert load_tokenizer(folder).encode("a") == examples.input_ids(3)[1:2].tolist()


# Lengths.


def pairs(prompt, count):
    return [{"prompt": "p" * prompt, "completion": "abcd"} for _ in range(count)]


def test_truncation_that_leaves_nothing_to_learn(load):
    examples, report = load(pairs(100, 6), max_seq_length=128)
    assert len(examples) == 6 and report.rows_dropped == 0
    for limit in (64, 32):
        with pytest.raises(
            UserError, match=rf"6 truncation left nothing.*max_seq_length is {limit}"
        ):
            load(pairs(100, 6), max_seq_length=limit)
    examples, report = load(pairs(100, 3) + pairs(10, 3), max_seq_length=64)
    assert len(examples) == 3
    assert report.dropped == {"supervised_tokens_cut_off": 3}
    assert examples.row_ids.tolist() == [3, 4, 5]


def test_length_policies_agree_with_a_hand_count(load):
    rows = [{"text": "x" * (159 if i % 6 == 0 else 39)} for i in range(60)]  # 160 and 40 with eos
    for keep, window in (("start", slice(0, 100)), ("end", slice(60, 160))):
        examples, report = load(rows, max_seq_length=100, over_long="truncate", keep=keep)
        expected = np.array([*[rows[0]["text"][0].encode()[0] - 33] * 159, IM_END])[window]
        assert examples.input_ids(0).tolist() == expected.tolist()
        assert examples.labels(0)[0] == IGNORED
        assert (report.rows_in, report.rows_kept, report.truncated) == (60, 60, 10)
        assert report.tokens_lost == 10 * 60
        assert report.num_tokens == 10 * 100 + 50 * 40
    examples, report = load(rows, max_seq_length=100, over_long="drop")
    assert (report.rows_kept, report.dropped, report.truncated) == (50, {"over_long": 10}, 0)
    assert report.tokens_lost == 10 * 160
    with pytest.raises(
        UserError, match=r"rows\.jsonl:1: the row has 160 tokens.*over_long is raise"
    ):
        load(rows, max_seq_length=100, over_long="raise")
    examples, report = load(rows, max_seq_length=100, over_long="split")
    assert (report.num_examples, report.rows_kept, report.split) == (70, 60, 10)
    assert (report.tokens_lost, examples.num_tokens) == (0, 10 * 160 + 50 * 40)
    assert examples.row_ids[:3].tolist() == [0, 0, 1]
    for field in ("longest_row", "length_quantiles"):
        assert getattr(report, field) in (
            160,
            {0: 40, 0.1: 40, 0.5: 40, 0.9: 160, 0.99: 160, 1: 160},
        )
    text = str(report)
    for part in (
        "60 rows in",
        "70 examples",
        "longest: 160 tokens",
        "rows.jsonl:1",
        "p50 40, p90 160, p99 160",
    ):
        assert part in text


def test_split_refuses_conversations(load):
    with pytest.raises(UserError, match="only documents can be split"):
        load(chat_rows(4), max_seq_length=16, over_long="split")


def test_text_file_is_cut_into_windows(tokenizer_folder, tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"0123456789\n")
    settings = ExampleSettings(max_seq_length=5)
    tokenizer = load_tokenizer(tokenizer_folder)
    examples, report = load_examples([path], tokenizer, settings)
    texts = [tokenizer.decode(ids) for ids, _ in examples]
    assert texts == ["01234", "56789", "\n<|im_end|>"]
    assert report.num_supervised_tokens == 4 + 4 + 1


# Rows that cannot be used.


def test_bad_rows_stop_or_are_counted(load, write_rows):
    rows = [{"text": "a b"}, {"text": 3}, {"messages": []}, {"text": "c d"}]
    with pytest.raises(RowError, match=r"rows\.jsonl:2: `text` must be a string.*skip_bad_rows"):
        load(rows)
    examples, report = load(rows, skip_bad_rows=True)
    assert (report.rows_in, report.dropped) == (4, {"bad": 2})
    assert examples.row_ids.tolist() == [0, 3]
    assert "rows.jsonl:3" in str(report)


def test_rows_the_template_refuses_are_bad_rows(load, tmp_path):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    folder = write_tokenizer(tmp_path / "t", chat_template=strict + CHATML)
    with pytest.raises(RowError, match=r"rows\.jsonl:1: .*user first"):
        load(chat_rows(4), folder=folder)
    _, report = load(chat_rows(4), folder=folder, skip_bad_rows=True)
    assert report.dropped == {"bad": 2}


def test_rows_without_anything_to_learn_are_counted(load):
    rows = [
        {"messages": [{"role": "user", "content": "q"}]},
        {"input_ids": [1, 2], "labels": [-100, -100]},
        {"input_ids": [1, 2], "labels": [1, -100]},
        {"input_ids": []},
        {"text": ""},
        {"text": "abc"},
    ]
    examples, report = load(rows)
    assert report.dropped == {"no_supervised_tokens": 3, "no_assistant_message": 1, "empty": 1}
    assert report.rows_in == report.rows_kept + report.rows_dropped
    assert len(examples) == 1


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "q"}]},
            {},
            r"1 conversations without an assistant message .*; give what the assistant answers, or",
        ),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, {}, r"; check loss_on, and what the rows"),
        ({"prompt": "p" * 99, "completion": "c"}, {"max_seq_length": 9}, r"\(truncation_keep;"),
        ({"text": "a" * 99}, {"max_seq_length": 9, "over_long": "drop"}, r"over_long to truncate$"),
        ({"text": 1}, {"skip_bad_rows": True}, r"1 malformed .*mend the rows.*:1: `text` must be"),
    ],
)
def test_where_nothing_is_left_the_message_says_what_would_help(load, row, settings, message):
    with pytest.raises(UserError, match=r"none of the 1 row of .*rows\.jsonl.*" + message):
        load([row], **settings)


def test_ids_beyond_the_vocabulary_name_row_and_token(load):
    load([{"text": "abc"}], vocab_size=259)
    with pytest.raises(
        UserError, match=r"rows\.jsonl:1: token 3 has the id 258 \('<\|im_end\|>'\)"
    ):
        load([{"text": "abc"}], vocab_size=258)
    with pytest.raises(UserError, match=r"rows\.jsonl:2: token 1 has the id 300.*272 ids"):
        load([{"input_ids": [1, 2]}, {"input_ids": [1, 300]}], vocab_size=272)


def test_tokenised_rows(load):
    examples, _ = load([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9]}])
    assert [ids.tolist() for ids, _ in examples] == [[5, 6, 7], [8, 9]]
    assert [labels.tolist() for _, labels in examples] == [[-100, -100, 7], [-100, 9]]
    with pytest.raises(RowError, match=r"input_ids\[1\] is -1"):
        load([{"input_ids": [1, -1]}])
    with pytest.raises(RowError, match=r"labels\[0\] is 6.*shifted by one already"):
        load([{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}])
    with pytest.raises(RowError, match=r"labels\[1\] is 9, but input_ids\[1\] is 6"):
        load([{"input_ids": [5, 6], "labels": [5, 9]}])


def test_tokenised_rows_need_no_tokenizer(write_rows):
    settings = ExampleSettings(max_seq_length=8)
    examples, _ = load_examples([write_rows([{"input_ids": [1, 2]}])], None, settings)
    assert examples.input_ids(0).tolist() == [1, 2]
    with pytest.raises(UserError, match="need a tokenizer"):
        load_examples([write_rows([{"text": "a"}])], None, settings)


def test_columns_that_change_type_over_many_rows(load):
    rows = [{"text": f"row {i}", "tools": None if i < 1500 else [1]} for i in range(2000)]
    examples, report = load(rows)
    assert report.rows_kept == 2000 and examples.row_ids.tolist() == list(range(2000))


def test_max_rows_and_progress(tokenizer_folder, write_rows, monkeypatch):
    monkeypatch.setattr("slidedp_jax.data.records.BLOCK_BYTES", 100 * len('{"text": "abc"}\n'))
    seen = []
    path = write_rows([{"text": "abc"}] * 300)
    settings = ExampleSettings(max_seq_length=8, max_rows=240)
    tokenizer = load_tokenizer(tokenizer_folder)

    def progress(rows, share):
        seen.append((rows, round(share, 3)))

    examples, _ = load_examples([path], tokenizer, settings, progress=progress)
    assert len(examples) == 240 and examples.file_rows == (240,)
    assert seen == [(100, 0.417), (200, 0.833), (240, 1.0)]


@pytest.mark.parametrize(
    "bad", [{"loss_on": "answer"}, {"over_long": "cut"}, {"keep": "left"}, {"max_seq_length": 1}]
)
def test_settings_are_checked(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        ExampleSettings(**{"max_seq_length": 8} | bad)


def test_fingerprint_tells_data_apart(load):
    first = load([{"text": "abc"}, {"text": "de"}])[0].fingerprint
    assert first == load([{"text": "abc"}, {"text": "de"}])[0].fingerprint
    assert first != load([{"text": "abd"}, {"text": "de"}])[0].fingerprint
    tokens = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]
    assert load(tokens[:1])[0].fingerprint != load(tokens[1:])[0].fingerprint
    assert json.dumps(first)
