"""The tokenizer of a model folder: `tokenizer.json` with the settings that lie beside it.

Token ids equal those of transformers: the `tokenizers` library does the encoding, truncation and
padding stored in the file are switched off, and tokens that only `tokenizer_config.json` lists are
added. What surrounds a text is the post-processor's affair; like transformers where there is a
`tokenizer.json`, this ignores `add_bos_token` and `add_eos_token`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

import tokenizers

from slidedp_jax.data.chat_template import ChatTemplate
from slidedp_jax.errors import UserError

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@final
@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer. Made by `load_tokenizer`.

    Attributes:
      origin: the folder, for messages.
      backend: the `tokenizers.Tokenizer`.
      eos_id: id of the token that ends a document or completion, or None.
      pad_id: id to fill with: pad token, else eos, else 0. Padding is told from tokens by length
        and segment ids, never by this id.
      stop_ids: ids at which generation ends: eos and those of `generation_config.json`.
      prefix_ids: what "with specials" puts before a text.
      suffix_ids: what it puts after.
      special_texts: the texts of all special tokens.
      special_tokens: `bos_token`, `eos_token`, ... as a template sees them.
      chat_templates: by name (`default`, sometimes `tool_use`); empty when the folder has none.
    """

    origin: str
    backend: tokenizers.Tokenizer
    eos_id: int | None
    pad_id: int
    stop_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    special_texts: tuple[str, ...]
    special_tokens: Mapping[str, Any]
    chat_templates: Mapping[str, ChatTemplate]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; special tokens written out in it become their ids.

        Args:
          text: any text.
          add_special_tokens: also what the tokenizer puts around a text (bos, for many models),
            as transformers does: a second time where the text has it. `begun` and `ended` do not.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def begun(self, ids: Sequence[int]) -> list[int]:
        """Ids with what the tokenizer puts before a text, once, also where the text had it."""
        shared = _overlap(self.prefix_ids, ids)
        return [*self.prefix_ids, *ids[shared:]]

    def ended(self, ids: Sequence[int]) -> list[int]:
        """Ids with what the tokenizer puts after a text and one eos, also where the text had them.

        Raises:
          UserError: there is no eos token.
        """
        if self.eos_id is None:
            raise UserError(
                f"{self.origin} names no eos token, so nothing can end a document or completion; "
                "add eos_token to tokenizer_config.json or set append_eos to false"
            )
        suffix = [token for token in self.suffix_ids if token != self.eos_id]
        ids = list(ids[:-1]) if ids and ids[-1] == self.eos_id else list(ids)
        shared = _overlap(suffix[::-1], ids[::-1])
        return [*ids[: len(ids) - shared], *suffix, self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts without added specials, on all cores."""
        batch = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_batch_with_spans(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """As `encode_batch`, with each token's place in the text (`.ids`, `.offsets`)."""
        return self.backend.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        return self.backend.decode(
            [int(token) for token in ids], skip_special_tokens=skip_special_tokens
        )

    def chat_template(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """The template of a conversation: `tool_use` for one with tools, if present, or `default`.

        Raises:
          UserError: the folder has no chat template.
        """
        if tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" not in self.chat_templates:
            names = f"only {sorted(self.chat_templates)}" if self.chat_templates else "none"
            raise UserError(
                f"{self.origin} has no default chat template ({names}), which conversations need; "
                "add `chat_template.jinja` to the folder, name a template file, or use `text` or "
                "`prompt`/`completion` rows"
            )
        return self.chat_templates["default"]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; equals transformers' `apply_chat_template(tokenize=True)`."""
        text = self.chat_template(tools).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self.encode(text)


def load_tokenizer(
    folder: str | Path,
    *,
    chat_template: str | Path | None = None,
    now: datetime | None = None,
) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Reads `tokenizer.json` and, where present, `tokenizer_config.json`, `special_tokens_map.json`,
    `generation_config.json`, `config.json`, `chat_template.jinja` and `additional_chat_templates/`.

    Args:
      folder: the model folder.
      chat_template: a file that replaces the folder's template.
      now: the time that templates print with `strftime_now`; None is the time of rendering.

    Raises:
      UserError: a file is missing or malformed, or a special token is not in the vocabulary.
    """
    folder = Path(folder)
    backend = _load_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    _add_listed_tokens(backend, config, folder)
    named = _named_tokens(folder, config)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = {}
    for name, text in named.items():
        if (token := backend.token_to_id(text)) is not None:
            ids[name] = token
        elif name in ("bos_token", "eos_token", "pad_token"):
            raise UserError(
                f"{folder}: {name} is {text!r}, which tokenizer.json does not contain; correct "
                "tokenizer_config.json or take tokenizer.json from the same model"
            )
    # A token that is named special is one, even if tokenizer.json lists it as an ordinary word.
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(named[name], normalized=False)
            for name in ids
            if named[name] not in known
        ]
    )
    stops = _stop_ids(folder)
    eos_id = ids.get("eos_token", stops[0] if stops else None)
    pad_id = ids.get("pad_token", 0 if eos_id is None else eos_id)
    prefix, suffix = _surroundings(backend)
    special_tokens: dict[str, Any] = dict(named)
    if extra := _extra_tokens(config):
        special_tokens["additional_special_tokens"] = extra
    added = backend.get_added_tokens_decoder().values()
    return Tokenizer(
        origin=str(folder),
        backend=backend,
        eos_id=eos_id,
        pad_id=pad_id,
        stop_ids=tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *stops])),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_texts=tuple(token.content for token in added if token.special),
        special_tokens=special_tokens,
        chat_templates={
            name: ChatTemplate(source, origin=origin, special_tokens=special_tokens, now=now)
            for name, (source, origin) in _template_sources(folder, config, chat_template).items()
        },
    )


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the folder of a Hugging Face model")
    if not path.exists():
        slow = [n for n in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / n).exists()]
        hint = f" It has {slow}, the older form." if slow else ""
        raise UserError(
            f"{folder} has no tokenizer.json.{hint} Write one with transformers: "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} cannot be loaded: {error}") from error
    # Stored by whoever last saved it; they would cut and pad rows behind our back.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _text_of(token: Any) -> str | None:
    """A token is written as text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    older = _read_json(folder / "special_tokens_map.json")
    named = {}
    for name in _NAMED:
        # An explicit null in tokenizer_config.json means that there is none.
        text = _text_of(config[name] if name in config else older.get(name))
        if text is not None:
            named[name] = text
    return named


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("additional_special_tokens", config.get("extra_special_tokens"))
    if not isinstance(listed, list):
        return []
    return [text for token in listed if (text := _text_of(token)) is not None]


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path
) -> None:
    """Add tokens that `added_tokens_decoder` lists and tokenizer.json lacks."""
    listed = config.get("added_tokens_decoder") or {}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = entry["content"]
        known = backend.token_to_id(text)
        if known is None:
            chosen = {flag: entry[flag] for flag in flags if flag in entry}
            backend.add_tokens([tokenizers.AddedToken(text, **chosen)])
            known = backend.token_to_id(text)
        if known != int(key):
            raise UserError(
                f"{folder}: tokenizer_config.json gives {text!r} the id {key}, tokenizer.json "
                f"gives it {known}; the two files come from different models"
            )


def _stop_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(folder / name).get("eos_token_id")
        if isinstance(listed, int):
            return [listed]
        if isinstance(listed, list) and listed:
            return [int(token) for token in listed]
    return []


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What "with specials" puts before and after a text."""
    whole = backend.encode("a", add_special_tokens=True)
    mask = whole.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return tuple(whole.ids[:first]), tuple(whole.ids[last:])


def _overlap(expected: Sequence[int], ids: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(expected, ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(expected), len(ids)))


def _template_sources(
    folder: Path, config: Mapping[str, Any], override: str | Path | None
) -> dict[str, tuple[str, str]]:
    """Name -> (Jinja text, where from). A file of its own wins over tokenizer_config.json."""
    if override is not None:
        path = Path(override)
        if not path.is_file():
            raise UserError(f"chat template file {path} does not exist")
        return {"default": (path.read_text(encoding="utf-8"), str(path))}
    sources: dict[str, tuple[str, str]] = {}
    stored = config.get("chat_template")
    origin = str(folder / "tokenizer_config.json")
    if isinstance(stored, str):
        sources["default"] = (stored, origin)
    elif isinstance(stored, list):
        sources |= {entry["name"]: (entry["template"], origin) for entry in stored}
    elif isinstance(stored, dict):
        sources |= {name: (template, origin) for name, template in stored.items()}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = (path.read_text(encoding="utf-8"), str(path))
    path = folder / "chat_template.jinja"
    if path.exists():
        sources["default"] = (path.read_text(encoding="utf-8"), str(path))
    return sources
