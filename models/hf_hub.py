"""Where a model's folder is: on this disk, or fetched from the Hugging Face hub on request.

The hub is reached only through the `huggingface_hub` package (the `hub` extra), with its own cache,
its own tokens and its own offline switch (`HF_HUB_OFFLINE=1`). Imports no JAX.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = "*.safetensors"
_FETCHED_PATTERNS = (_WEIGHTS, "*.json", "*.txt", "*.jinja", "tokenizer.model", "LICENSE*")


def resolve_model_folder(
    name_or_folder: str, *, weights: bool = True, revision: str | None = None
) -> Path:
    """A local folder as it is, or the local copy of a hub repository (`Qwen/Qwen3-4B`).

    Args:
      name_or_folder: a path, or a hub name; what begins with `.`, `/` or `~` is a path.
      weights: fetch them as well; without, configuration and tokenizer only.
      revision: commit of the repository; None is its newest.

    Raises:
      FileNotFoundError: no such folder, and the name cannot be a hub repository, or the hub has
        none of that name, wants a login for it or cannot be reached.
      ImportError: it may be a hub repository, but `huggingface_hub` is not installed.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        return folder
    if name_or_folder.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name_or_folder):
        what = "a file, not a folder" if folder.is_file() else "not a folder"
        raise FileNotFoundError(
            f"{name_or_folder} is {what}. Give the path of a Hugging Face model folder, or "
            f"a hub name such as Qwen/Qwen3-4B."
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportError(
            f"There is no folder {name_or_folder} here. If it is a name on the Hugging Face hub, "
            f"fetching it needs the `hub` extra: in the clone, pip install -e '.[hub]'."
        )
    from huggingface_hub import snapshot_download

    patterns = [p for p in _FETCHED_PATTERNS if weights or p != _WEIGHTS]
    try:
        return Path(snapshot_download(name_or_folder, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of whatever client the hub's package uses
        raise FileNotFoundError(
            f"There is no folder {name_or_folder} here, and from the Hugging Face hub no model of "
            f"that name could be fetched: {_why(error)}"
        ) from error


def _why(error: Exception) -> str:
    """What the hub's package means, by the names of its exceptions, and what to do."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return "it is gated; accept its terms on its page and log in (`hf auth login`)"
    if "RepositoryNotFoundError" in names:
        return "the hub has none, or it is private: check the name, or log in (`hf auth login`)"
    if "LocalEntryNotFoundError" in names or "OfflineModeIsEnabled" in names:
        return (
            "the hub cannot be reached (no network, or HF_HUB_OFFLINE=1) and the cache has none: "
            "check the path or the network"
        )
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}. What has been fetched is kept: try again"
