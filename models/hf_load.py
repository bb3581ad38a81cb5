"""Weights of a Hugging Face folder, straight from memory-mapped safetensors files.

Everything that can be known from the index and the files' headers is checked before the first
tensor is handed out: files that are absent or cut short, an index that belongs to other files,
missing, unexpected or misshapen tensors. Then tensors are passed one at a time per thread, as views
of the mapped file in the file's dtype; converting and placing them is the caller's part. Imports no
JAX.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, a JSON header, data).
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from slidedp_jax.models.config import ModelConfig, Shape
from slidedp_jax.models.hf_config import read_json
from slidedp_jax.models.hf_names import Place, layout_of, tensors_in_files

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Safetensors dtype names that a trainable parameter may have."""

_LISTED = 10
_PUT_TOGETHER_AT_ONCE = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
      name: name in the file.
      dtype_name: safetensors' name of the dtype (`BF16`).
      shape: shape.
      file: path of the file.
      start: first byte within the file.
      stop: byte behind the last.
    """

    name: str
    dtype_name: str
    shape: Shape
    file: Path
    start: int
    stop: int


def check_folder(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Checks, from index and headers alone, that a folder holds exactly a model's parameters.

    Returns:
      Name -> location of every tensor of the folder.

    Raises:
      FileNotFoundError, ValueError: as `load_parameters`.
    """
    tensors = find_tensors(folder)
    _check_against(tensors, _places(tensors, config.parameter_shapes()), folder)
    return tensors


def load_parameters(
    folder: Path,
    shapes: Mapping[str, Shape],
    write: Callable[[str, np.ndarray], None],
    *,
    num_threads: int | None = None,
) -> None:
    """Hands every parameter of a folder to `write`, after all checks have passed.

    Memory beyond what `write` keeps: the mapped pages of the tensors being written, one per thread;
    they are given back to the system as soon as `write` returns. The experts of a layer that lie
    apart in the files are put together, two such parameters at a time.

    Args:
      folder: Hugging Face model folder.
      shapes: full name -> expected shape of every parameter.
      write: called once per parameter with its name and a read-only array in the file's dtype (see
        `DTYPES`; not necessarily aligned); several calls may run at the same time. The array stays
        valid afterwards, but is then read from the file again.
      num_threads: tensors written at the same time; None means one per core, at most 8.

    Raises:
      FileNotFoundError: a file is absent.
      ValueError: a file is damaged, the index does not fit the files, or the tensors are not those
        of `shapes`. Nothing has been written then.
      Exception: whatever `write` raises; parameters already written stay written.
    """
    tensors = find_tensors(folder)
    places = _places(tensors, shapes)
    _check_against(tensors, places, folder)
    maps = {file: _map(file) for file in {tensor.file for tensor in tensors.values()}}
    _check_tied_head(tensors, shapes, maps)
    sources: dict[str, list[tuple[Tensor, Place]]] = {}
    for name, place in places.items():
        sources.setdefault(place.parameter, []).append((tensors[name], place))
    wanted = sorted(sources.items(), key=lambda item: (item[1][0][0].file, item[1][0][0].start))
    together = threading.Semaphore(_PUT_TOGETHER_AT_ONCE)

    def move(source: tuple[str, list[tuple[Tensor, Place]]]) -> None:
        name, parts = source
        if parts[0][1].part is None:
            ((tensor, _),) = parts
            write(name, _view(tensor, maps[tensor.file]))
            _release(tensor, maps[tensor.file])
            return
        with together:
            write(name, _put_together(shapes[name], parts, maps))

    num_threads = num_threads or min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        moves = [pool.submit(move, source) for source in wanted]
        finished, unfinished = wait(moves, return_when=FIRST_EXCEPTION)
        for pending in unfinished:
            pending.cancel()
        for done in finished:
            done.result()


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """Locates every tensor of a folder through its index, or in its only file.

    Raises:
      FileNotFoundError: no weights, or the index names files that are not there.
      ValueError: a file is damaged, or the index does not describe the files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder.")
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if not (folder / INDEX_NAME).exists():
        if SINGLE_NAME in present:
            return read_header(folder / SINGLE_NAME)
        raise FileNotFoundError(_no_weights(folder, present))
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX_NAME} has no weight_map; the index is damaged.")
    listed = sorted(set(weight_map.values()))
    _check_files_exist(folder, listed, present)
    ignored = sorted(set(present) - set(listed))
    if ignored:
        _log.warning("Ignoring files that the index of %s does not list: %s", folder, ignored)
    return _indexed_tensors(folder, weight_map, listed)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; reads the header only.

    Raises:
      ValueError: the file is no safetensors file, or shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ValueError(
                f"{file} is a Git LFS pointer of {size} bytes, not the weights themselves; fetch "
                f"them with `git lfs pull`."
            )
        header_size = int.from_bytes(start, "little")
        if len(start) < 8 or header_size > size - 8:
            expected = f"at least {header_size + 8}" if len(start) == 8 else "at least 8"
            raise ValueError(
                f"{file} has {size} bytes but its header needs {expected}: the file is cut short "
                f"or no safetensors file. Fetch it again."
            )
        data = 8 + header_size
        try:
            header = json.loads(stream.read(header_size))
            tensors = {
                name: _located(name, entry, file, data)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has a damaged safetensors header: {error!r}.") from error
    expected_size = max((tensor.stop for tensor in tensors.values()), default=data)
    if size != expected_size:
        raise ValueError(
            f"{file} has {size} bytes, its header describes {expected_size}: the file is "
            f"{'cut short' if size < expected_size else 'longer than it should be'}. Fetch it "
            f"again."
        )
    return tensors


def _located(name: str, entry: Mapping[str, Any], file: Path, data: int) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(
        name=name,
        dtype_name=entry["dtype"],
        shape=tuple(entry["shape"]),
        file=file,
        start=data + begin,
        stop=data + end,
    )


def _no_weights(folder: Path, present: list[str]) -> str:
    if present:
        return (
            f"{folder} has {INDEX_NAME} missing: there are {_some(present)}, but without an index "
            f"only a file named {SINGLE_NAME} is read."
        )
    others = sorted(path.name for path in folder.glob("*.bin"))
    hint = f" There are {_some(others)}: save the model as safetensors first." if others else ""
    return f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}.{hint}"


def _check_files_exist(folder: Path, listed: list[str], present: list[str]) -> None:
    absent = [name for name in listed if not (folder / name).is_file()]
    if not absent:
        return
    if len(absent) == len(listed) and present:
        hint = f"The index looks stale: the folder has {_some(present)} instead."
    else:
        hint = "The download looks incomplete: fetch the model again."
    raise FileNotFoundError(
        f"{folder / INDEX_NAME} names files that are not there: {_some(absent)}. {hint}"
    )


def _indexed_tensors(
    folder: Path, weight_map: Mapping[str, str], listed: list[str]
) -> dict[str, Tensor]:
    in_files = {name: read_header(folder / name) for name in listed}
    misplaced = [name for name, file in weight_map.items() if name not in in_files[file]]
    unlisted = [
        f"{name} in {file}"
        for file, tensors in in_files.items()
        for name in tensors
        if weight_map.get(name) != file
    ]
    if misplaced or unlisted:
        raise ValueError(
            f"{folder / INDEX_NAME} does not describe the files beside it; the index looks stale. "
            f"Not where the index says: {_some(misplaced)}. In a file, but not in the index: "
            f"{_some(unlisted)}."
        )
    return {name: in_files[file][name] for name, file in weight_map.items()}


def _places(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, Place]:
    return tensors_in_files(shapes, layout_of(tensors))


def _put_together(
    shape: Shape, parts: list[tuple[Tensor, Place]], maps: Mapping[Path, mmap.mmap]
) -> np.ndarray:
    """A parameter out of tensors that hold parts of it, in the dtype of the first."""
    whole = np.empty(shape, DTYPES[parts[0][0].dtype_name])
    for tensor, place in parts:
        assert place.part is not None
        whole[place.part] = _view(tensor, maps[tensor.file])
        _release(tensor, maps[tensor.file])
    whole.flags.writeable = False
    return whole


def _check_against(
    tensors: Mapping[str, Tensor], places: Mapping[str, Place], folder: Path
) -> None:
    shapes = {name: place.shape for name, place in places.items()}
    missing = [name for name in shapes if name not in tensors]
    unexpected = [
        name for name in tensors if name not in shapes and not _is_redundant(name, shapes)
    ]
    if missing or unexpected:
        raise ValueError(
            f"The tensors in {folder} are not those that config.json describes. Missing: "
            f"{_some(missing)}. Unexpected: {_some(unexpected)}."
            f"{_names_hint(missing, unexpected)}"
        )
    misshapen = [
        f"{name} is {list(tensors[name].shape)} in the file, expected {list(shape)}"
        for name, shape in shapes.items()
        if tensors[name].shape != tuple(shape)
    ]
    if misshapen:
        raise ValueError(
            f"Shapes in {folder} are not those that config.json describes: {_some(misshapen)}."
            f"{_shapes_hint(misshapen)}"
        )
    dtypes: dict[str, str] = {}
    for name, place in places.items():
        own = tensors[name]
        _check_dtype(own)
        if dtypes.setdefault(place.parameter, own.dtype_name) != own.dtype_name:
            raise ValueError(
                f"{name} in {own.file} is {own.dtype_name}, other experts of {place.parameter} are "
                f"{dtypes[place.parameter]}; one array holds them all. Save the model in one dtype."
            )


def _is_redundant(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Tensors that older tools wrote although other values determine them."""
    is_tied_head = name == "lm_head.weight" and "model.embed_tokens.weight" in shapes
    return is_tied_head or name.endswith(".rotary_emb.inv_freq")


def _check_dtype(tensor: Tensor) -> None:
    num_bytes = tensor.stop - tensor.start
    dtype = DTYPES.get(tensor.dtype_name)
    if dtype is None:
        raise ValueError(
            f"{tensor.name} in {tensor.file} has dtype {tensor.dtype_name}; supported: "
            f"{', '.join(DTYPES)}. Quantised checkpoints must be expanded first."
        )
    if num_bytes != dtype.itemsize * math.prod(tensor.shape):
        raise ValueError(
            f"{tensor.name} in {tensor.file} has {num_bytes} bytes for shape "
            f"{list(tensor.shape)} of {tensor.dtype_name}; the header is damaged."
        )


def _check_tied_head(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], maps: Mapping[Path, mmap.mmap]
) -> None:
    """A head that a tied model's files hold as well must be the embedding, bit for bit."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if head is None or embedding is None or "lm_head.weight" in shapes:
        return
    same_form = (head.shape, head.dtype_name) == (embedding.shape, embedding.dtype_name)
    if same_form:
        left, right = (maps[tensor.file] for tensor in (head, embedding))
        same_form = (
            memoryview(left)[head.start : head.stop]
            == (memoryview(right)[embedding.start : embedding.stop])
        )
        _release(head, left)
        _release(embedding, right)
    if not same_form:
        raise ValueError(
            f"config.json ties the output projection to the embedding, but lm_head.weight in "
            f"{head.file} differs from model.embed_tokens.weight. If the model is not tied, set "
            f"tie_word_embeddings to false."
        )


def _names_hint(missing: list[str], unexpected: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return " If the output projection is the embedding, set tie_word_embeddings to true."
    if unexpected == ["lm_head.weight"]:
        return " If the model has its own output projection, set tie_word_embeddings to false."
    tail = "layers.0.input_layernorm.weight"
    expected = next((name for name in missing if name.endswith(tail)), None)
    found = next((name for name in unexpected if name.endswith(tail)), None)
    if expected is None or found is None:
        return ""
    return (
        f" The names in the files start with {found.removesuffix(tail)!r} where "
        f"{expected.removesuffix(tail)!r} is expected; rename them."
    )


def _shapes_hint(misshapen: list[str]) -> str:
    if any("self_attn.q_proj.weight" in line for line in misshapen):
        return " Check head_dim and the numbers of heads in config.json."
    return ""


def _some(items: Iterable[str]) -> str:
    """The first ten and a count."""
    items = list(items)
    if not items:
        return "none"
    more = f", ... ({len(items)} in all)" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _view(tensor: Tensor, mapped: mmap.mmap) -> np.ndarray:
    dtype = DTYPES[tensor.dtype_name]
    count = math.prod(tensor.shape)
    flat = np.frombuffer(mapped, dtype, count=count, offset=tensor.start)
    return flat.reshape(tensor.shape)


def _release(tensor: Tensor, mapped: mmap.mmap) -> None:
    """Takes the tensor's pages out of this process; they stay in the system's page cache."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    page = mmap.PAGESIZE
    start, stop = -(-tensor.start // page) * page, tensor.stop // page * page
    if stop > start:
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)
