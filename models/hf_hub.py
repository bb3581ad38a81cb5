"""Where a model's folder is: on this disk, or fetched from the Hugging Face hub on request.

The hub is reached only through the `huggingface_hub` package (the `hub` extra), with its own cache,
its own tokens and its own offline switch (`HF_HUB_OFFLINE=1`). Imports no JAX.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FETCHED_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model", "LICENSE*")


def resolve_model_folder(name_or_folder: str) -> Path:
    """A local folder as it is, or the local copy of a hub repository (`Qwen/Qwen3-4B`).

    Raises:
      FileNotFoundError: no such folder, and the name cannot be a hub repository.
      ImportError: it may be a hub repository, but `huggingface_hub` is not installed.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_NAME.fullmatch(name_or_folder):
        raise FileNotFoundError(
            f"{name_or_folder} is not a folder. Give the path of a Hugging Face model folder, or "
            f"a hub name such as Qwen/Qwen3-4B."
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportError(
            f"There is no folder {name_or_folder}. To fetch it from the Hugging Face hub, install "
            f"the `hub` extra: pip install 'slidedp_jax[hub]'."
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_folder, allow_patterns=list(_FETCHED_PATTERNS)))
