"""Whether a user's losses are the sums that the runtime takes them for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.adapter.claims import example_batch
from slidedp_jax.errors import UserError
from slidedp_jax.models.batch_arrays import IGNORED
from slidedp_jax.models.streamed import LayerFn, LayerOutput, Stage, StreamedModel

TOLERANCE = 0.02
"""Of the losses' size: rounding in bf16 stays below it, a mean over rows is off by half."""


def check_sum_over_rows(
    model: StreamedModel, x: jax.ShapeDtypeStruct, vocab_size: int, *, packed: bool
) -> None:
    """Compute losses of two made-up rows, together and apart, and of a row that counts nothing.

    Args:
      model: the adapted model.
      x: hidden states of one row, [1, T, D].
      vocab_size: V.
      packed: whether batches have segments.

    Raises:
      UserError: the loss of two rows is not the sum of their losses, or a row counts that must not,
        or a loss is no float32 where the compute dtype is bfloat16.
    """
    rows = _MadeUpRows(model, x, vocab_size, packed)
    _check_dtypes(model, rows)

    def head_loss(which: Sequence[int]) -> jax.Array:
        head, embed = _made_up(model.head.shapes), _made_up(model.embed.shapes)
        hidden, batch = rows.take(which)
        return model.head_loss_fn(head, embed if model.tied else None, hidden, batch)

    _check_head(*_losses(head_loss, rows.UNSUPERVISED))
    numbers = range(len(model.layers))
    first_of_kind = dict(zip(model.layer_fns[::-1], numbers[::-1], strict=True))
    for layer_fn, number in first_of_kind.items():
        stage = model.layers[number]

        def output(
            which: Sequence[int], fn: LayerFn = layer_fn, stage: Stage = stage, number: int = number
        ) -> Any:
            hidden, batch = rows.take(which)
            batch["layer_index"] = jnp.full(1, number, jnp.int32)
            return fn(_made_up(stage.shapes), hidden, batch)

        given = jax.eval_shape(partial(output, [0]))
        if not isinstance(given, LayerOutput):
            continue
        if given.aux is not None:

            def aux(which: Sequence[int], output: Callable[..., Any] = output) -> jax.Array:
                of_rows: jax.Array = output(which).aux
                return of_rows

            _check_aux(stage.name, *_losses(aux, rows.FILLING))
        if given.sums is not None:
            _check_sums(stage.name, partial(lambda own, which: own(which).sums, output), rows)


def _check_dtypes(model: StreamedModel, rows: _MadeUpRows) -> None:
    """Trace the loss with everything in bfloat16, as runs compute by default."""

    def head_loss(tree: Any, tied: Any, hidden: jax.Array, batch: dict[str, jax.Array]) -> Any:
        return model.head_loss_fn(tree, tied if model.tied else None, hidden, batch)

    hidden, batch = rows.shapes()
    head, embed = _halved(model.head.shapes), _halved(model.embed.shapes)
    jax.eval_shape(head_loss, head, embed, hidden, batch)  # which refuses what is no float32


def _halved(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)


class _MadeUpRows:
    """Two rows, one of which nothing is supervised, and one that fills up a microbatch."""

    UNSUPERVISED, FILLING = 2, 3

    def __init__(
        self, model: StreamedModel, x: jax.ShapeDtypeStruct, vocab_size: int, packed: bool
    ):
        tokens = x.shape[1]
        ids = np.arange(4 * tokens, dtype=np.int32).reshape(4, tokens) % vocab_size
        examples = example_batch(1, tokens, packed=packed, token_arrays=model.token_arrays)
        arrays = {
            name: np.ones((4, *shape.shape[1:]), shape.dtype) for name, shape in examples.items()
        }
        arrays |= {"input_ids": ids, "targets": ids.copy()}
        arrays["positions"] = np.tile(np.arange(tokens, dtype=np.int32), (4, 1))
        if packed:
            arrays["document_starts"] = np.tile(np.array([[0, tokens]], np.int32), (4, 1))
            arrays["document_lengths"] = np.full((4, 1), tokens, np.int32)
        for array in arrays.values():
            array[self.FILLING] = 0
        arrays["targets"][[self.UNSUPERVISED, self.FILLING]] = IGNORED
        self._arrays = arrays
        self._x = jax.ShapeDtypeStruct((4, *x.shape[1:]), x.dtype)

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
        """Of one row as the devices get it in bf16 compute."""
        batch = {
            name: jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype)
            for name, array in self._arrays.items()
        }
        return jax.ShapeDtypeStruct((1, *self._x.shape[1:]), jnp.bfloat16), batch

    def take(self, which: Sequence[int]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Hidden states and batch of some rows."""
        chosen = np.array(which)
        batch = {name: jnp.asarray(array[chosen]) for name, array in self._arrays.items()}
        return _waves(self._x)[chosen], batch


def _losses(loss: Callable[[Sequence[int]], jax.Array], nothing: int) -> list[float]:
    """Of two rows together and apart, and of a row that counts nothing."""
    computed = jax.jit(lambda: [loss([0, 1]), loss([0]), loss([1]), loss([nothing])])()
    return [float(value) for value in computed]


def _check_head(both: float, first: float, second: float, nothing: float) -> None:
    if not _is_sum(both, first, second):
        raise UserError(
            f"head_loss is no sum over rows: two rows together give {both:.6g}, apart "
            f"{first:.6g} and {second:.6g}. Return the sum of the losses of the supervised tokens, "
            "no mean; the runtime divides by their number in the whole step"
        )
    if not _is_nothing(nothing, first, second):
        raise UserError(
            f"head_loss of a row in which every target is -100 is {nothing:.6g}; it must be 0. "
            "Rows that fill up a microbatch and masked tokens must not count: multiply each "
            "token's loss by batch['targets'] >= 0"
        )


def _check_aux(name: str, both: float, first: float, second: float, nothing: float) -> None:
    if not _is_sum(both, first, second):
        raise UserError(
            f"the auxiliary loss of the layer at {name} is no sum over rows: two rows together "
            f"give {both:.6g}, apart {first:.6g} and {second:.6g}. Return the sum over tokens, no "
            "mean; the runtime adds it to the sum of the token losses and divides both by the "
            "number of supervised tokens in the whole step"
        )
    if not _is_nothing(nothing, first, second):
        raise UserError(
            f"the auxiliary loss of the layer at {name} is {nothing:.6g} for a row that only fills "
            "up a microbatch (targets -100, all else 0); it must be 0, or it would depend on the "
            "number of devices: multiply each token's part by batch['targets'] >= 0, or by "
            "batch['segment_ids'] > 0 where rows are packed"
        )


def _check_sums(name: str, sums: Callable[[Sequence[int]], Any], rows: _MadeUpRows) -> None:
    """Each array of a layer's sums, as `_check_aux` does it with its loss."""
    whole, first, second, nothing = jax.jit(
        lambda: [sums([0, 1]), sums([0]), sums([1]), sums([rows.FILLING])]
    )()
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(whole)[0]]
    keys = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    of_each = [map(np.asarray, jax.tree.leaves(t)) for t in (whole, first, second, nothing)]
    for key, both, one, other, none in zip(keys, *of_each, strict=True):
        size = TOLERANCE * float(np.max(np.abs(one) + np.abs(other), initial=0.0))
        if np.max(np.abs(both - one - other), initial=0.0) > size:
            raise UserError(
                f"{key!r} of the layer at {name} is no sum over rows: what two rows give together "
                "is not what they give apart. Return sums over tokens, no means"
            )
        if np.max(np.abs(none), initial=0.0) > size / 100:
            raise UserError(
                f"{key!r} of the layer at {name} is not 0 for a row that only fills up a "
                "microbatch (targets -100, all else 0): multiply each token's part by "
                "batch['targets'] >= 0, or by batch['segment_ids'] > 0 where rows are packed"
            )


def _is_sum(both: float, first: float, second: float) -> bool:
    return abs(both - first - second) <= TOLERANCE * (abs(first) + abs(second))


def _is_nothing(nothing: float, first: float, second: float) -> bool:
    return abs(nothing) <= TOLERANCE * (abs(first) + abs(second)) / 100


def _made_up(shapes: Any) -> Any:
    return jax.tree.map(_waves, shapes)


def _waves(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers of moderate size without a pattern that matters, made where they are needed."""
    flat = jnp.sin(jnp.arange(np.prod(shape.shape), dtype=jnp.float32) * 1.7 + 0.3)
    return (0.3 * flat).reshape(shape.shape).astype(shape.dtype)
