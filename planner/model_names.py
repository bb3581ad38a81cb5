"""Known models as people spell them: `Qwen/Qwen3-8B`, `meta-llama/Llama-3.1-8B-Instruct`."""

from __future__ import annotations

import difflib
from collections import Counter

from slidedp_jax.models.config import config_names

_SAME_SHAPES = frozenset(
    {"meta", "hf", "base", "instruct", "chat", "thinking", "coder", "math", "sft", "it", "pt"}
    | {"2407", "2507", "2512", "0924", "0125", "v0.1"}
)
"""Parts of a name that say nothing about shapes."""


def preset_of(spelling: str) -> str:
    """The preset with the shapes of a model.

    Args:
      spelling: a preset's name, or the name on the hub, with or without its owner.

    Raises:
      ValueError: none is known to have them; the nearest names are given.
    """
    name = spelling.rsplit("/", 1)[-1].lower().replace("_", "-")
    for preset in config_names():
        rest = Counter(name.split("-"))
        rest.subtract(preset.split("-"))
        left = {part for part, times in rest.items() if times > 0}
        if min(rest.values()) >= 0 and left <= _SAME_SHAPES:
            return preset
    known = ", ".join(config_names())
    near = difflib.get_close_matches(name, config_names(), n=2)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"No preset is named {spelling!r}. {hint}Known: {known}. Any other supported model is "
        "planned by its folder: --model_name_or_path DIR (its config.json is enough)."
    )
