"""What surrounds texts, turns as tokens, and notes on what is not learnt."""

from __future__ import annotations

import json
import unicodedata

import pytest
import tokenizers
from byte_tokenizer import BOS, ENDOFTEXT, IM_END, IM_START, learnt_text, write_tokenizer
from template_texts import CHATML, DROPS_OLD_REASONING, INSTRUCTION, SYSTEM_IN_PROMPTS_ONLY

from slidedp_jax.data import IGNORED, ExampleSettings, RowError, load_examples, load_tokenizer


@pytest.mark.parametrize("loss_on", ["auto", "all"])
def test_rows_that_have_their_bos_get_no_second_one(load, tmp_path, loss_on):
    folder = write_tokenizer(tmp_path / "t", bos=True)
    tokenizer = load_tokenizer(folder)
    with_bos = [
        {"text": "<|bos|>abc"},
        {"prompt": "<|bos|>ab", "completion": "c"},
        {"prompt": "", "completion": "<|bos|>abc"},
    ]
    without = [json.loads(json.dumps(row).replace("<|bos|>", "")) for row in with_bos]
    examples, report = load(with_bos, folder=folder, loss_on=loss_on)
    expected, _ = load(without, folder=folder, loss_on=loss_on)
    assert examples.fingerprint == expected.fingerprint
    assert report.num_supervised_tokens == 4 + (2 if loss_on == "auto" else 4) + 4
    for ids, labels in examples:
        assert tokenizer.decode(ids) == "<|bos|>abc<|im_end|>" and BOS not in labels


def test_what_the_tokenizer_puts_around_a_text_is_there_once_and_its_beginning_not_learnt(
    load, tokenizer_folder
):
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> <|endoftext|> $A <|endoftext|> <|im_end|>",
        special_tokens=[
            ("<|im_start|>", IM_START),
            ("<|endoftext|>", ENDOFTEXT),
            ("<|im_end|>", IM_END),
        ],
    )
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    begin, end = "<|im_start|><|endoftext|>", "<|endoftext|><|im_end|>"
    texts = ["abc", f"{begin}abc", f"abc{end}", f"{begin}abc{end}", "<|im_start|>abc<|im_end|>"]
    examples, _ = load([{"text": text} for text in texts])
    tokenizer = load_tokenizer(tokenizer_folder)
    for index, (ids, labels) in enumerate(examples):
        assert tokenizer.decode(ids) == f"{begin}abc{end}"
        assert learnt_text(examples, tokenizer, index) == f"abc{end}"
        assert (labels[:2] == IGNORED).all()


# Turns.


@pytest.mark.parametrize(("loss_on", "number"), [("auto", 2), ("completion", 1), ("all", 3)])
def test_empty_answers_are_said(load, loss_on, number):
    """A call, or reasoning, is an answer; one that is not learnt is nobody's affair."""
    user, empty = {"role": "user", "content": "a"}, {"role": "assistant", "content": " "}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    turns = [user, empty, user, empty | {"train": False}, user, empty]
    _, report = load([{"messages": turns}], loss_on=loss_on)
    be = "is" if number == 1 else "are"
    answers = "answer" if number == 1 else "answers"
    said = f"{number} {answers} {be} empty: the model learns to end at once"
    assert next(note for note in report.notes if "empty:" in note).endswith(said)
    others = [empty | {"tool_calls": calls}, empty | {"reasoning_content": "b"}]
    _, report = load([{"messages": [user, other]} for other in others], loss_on=loss_on)
    assert not [note for note in report.notes if "empty:" in note]
    if loss_on != "all":
        _, report = load([{"prompt": "a", "completion": ""}], loss_on=loss_on)
        assert report.notes[0].endswith("1 answer is empty: the model learns to end at once")


def test_the_first_token_of_every_answer_is_learnt_where_a_space_is_merged_into_it(load, tmp_path):
    folder = write_tokenizer(
        tmp_path / "t", chat_template=INSTRUCTION, merges=[("Ġ", "a"), ("Ġa", "b")]
    )
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode(" ab")) == 1
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}] * 3
    system = {"role": "system", "content": "sys"}
    for template in (INSTRUCTION, SYSTEM_IN_PROMPTS_ONLY):
        (tmp_path / "t" / "chat_template.jinja").write_text(template)
        examples, report = load(
            [{"messages": turns}, {"messages": [system, *turns]}], folder=folder
        )
        for index in range(2):
            assert learnt_text(examples, tokenizer, index) == "|".join([" ab<|im_end|>"] * 3)
        assert ["share their first token" in note for note in report.notes].count(True) == 0


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("template", [CHATML, DROPS_OLD_REASONING])
def test_a_closing_token_that_is_listed_as_not_special(load, tokenizer_folder, template, eos):
    path = tokenizer_folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    for token in stored["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"
    path.write_text(json.dumps(stored))
    config = {"eos_token": eos, "chat_template": template}
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config))
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\na\n"},
    ]
    examples, _ = load([{"messages": turns * 2}])
    thought = "<think>\nso\n</think>\n\n"
    first = "" if template == DROPS_OLD_REASONING else thought
    assert learnt_text(examples, load_tokenizer(tokenizer_folder), 0) == (
        f"{first}a\n<|im_end|>|{thought}a\n<|im_end|>"
    )


def test_an_answer_that_shares_its_first_token_gets_a_note(load, tmp_path):
    folder = write_tokenizer(tmp_path / "t", merges=[("Ċ", "Ċ")])
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\na"}]
    examples, report = load([{"messages": turns}], folder=folder)
    assert learnt_text(examples, load_tokenizer(folder), 0) == "\na<|im_end|>"
    assert ": 1 answer shares its first token" in report.notes[0]


# Notes.


def test_notes_are_counted_by_file_and_kind(tokenizer_folder, write_rows):
    thought = {"role": "assistant", "content": "a", "reasoning": "why"}
    asked = {"role": "user", "content": "q"}
    chats = [{"messages": [asked, thought] * 2}, {"messages": [asked, thought | {"reasoning": ""}]}]
    tools = [{"function": {"name": "f"}}]
    other = [chats[0] | {"tools": tools, "text": "t"}, {"text": "t", "labels": [1]}]
    paths = [write_rows(chats, "chats.jsonl"), write_rows(other, "other.jsonl")]
    settings = ExampleSettings(max_seq_length=99, template_kwargs={"mood": 1})
    _, report = load_examples(paths, load_tokenizer(tokenizer_folder), settings)
    unprinted = "does not occur in what the chat template prints; the model does not learn it"
    assert report.notes == (
        f"{paths[0]}: the reasoning of 2 of 2 assistant messages {unprinted}",
        f"{paths[0]}: 2 rows give the chat template 'mood', which it does not read",
        f"{paths[1]}: `text` beside `messages` is not read (1 row)",
        f"{paths[1]}: the reasoning of 2 of 2 assistant messages {unprinted}",
        f"{paths[1]}: the tool definitions of 1 of 1 conversations do not occur in what the chat "
        "template prints; the model does not see them",
        f"{paths[1]}: 1 row gives the chat template 'mood', which it does not read",
        f"{paths[1]}: `labels` beside `text` is not read (1 row)",
    )
    assert f"note     {report.notes[0]}" in str(report)


def test_half_of_a_surrogate_pair_anywhere_in_a_conversation_is_a_bad_row(load, tokenizer_folder):
    template = CHATML.replace("message['content']", "message['content'] + message.reasoning")
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    said = {"role": "assistant", "content": "a", "reasoning": "\ud800"}
    path = tokenizer_folder / "rows.jsonl"
    path.write_text(json.dumps({"messages": [said]}))
    with pytest.raises(RowError, match=r"rows\.jsonl:1: the conversation holds half of a surrog"):
        load_examples([path], load_tokenizer(tokenizer_folder), ExampleSettings(max_seq_length=99))


def test_a_tokenizer_that_composes_characters(load, tokenizer_folder):
    """Offsets are those of the text as it was written."""
    path = str(tokenizer_folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.save(path)
    words = "e\u0301 \u1112\u1161\u11ab \U0001f468\u200d\U0001f469 a"
    turns = [{"role": role, "content": words} for role in ("user", "assistant")] * 2
    examples, _ = load([{"messages": turns}])
    said = unicodedata.normalize("NFC", words) + "<|im_end|>"
    assert learnt_text(examples, load_tokenizer(tokenizer_folder), 0) == f"{said}|{said}"
