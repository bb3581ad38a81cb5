"""A Hugging Face folder from live parameters: sharded safetensors beside the source's own files.

The folder appears complete or not at all: everything is written into a hidden sibling, forced to
disk and renamed. Tensors are asked for one at a time, so the export holds one in memory. Imports no
JAX.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from slidedp_jax.models.config import Shape
from slidedp_jax.models.hf_config import parse_config, read_json
from slidedp_jax.models.hf_load import DTYPES, INDEX_NAME, SINGLE_NAME, find_tensors
from slidedp_jax.models.hf_names import Place, layout_of, published_layout, tensors_in_files

_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

EXPORT_DTYPES = tuple(_SAFETENSORS_NAMES)
"""Dtypes that an export may have."""

_COPIED_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_TEMPLATE_NAME = "chat_template.jinja"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One weight file: its name and, by tensor name, the shapes in the order of the bytes."""

    name: str
    shapes: dict[str, Shape]


def export(
    folder: Path,
    source_folder: Path,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    chat_template: str | None = None,
    more_files: Mapping[str, str] | None = None,
) -> None:
    """Writes a folder that other tools load.

    The configuration keeps the source's layout (only its dtype entries change); tokenizer, chat
    template, generation configuration and licences are copied byte for byte. A tied model gets an
    `lm_head.weight` only if the source's files have one, and experts lie as they do there.

    Args:
      folder: where to write; must not exist, or be empty.
      source_folder: the Hugging Face folder that training started from.
      shapes: full name -> shape of every parameter.
      read: full name -> array of that shape, in float32 or already in `dtype`.
      dtype: one of `EXPORT_DTYPES`; float32 values are rounded to nearest, ties to even.
      max_shard_bytes: weight files are split so that none holds more tensor bytes than this, unless
        a single tensor does.
      chat_template: Jinja text that replaces the source's template, or None.
      more_files: name -> text of further files, such as a model card.

    Raises:
      FileExistsError: `folder` exists and is not empty.
      ValueError: `shapes` are not those of the source's configuration, a tensor has the wrong
        shape, or a value is not finite in the target dtype. No folder is left behind.
    """
    folder, source_folder = Path(folder).absolute(), Path(source_folder)
    _check_dtype(dtype)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; choose another export folder.")
    raw_config = read_json(source_folder / "config.json")
    _check_shapes(shapes, raw_config, source_folder)
    places = _places(shapes, str(raw_config["model_type"]), source_folder)
    written = {name: place.shape for name, place in places.items()}

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(
        tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent)
    )
    try:
        partial.chmod(0o777 & ~_umask())
        _write_weights(partial, written, _reader(places, read), dtype, max_shard_bytes)
        _copy_files(source_folder, partial, chat_template)
        for name, text in (more_files or {}).items():
            _write_bytes(partial / name, text.encode())
        _write_config(source_folder / "config.json", raw_config, partial / "config.json", dtype)
        for directory in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
            _sync_directory(directory)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_directory(folder.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what an export to this folder has written, of a process that ends."""
    folder = Path(folder).absolute()
    for partial in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def export_bytes(shapes: Mapping[str, Shape], dtype: str) -> int:
    """Bytes of the weights of such a folder.

    Raises:
      ValueError: `dtype` is none of `EXPORT_DTYPES`.
    """
    _check_dtype(dtype)
    num_values = sum(math.prod(shape) for shape in shapes.values())
    return num_values * int(DTYPES[_SAFETENSORS_NAMES[dtype]].itemsize)


def _check_dtype(dtype: str) -> None:
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"Export dtype is {dtype!r}; supported: {', '.join(EXPORT_DTYPES)}.")


def _check_shapes(
    shapes: Mapping[str, Shape], raw_config: Mapping[str, Any], source_folder: Path
) -> None:
    expected = parse_config(raw_config).parameter_shapes()
    wrong = sorted(
        name
        for name in expected.keys() | shapes.keys()
        if expected.get(name) != (tuple(shapes[name]) if name in shapes else None)
    )
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"The parameters to export are not those of {source_folder / 'config.json'}: "
            f"{len(wrong)} differ, the first is {first}, {shapes.get(first)} here and "
            f"{expected.get(first)} there."
        )


def _places(shapes: Mapping[str, Shape], model_type: str, source_folder: Path) -> dict[str, Place]:
    """What the files will hold: experts as in the source's, and a tied matrix as often as there."""
    source = _source_tensors(source_folder)
    layout = layout_of(source) if source else published_layout(model_type)
    places = tensors_in_files(shapes, layout)
    if "lm_head.weight" not in shapes and "lm_head.weight" in source:
        places["lm_head.weight"] = places["model.embed_tokens.weight"]
    return places


def _reader(
    places: Mapping[str, Place], read: Callable[[str], np.ndarray]
) -> Callable[[str], np.ndarray]:
    """Reads tensors of the files, and each parameter once while its tensors follow each other."""
    last: dict[str, np.ndarray] = {}

    def read_tensor(name: str) -> np.ndarray:
        place = places[name]
        if place.parameter not in last:
            last.clear()
            last[place.parameter] = read(place.parameter)
        value = last[place.parameter]
        return value if place.part is None else value[place.part]

    return read_tensor


def _source_tensors(source_folder: Path) -> Mapping[str, Any]:
    """Tensors of the source; none where its weights were moved away since."""
    if (source_folder / INDEX_NAME).exists() or (source_folder / SINGLE_NAME).exists():
        return find_tensors(source_folder)
    return {}


def _write_weights(
    folder: Path,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    dtype: str,
    max_shard_bytes: int,
) -> None:
    item_size = DTYPES[_SAFETENSORS_NAMES[dtype]].itemsize
    shards = _split(shapes, max_shard_bytes // item_size)
    for shard in shards:
        with (folder / shard.name).open("wb") as stream:
            _write_shard(stream, shard, read, dtype)
            _sync_file(stream)
    if len(shards) == 1:
        return
    num_values = sum(math.prod(shape) for shape in shapes.values())
    index = {
        "metadata": {"total_size": num_values * item_size},
        "weight_map": {name: shard.name for shard in shards for name in shard.shapes},
    }
    _write_json(folder / INDEX_NAME, index)


def _split(shapes: Mapping[str, Shape], max_values: int) -> list[_Shard]:
    groups: list[dict[str, Shape]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if not groups or size > room:
            groups.append({})
            room = max_values
        groups[-1][name] = tuple(shape)
        room -= size
    if len(groups) == 1:
        return [_Shard(name=SINGLE_NAME, shapes=groups[0])]
    return [
        _Shard(name=f"model-{number:05d}-of-{len(groups):05d}.safetensors", shapes=group)
        for number, group in enumerate(groups, start=1)
    ]


def _write_shard(
    stream: BinaryIO, shard: _Shard, read: Callable[[str], np.ndarray], dtype: str
) -> None:
    file_dtype = DTYPES[_SAFETENSORS_NAMES[dtype]]
    # Several loaders refuse files that do not name the framework.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shard.shapes.items():
        stop = offset + math.prod(shape) * file_dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    stream.write(len(encoded).to_bytes(8, "little"))
    stream.write(encoded)
    for name, shape in shard.shapes.items():
        value = read(name)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}, expected {shape}; export stopped.")
        for piece in _pieces(value):
            stream.write(_converted(name, piece, file_dtype))


def _pieces(value: np.ndarray, size: int = 1 << 22) -> Iterator[np.ndarray]:
    """Flat pieces, so that a converted copy of a whole embedding never exists."""
    flat = np.ascontiguousarray(value).reshape(-1)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]


def _converted(name: str, piece: np.ndarray, dtype: np.dtype) -> memoryview:
    with np.errstate(over="ignore"):
        converted = piece.astype(dtype, copy=False)
    if not np.isfinite(converted).all():
        what = "overflows" if np.isfinite(piece).all() else "is not finite"
        raise ValueError(
            f"{name} holds a value that {what} in {dtype.name}; export stopped, nothing written."
        )
    return converted.view(np.uint8).data


def _copy_files(source_folder: Path, folder: Path, chat_template: str | None) -> None:
    for pattern in _COPIED_PATTERNS:
        for source in sorted(source_folder.glob(pattern)):
            if not source.is_file():
                continue
            target = folder / source.relative_to(source_folder)
            target.parent.mkdir(exist_ok=True)
            _write_bytes(target, source.read_bytes())
    if chat_template is not None:
        _log.info("Exporting the chat template that training used, not the source folder's.")
        _write_bytes(folder / _TEMPLATE_NAME, chat_template.encode())


def _write_config(source: Path, raw: Mapping[str, Any], target: Path, dtype: str) -> None:
    # `dtype` is the newer name of `torch_dtype`; a file may have either, both or none.
    keys = [key for key in ("torch_dtype", "dtype") if key in raw]
    if not keys:
        keys = ["dtype" if "rope_parameters" in raw else "torch_dtype"]
    changed = dict(raw) | dict.fromkeys(keys, dtype)
    if changed == raw:
        _write_bytes(target, source.read_bytes())
    else:
        _write_json(target, changed)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        _sync_file(stream)


def _sync_file(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
