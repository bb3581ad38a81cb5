"""Tokenizer and chat template of a model folder, against transformers where it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

import pytest
import tokenizers
from byte_tokenizer import BOS, ENDOFTEXT, IM_END, chat_rows, write_tokenizer
from template_texts import CHATML, CHATML_MARKED, DROPS_OLD_REASONING, INSTRUCTION

from slidedp_jax.data.chat_template import ChatTemplate, ChatTemplateError
from slidedp_jax.data.encode import begin_inside, token_begins
from slidedp_jax.data.tokenizer import load_tokenizer
from slidedp_jax.errors import UserError

WITH_BOS = "{{ bos_token }}" + CHATML
MESSAGES = [{"role": "user", "content": "hi"}]


def edit(path, **entries):
    stored = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stored | entries))


def test_special_ids(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (IM_END, ENDOFTEXT)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((), ())
    assert set(tokenizer.special_texts) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_stop_ids_and_eos_from_the_generation_config(tokenizer_folder):
    edit(tokenizer_folder / "generation_config.json", eos_token_id=[ENDOFTEXT, IM_END])
    assert load_tokenizer(tokenizer_folder).stop_ids == (IM_END, ENDOFTEXT)
    edit(tokenizer_folder / "tokenizer_config.json", eos_token=None, pad_token=None)
    tokenizer = load_tokenizer(tokenizer_folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (ENDOFTEXT, ENDOFTEXT)


def test_special_tokens_map_is_read_and_overruled(tokenizer_folder):
    older = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<|im_start|>"}
    edit(tokenizer_folder / "special_tokens_map.json", **older)
    tokenizer = load_tokenizer(tokenizer_folder)
    assert (tokenizer.special_tokens["bos_token"], tokenizer.eos_id) == ("<|im_start|>", IM_END)


def test_round_trip_of_text(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    text = "a é 日本 🙂\u2028\x00\n<|im_end|> x  "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert IM_END in tokenizer.encode(text)
    assert IM_END not in tokenizer.encode(tokenizer.decode([IM_END], skip_special_tokens=True))


def test_stored_truncation_and_padding_are_off(tokenizer_folder):
    path = str(tokenizer_folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(path)
    assert len(load_tokenizer(tokenizer_folder).encode("abcdefgh")) == 8
    assert [len(i) for i in load_tokenizer(tokenizer_folder).encode_batch(["a", "bcd"])] == [1, 3]


def test_specials_around_a_text(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "m", bos=True))
    assert tokenizer.encode("a", add_special_tokens=True) == [BOS, 64]
    assert tokenizer.encode("a") == [64]


@pytest.mark.parametrize(
    ("prefix", "text", "ids"),
    [
        ([], [7, 8], [7, 8]),
        ([1], [7, 8], [1, 7, 8]),
        ([1], [1, 7], [1, 7]),
        ([1], [], [1]),
        ([1], [7, 1], [1, 7, 1]),
        ([1, 2], [1, 2, 7], [1, 2, 7]),
        ([1, 2], [1, 7], [1, 2, 7]),
        ([1, 2], [2, 7], [1, 2, 2, 7]),
    ],
)
def test_a_text_has_its_beginning_once(tokenizer_folder, prefix, text, ids):
    tokenizer = replace(load_tokenizer(tokenizer_folder), prefix_ids=tuple(prefix))
    assert tokenizer.begun(text) == ids
    assert tokenizer.begun(ids) == ids


@pytest.mark.parametrize(
    ("suffix", "text", "ids"),
    [
        ([], [7], [7, 9]),
        ([], [7, 9], [7, 9]),
        ([], [], [9]),
        ([9], [7], [7, 9]),
        ([9], [7, 9], [7, 9]),
        ([3], [7], [7, 3, 9]),
        ([3], [7, 9], [7, 3, 9]),
        ([3], [7, 3], [7, 3, 9]),
        ([3, 9], [7, 3, 9], [7, 3, 9]),
    ],
)
def test_a_text_has_its_end_once(tokenizer_folder, suffix, text, ids):
    tokenizer = replace(load_tokenizer(tokenizer_folder), suffix_ids=tuple(suffix), eos_id=9)
    assert tokenizer.ended(text) == ids
    assert tokenizer.ended(ids) == ids


def test_named_special_token_that_is_an_ordinary_word(tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["added_tokens"] = [t for t in stored["added_tokens"] if t["content"] != "<|im_end|>"]
    path.write_text(json.dumps(stored))
    tokenizer = load_tokenizer(tokenizer_folder)
    assert tokenizer.encode("<|im_end|>") == [IM_END]
    assert "<|im_end|>" in tokenizer.special_texts


def test_template_sources_in_order(tokenizer_folder, tmp_path):
    assert load_tokenizer(tokenizer_folder).chat_template().source == CHATML
    (tokenizer_folder / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(tokenizer_folder).chat_template().source == "own file"
    (tmp_path / "mine.jinja").write_text("mine")
    given = load_tokenizer(tokenizer_folder, chat_template=tmp_path / "mine.jinja")
    assert given.chat_template().source == "mine"
    with pytest.raises(UserError, match=r"none\.jinja does not exist"):
        load_tokenizer(tokenizer_folder, chat_template=tmp_path / "none.jinja")


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "m", chat_template=named))
    assert tokenizer.chat_template().source == "d"
    assert tokenizer.chat_template(tools=[{}]).source == "t"


def test_no_template_is_an_error_only_for_conversations(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "m", chat_template=None))
    assert tokenizer.encode("a") == [64]
    with pytest.raises(UserError, match=r"no default chat template.*chat_template\.jinja"):
        tokenizer.chat_template()


def test_errors_name_the_file(tmp_path, tokenizer_folder):
    with pytest.raises(UserError, match="is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"no tokenizer\.json.*vocab\.json.*save_pretrained"):
        load_tokenizer(tmp_path / "empty")
    edit(tokenizer_folder / "tokenizer_config.json", eos_token="<|gone|>")
    with pytest.raises(
        UserError, match=r"eos_token is '<\|gone\|>', which tokenizer.json does not"
    ):
        load_tokenizer(tokenizer_folder)
    (tokenizer_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tokenizer_folder)
    (tokenizer_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be loaded"):
        load_tokenizer(tokenizer_folder)


def test_tokens_listed_beside_tokenizer_json_are_added(tokenizer_folder):
    listed = {"259": {"content": "<think>", "special": False}}
    edit(tokenizer_folder / "tokenizer_config.json", added_tokens_decoder=listed)
    assert load_tokenizer(tokenizer_folder).encode("<think>") == [259]
    listed = {"300": {"content": "<|im_end|>", "special": True}}
    edit(tokenizer_folder / "tokenizer_config.json", added_tokens_decoder=listed)
    with pytest.raises(UserError, match=r"id 300, tokenizer\.json gives it 258"):
        load_tokenizer(tokenizer_folder)


# Templates.


def render(source, **kwargs):
    return ChatTemplate(source, origin="t", **kwargs).render(MESSAGES)


def test_what_templates_expect_is_there():
    assert render("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n") == "  user\n"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    now = datetime(2024, 7, 26)
    assert render("{{ strftime_now('%d %b %Y') }}", now=now) == "26 Jul 2024"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{{ eos_token }}{{ bos_token }}", special_tokens={"eos_token": "E"}) == "E"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_templates_cannot_leave_the_sandbox_and_their_failures_are_named(source):
    with pytest.raises(ChatTemplateError, match="chat template t: "):
        render(source)


def test_syntax_error_has_its_line():
    with pytest.raises(UserError, match="chat template t, line 2: "):
        ChatTemplate("ok\n{% for %}", origin="t")


def test_generation_spans_survive_captures_and_set_stays_inside():
    source = (
        "{% set text %}{% for m in messages %}<{% generation %}{% set x = 1 %}{{ m.content }}"
        "{% endgeneration %}>{{ x }}{% endfor %}{% endset %}head {{ text }}"
    )
    text, spans = ChatTemplate(source, origin="t").render_marked(MESSAGES * 2)
    assert text == "head <hi><hi>"
    assert [text[a:b] for a, b in spans] == ["hi", "hi"]


def test_template_that_depends_on_the_markers_is_refused():
    source = (
        "{% set text %}{% generation %} {{ messages[0].content }}{% endgeneration %}{% endset %}"
        "{{ text | trim }}"
    )
    with pytest.raises(ChatTemplateError, match="cannot be located"):
        ChatTemplate(source, origin="t").render_marked(MESSAGES)


# Parity.


@pytest.fixture(scope="module")
def auto_tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer


@pytest.mark.parity
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, WITH_BOS, DROPS_OLD_REASONING])
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_chat_ids_equal_transformers(tmp_path, auto_tokenizer, template, generation_prompt):
    folder = write_tokenizer(tmp_path / "m", chat_template=template, bos=True)
    ours, theirs = load_tokenizer(folder), auto_tokenizer.from_pretrained(folder)
    for row in chat_rows(12):
        expected = theirs.apply_chat_template(
            row["messages"],
            tokenize=True,
            add_generation_prompt=generation_prompt,
            return_dict=False,
        )
        ids = ours.encode_chat(row["messages"], add_generation_prompt=generation_prompt)
        assert ids == expected
        assert ids.count(BOS) == (template == WITH_BOS)


@pytest.mark.parity
def test_marked_spans_equal_transformers(tmp_path, auto_tokenizer):
    folder = write_tokenizer(tmp_path / "m", chat_template=CHATML_MARKED)
    ours, theirs = load_tokenizer(folder), auto_tokenizer.from_pretrained(folder)
    for row in chat_rows(12):
        expected = theirs.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        text, spans = ours.chat_template().render_marked(row["messages"])
        encoding = ours.encode_batch_with_spans([text])[0]
        assert encoding.ids == expected["input_ids"]
        mask = begin_inside(token_begins(encoding.offsets), spans)
        # They leave out all but the first byte of a character that ends a span; none does here.
        assert mask.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parity
@pytest.mark.parametrize("template", [CHATML, INSTRUCTION])
def test_text_ids_equal_transformers(tmp_path, auto_tokenizer, template):
    for number, config in enumerate([{}, {"add_bos_token": False, "add_eos_token": True}]):
        folder = write_tokenizer(
            tmp_path / str(number), chat_template=template, bos=True, config=config
        )
        ours, theirs = load_tokenizer(folder), auto_tokenizer.from_pretrained(folder)
        for text in ("", "a", " b <|im_end|>", "é\n\n日本 <|endoftext|>"):
            assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
            plain = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text) == plain
            assert ours.decode(plain) == theirs.decode(plain)
