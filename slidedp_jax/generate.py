"""Text from the weights that are being trained: `python -m slidedp_jax.generate --help`.

Weights are streamed from the host state for the prompts and again for every token, so a token of
all rows together takes as long as one upload of the model; nothing but keys and values stays on the
devices. Meant for a look at what a model says, not for serving.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from slidedp_jax.command_parser import CommandParser
from slidedp_jax.errors import UserError
from slidedp_jax.models.batch_arrays import document_offsets
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.streamed import CachedForm
from slidedp_jax.planner.hardware import ComputeDtype
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.wording import counted, say_error, short_count

if TYPE_CHECKING:
    from slidedp_jax.data import Tokenizer
    from slidedp_jax.trainer import Trainer

_CAPACITY_MULTIPLE = 64
_SHORTEST_PREFILL = 16


def generate(
    trainer: Trainer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Completions of prompts under the weights of the last step; may run between any two steps.

    All rows grow together. Program shapes depend on the number of rows and on the rounded lengths
    alone, so nothing is compiled per token.

    Args:
      trainer: owns the weights. Its steps before this call count as taken, and steps after it give
        what they would have given without it.
      prompts: token ids of each row, any lengths.
      max_new_tokens: where a row ends that meets no stop id.
      temperature: 0 takes the largest logit (the lowest id among equals); above 0, logits are
        divided by it and a token is drawn with a random number that depends on `seed`, the row's
        index in `prompts` and the token's position alone.
      top_p: draw only among the likeliest tokens that together have this probability.
      seed: any non-negative integer.
      stop_ids: a row ends with the first of these that it produces.

    Returns:
      The new tokens of each row, without the prompt; a stop id that ended a row is its last.

    Raises:
      UserError: an argument is out of range (the message says which and where), the model has no
        cached form, or the trainer is closed.
      TrainingStopped: an update of the weights failed.
    """
    _check_choice(max_new_tokens, temperature, top_p, seed)
    trainer.gate.check()
    if len(prompts) == 0:
        return []
    rows = GrowingRows(trainer, prompts, max_new_tokens=max_new_tokens)
    stops = frozenset(int(token) for token in stop_ids)
    completions: list[list[int]] = [[] for _ in prompts]
    logits = rows.prefill()
    while True:
        for row, tokens in enumerate(completions):
            if _is_complete(tokens, max_new_tokens, stops):
                continue
            position = len(prompts[row]) + len(tokens)
            _check_finite(logits[row], row, position)
            uniform = np.random.default_rng([seed, row, position]).random()
            tokens.append(choose(logits[row], uniform, temperature=temperature, top_p=top_p))
        if all(_is_complete(tokens, max_new_tokens, stops) for tokens in completions):
            return completions
        # A row that has ended runs on beside the others; what it says is not looked at.
        logits = rows.append([tokens[-1] for tokens in completions])


def choose(
    logits: np.ndarray, uniform: float, *, temperature: float, top_p: float | None = None
) -> int:
    """The token of one row, by inversion of the cumulative probabilities in the order of ids.

    Args:
      logits: float32 [V].
      uniform: random number in [0, 1).
      temperature: 0 for the largest logit.
      top_p: see `generate`; the likeliest token is always among the candidates.
    """
    if temperature == 0:
        return int(logits.argmax())
    wide = logits.astype(np.float64)
    weights = np.exp((wide - wide.max()) / temperature)
    if top_p is not None:
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        weights[order[np.searchsorted(cumulative, top_p * cumulative[-1]) + 1 :]] = 0
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))


@final
class GrowingRows:
    """Prompts on the devices with room for new tokens.

    Args:
      trainer: owns the weights.
      prompts: token ids of each row.
      max_new_tokens: room for so many more in every row.

    Attributes:
      capacity: tokens that a row's caches hold, rounded up from what is needed.
      cache_bytes: memory of keys and values over all layers, rows and devices; they are divided
        evenly among the devices. 2 * layers * rows * capacity * key-value heads * head dim elements
        of the compute dtype for the decoders of `models`.

    Raises:
      UserError: see `generate`.
    """

    def __init__(self, trainer: Trainer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int):
        trainer.gate.check()
        self._trainer = trainer
        self._cached = _cached_form(trainer)
        ids = _checked_prompts(prompts, trainer.model.vocab_size)
        needed = _needed_tokens(ids, max_new_tokens, self._cached.max_tokens)
        # Rows that fill up the devices are one token long.
        self._num_rows = len(ids)
        self._prompts = ids + [np.zeros(1, np.int32)] * (-len(ids) % trainer.num_devices)
        self._positions = np.array([len(row) for row in self._prompts], np.int32)
        rounded = -(-needed // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
        self.capacity = min(rounded, self._cached.max_tokens)
        self._caches = trainer.passes.init_caches(len(self._prompts), self.capacity)
        self.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._caches))

    def prefill(self) -> np.ndarray:
        """Logits of each row's first new token, float32 [R, V]."""
        longest = int(self._positions.max())
        width = max(1 << (longest - 1).bit_length(), _SHORTEST_PREFILL)
        width = min(width, self.capacity)
        index = np.arange(width, dtype=np.int32)[None]
        segments = (index < self._positions[:, None]).astype(np.int32)
        input_ids = np.zeros(segments.shape, np.int32)
        for row, prompt in enumerate(self._prompts):
            input_ids[row, : len(prompt)] = prompt
        starts, lengths = document_offsets(segments)
        batch = {
            "input_ids": input_ids,
            "positions": index * segments,
            "segment_ids": segments,
            "document_starts": starts,
            "document_lengths": lengths,
        }
        return self._pass(self._cached.prefill_fns, batch, self._positions - 1)

    def append(self, tokens: Sequence[int]) -> np.ndarray:
        """Add one token to each row; logits of the one after it, float32 [R, V]."""
        assert self._positions.max() < self.capacity, "no room was reserved for this token"
        input_ids = np.zeros((len(self._prompts), 1), np.int32)
        input_ids[: self._num_rows, 0] = tokens
        batch = {"input_ids": input_ids, "positions": self._positions[:, None].copy()}
        self._positions += 1
        return self._pass(self._cached.decode_fns, batch, np.zeros_like(self._positions))

    def _pass(self, layer_fns: Any, batch: dict[str, np.ndarray], last: np.ndarray) -> np.ndarray:
        logits = self._trainer.passes.next_logits(layer_fns, batch, last, self._caches)
        return logits[: self._num_rows]


def _is_complete(tokens: list[int], max_new_tokens: int, stops: frozenset[int]) -> bool:
    return len(tokens) == max_new_tokens or (bool(tokens) and tokens[-1] in stops)


def _cached_form(trainer: Trainer) -> CachedForm:
    if trainer.model.cached is None:
        raise UserError(
            "this model has no cached form (StreamedModel.cached is None), so no text can be "
            "generated with it; give it one (see models.streamed.CachedForm), or switch samples off"
        )
    return trainer.model.cached


def _checked_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[np.ndarray]:
    rows = []
    for number, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if row.ndim != 1 or row.size == 0:
            raise UserError(
                f"prompts[{number}] must be a list of at least one token id, got shape "
                f"{row.shape}; begin an empty prompt with the tokenizer's bos token"
            )
        if not np.issubdtype(row.dtype, np.integer):
            raise UserError(f"prompts[{number}] must hold integers, got {row.dtype}")
        bad = np.flatnonzero((row < 0) | (row >= vocab_size))
        if bad.size:
            raise UserError(
                f"prompts[{number}][{bad[0]}] is {row[bad[0]]}, but the vocabulary has "
                f"{vocab_size} ids; the tokenizer does not belong to this model"
            )
        rows.append(row.astype(np.int32))
    return rows


def _needed_tokens(rows: list[np.ndarray], max_new_tokens: int, max_tokens: int) -> int:
    for number, row in enumerate(rows):
        if len(row) + max_new_tokens > max_tokens:
            raise UserError(
                f"prompts[{number}] has {len(row)} tokens and {max_new_tokens} new ones were asked "
                f"for, but the model's positions end at {max_tokens} (max_position_embeddings); "
                "shorten the prompt or lower max_new_tokens"
            )
    return max(len(row) for row in rows) + max_new_tokens


def _check_choice(max_new_tokens: int, temperature: float, top_p: float | None, seed: int) -> None:
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature is {temperature}; it must be 0 (greedy) or a positive number")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if seed < 0:
        raise UserError(f"seed is {seed}; it must not be negative")


def _check_finite(logits: np.ndarray, row: int, position: int) -> None:
    if not np.isfinite(logits).all():
        raise UserError(
            f"the logits of prompts[{row}] at position {position} are not all finite; the weights "
            "are damaged (a diverged run, or a file of another model)"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 when something is wrong with the request."""
    args = _parser().parse_whole(sys.argv[1:] if argv is None else argv)
    try:
        for text in _complete(args):
            print(text)
    except (UserError, ValueError, FileNotFoundError, ImportError) as error:
        say_error(error)
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slidedp generate",
        description="Complete prompts with a Hugging Face model folder, its weights streamed from "
        "host memory. Flags may be written with hyphens or underscores.",
    )

    def add(name: str, **options: Any) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, **options)

    add("model_name_or_path", required=True, help="model folder, or a name on the hub")
    add("prompt", required=True, action="append", help="may be given several times")
    add("max_new_tokens", type=int, default=64, help="(64)")
    add("temperature", type=float, default=0.0, help="0: always the likeliest token (0)")
    add("top_p", type=float, help="draw among the likeliest tokens of this probability")
    add("seed", type=int, default=0, help="of the draws (0)")
    add(
        "chat",
        action=argparse.BooleanOptionalAction,
        help="treat the prompt as a user's message; default: if the folder has a chat template",
    )
    add("dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    add("platform", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    add("num_devices", type=int, default=1, help="devices that share the prompts (1)")
    add("num_host_devices", type=int, help="CPU devices that hold the weights; default: by cores")
    return parser


def _complete(args: argparse.Namespace) -> list[str]:
    from slidedp_jax.data import load_tokenizer
    from slidedp_jax.models.hf_config import read_config
    from slidedp_jax.models.hf_hub import resolve_model_folder
    from slidedp_jax.process import configure

    _check_choice(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    configure(
        platform=args.platform,
        num_devices=args.num_devices,
        num_host_devices=args.num_host_devices,
        num_hosts=1,
    )
    folder = resolve_model_folder(args.model_name_or_path, weights=False)
    config = read_config(folder)  # says more than the tokenizer does where there is no model
    tokenizer = load_tokenizer(folder)
    prompts = [encode_prompt(tokenizer, text, chat=args.chat) for text in args.prompt]
    folder = resolve_model_folder(args.model_name_or_path)
    _say(f"reading {short_count(config.num_parameters)} parameters from {folder}")
    with open_trainer(folder, dtype=args.dtype, num_devices=args.num_devices) as trainer:
        _say(f"compiling, then up to {counted(args.max_new_tokens, 'token')} per prompt")
        completions = generate(
            trainer,
            prompts,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            stop_ids=tokenizer.stop_ids,
        )
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]


def _say(text: str) -> None:
    """What takes the time, beside the completions, which go to stdout."""
    print(text, file=sys.stderr, flush=True)


def encode_prompt(tokenizer: Tokenizer, text: str, *, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
      tokenizer: of the model folder.
      text: the prompt; what the tokenizer puts before a text may already stand there.
      chat: the text is a user's message that the model should answer (True) or the beginning of a
        document (False); None: the former if there is a chat template.

    Raises:
      UserError: chat was asked for and there is no chat template.
    """
    if chat or (chat is None and tokenizer.chat_templates):
        message = {"role": "user", "content": text}
        return tokenizer.encode_chat([message], add_generation_prompt=True)
    return tokenizer.begun(tokenizer.encode(text))


def open_trainer(
    folder: Path, *, dtype: ComputeDtype = "bfloat16", num_devices: int = 1
) -> Trainer:
    """A trainer that holds a folder's weights and no optimizer state: 4 bytes per parameter.

    Args:
      folder: Hugging Face model folder.
      dtype: compute dtype, `bfloat16` or `float32`.
      num_devices: compute devices to use.

    Raises:
      ValueError, FileNotFoundError: the folder cannot be read; see `models.hf_load`.
    """
    import optax

    from slidedp_jax.models.decoder import build
    from slidedp_jax.models.hf_config import read_config
    from slidedp_jax.models.hf_load import load_parameters
    from slidedp_jax.process import current_setup
    from slidedp_jax.trainer import Trainer

    config = read_config(folder)
    return Trainer(
        build(config),
        optax.sgd(0.0),
        strategy=_inference_strategy(config, dtype, current_setup().num_host_devices),
        parameters=lambda write: load_parameters(folder, config.parameter_shapes(), write),
        max_grad_norm=None,
        weight_rounding="nearest",  # as others do what a folder in float32 holds
        kernel_form="whole",
        num_devices=num_devices,
        inference_only=True,
    )


def _inference_strategy(
    config: ModelConfig, dtype: ComputeDtype, num_host_devices: int
) -> Strategy:
    """Chunks of about 64M parameters: large enough for full transfer speed, small on a device."""
    layers = min(max(1, 2**26 // config.num_layer_parameters), config.num_hidden_layers)
    return Strategy(
        layers_per_chunk=layers,
        rows_per_microbatch=1,
        num_microbatches=1,
        update_policy="eager",
        compute_dtype=dtype,
        num_host_devices=num_host_devices,
    )


if __name__ == "__main__":
    sys.exit(main())
