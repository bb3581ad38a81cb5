"""Empty reasoning blocks that a template prints and the model would learn."""

from __future__ import annotations

import pytest
from byte_tokenizer import write_tokenizer
from template_texts import CHATML, CHATML_MARKED, DROPS_OLD_REASONING

from slidedp_jax.data import load_tokenizer, preview

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
EMPTY = "<think>\n\n</think>\n\n"
# As Qwen3's: the switch moves the block from the answer into the prompt.
SWITCHED = DROPS_OLD_REASONING.replace(
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}",
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)
LEARNT = "learnt with an empty reasoning block that the chat template puts before the words"


@pytest.fixture
def notes_of(load, tmp_path):
    def notes_of(turns, template, **settings):
        folder = write_tokenizer(tmp_path / "t", chat_template=template)
        examples, report = load([{"messages": turns}], folder=folder, **settings)
        text = preview(examples, load_tokenizer(folder)).split("\n", 1)[1]
        return text, [note.split(": ", 1)[1] for note in report.notes]

    return notes_of


@pytest.mark.parametrize("loss_on", ["auto", "completion", "all"])
def test_the_block_is_counted_where_it_is_learnt(notes_of, loss_on):
    text, notes = notes_of([ASKED, SAID] * 2, SWITCHED, loss_on=loss_on)
    assert f"{EMPTY}a<|im_end|>⟧" in text or loss_on == "all"
    assert len(notes) == 1 and notes[0].startswith(f"1 of 2 answers are {LEARNT}")
    assert '{"enable_thinking": false}' in notes[0]


def test_one_answer_is_one(notes_of):
    _, notes = notes_of([ASKED, SAID], SWITCHED)
    assert notes[0].startswith(f"1 of 1 answer is {LEARNT}")


def test_nothing_is_said_where_the_block_belongs_to_the_prompt(notes_of):
    text, notes = notes_of([ASKED, SAID] * 2, SWITCHED, template_kwargs={"enable_thinking": False})
    assert f"assistant\n{EMPTY}⟦a<|im_end|>⟧" in text and notes == []


def test_nothing_is_said_of_reasoning_that_the_row_has(notes_of):
    thought = SAID | {"content": "<think>\nhm\n</think>\n\na"}
    assert notes_of([ASKED, thought], SWITCHED)[1] == []
    empty = SAID | {"content": f"{EMPTY}a"}  # its own
    assert notes_of([ASKED, empty], SWITCHED)[1] == []
    assert notes_of([ASKED, empty], CHATML, loss_on="all")[1] == []
    assert notes_of([ASKED, SAID], CHATML)[1] == []


def test_nothing_is_said_of_answers_that_are_not_learnt(notes_of):
    text, notes = notes_of([ASKED, SAID, ASKED, SAID | {"train": False}], SWITCHED)
    assert f"assistant\n{EMPTY}a<|im_end|>" in text and notes == []


def test_marked_spans_and_no_switch(notes_of):
    marked = CHATML_MARKED.replace("{% generation %}{{ ", "{% generation %}{{ '<think></think>' + ")
    text, notes = notes_of([ASKED, SAID] * 2, marked)
    assert text.count("⟦<think></think>a<|im_end|>⟧") == 2
    assert len(notes) == 1 and notes[0].startswith(f"2 of 2 answers are {LEARNT}")
    assert "enable_thinking" not in notes[0]
