"""One example as text."""

from __future__ import annotations

import pytest

from slidedp_jax.data import ExampleSettings, load_examples, load_tokenizer, preview


def test_supervised_tokens_are_marked(tokenizer_folder, write_rows):
    tokenizer = load_tokenizer(tokenizer_folder)
    messages = [{"role": "user", "content": "hé?"}, {"role": "assistant", "content": "yes"}]
    path = write_rows([{"messages": []}, {"messages": messages}, {"text": "abc"}])
    settings = ExampleSettings(max_seq_length=99, skip_bad_rows=True)
    examples, _ = load_examples([path], tokenizer, settings)
    heading, text = preview(examples, tokenizer).split("\n", 1)
    assert heading == "example 0 (row 1): 28 tokens, 4 supervised, marked ⟦ ⟧"
    assert text == "<|im_start|>user\nhé?<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    assert preview(examples, tokenizer, 1).endswith("a⟦bc<|im_end|>⟧")
    with pytest.raises(IndexError, match="index 2"):
        preview(examples, tokenizer, 2)
