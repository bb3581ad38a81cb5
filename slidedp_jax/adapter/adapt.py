"""`slidedp_jax.adapt`: a user's own model, unchanged, as stages that the runtime streams.

The user says where the layers are and gives three small functions over the model's own parts.
Which other parameters belong to the embedding and which to the head is read off those functions,
and so is whether the two are tied. Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from slidedp_jax.adapter.check import Agreement, compare
from slidedp_jax.adapter.claims import claim, example_batch
from slidedp_jax.adapter.loss_check import check_sum_over_rows
from slidedp_jax.adapter.made_up import as_functions_see_it, moved_weights, random_rows
from slidedp_jax.adapter.nnx_source import from_nnx
from slidedp_jax.adapter.paths import Layers, looks_stacked
from slidedp_jax.adapter.source import Rows, Source
from slidedp_jax.adapter.stages import streamed_model
from slidedp_jax.adapter.tree_source import from_tree
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import StreamedModel

RESERVED = {
    *("input_ids", "labels", "targets", "positions", "segment_ids", "key"),
    *("document_starts", "document_lengths", "row_seeds", "layer_index", "row_ids"),
}
"""Names that arrays of a batch already have."""

CHECKED_ROWS = 3

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class Adapted:
    """A user's model, ready for `slidedp_jax.Trainer`.

    Attributes:
      model: what the trainer takes. Without `parameters=` it starts from the user's own values.
      source: the user's model and functions.
      unused: names of parameters that no stage has.
      tokens_per_row: T of made-up rows.
      packed: batches have `segment_ids`.
    """

    model: StreamedModel
    source: Source
    unused: frozenset[str]
    tokens_per_row: int
    packed: bool

    def __repr__(self) -> str:
        """One line on what is trained, one on what no stage has."""
        left_out = f"\nin no stage: {', '.join(sorted(self.unused))}" if self.unused else ""
        return f"Adapted({self.model!r}){left_out}"

    def write_back(self, parameters: Mapping[str, np.ndarray]) -> Any:
        """The user's model with trained values, each in its own dtype and on its own devices.

        Args:
          parameters: `trainer.parameters()`.

        Returns:
          An NNX module, changed in place; of a pytree, a new one.

        Raises:
          UserError: these are not the parameters of this model.
        """
        _check_parameters(parameters, self.source.shapes.keys() - self.unused)
        return self.source.write_back(parameters)

    def check(
        self,
        whole_loss: Callable[..., jax.Array],
        *,
        batch: Mapping[str, Any] | None = None,
        rtol: float | None = None,
        seed: int = 0,
    ) -> Agreement:
        """Hold the stages against the model's own forward pass: loss and gradients on one batch.

        Both run in float32 on the default device, without dropout, at the model's values (each
        moved a little, since zeros and ones hide what is left out; noise where the model holds
        shapes). That takes the memory of two float32 copies of the model and of one batch: check
        a small configuration of a model that is too large for it.

        Args:
          whole_loss: (model, batch) -> float scalar, the *mean* loss of the supervised tokens by
            the model's own forward pass, losses of layers included. `batch` is as for the other
            functions, with `labels` as the trainer is given them.
          batch: arrays as `Trainer.step` takes them; None: a few random rows.
          rtol: relative tolerance of the loss; gradients may differ by ten times as much. None:
            1e-4, or 1e-2 of a model that computes in bfloat16 or float16 by itself.
          seed: of the random rows and of how weights are moved.

        Raises:
          UserError: they differ. The message names the stage where values part, if it can be told,
            or the parameters whose gradients differ.
        """
        model = self.model
        if batch is None:
            batch = random_rows(
                CHECKED_ROWS,
                self.tokens_per_row,
                vocab_size=model.vocab_size,
                packed=self.packed,
                token_arrays=model.token_arrays,
                seed=seed,
            )
        whole = self.source.whole(whole_loss)
        return compare(
            model,
            lambda values, batch: whole(values, Rows(batch)),
            {name: moved_weights(self.source, name, seed) for name in self.source.shapes},
            as_functions_see_it(batch, model.token_arrays, shifted=model.shift_labels),
            rtol=rtol,
        )


def adapt(
    model: Any,
    *,
    layers: Layers,
    embed: Callable[..., Any],
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    head_loss: Callable[..., jax.Array],
    vocab_size: int,
    whole_loss: Callable[..., jax.Array] | None = None,
    loss_of_sums: Callable[..., Any] | None = None,
    unused: Sequence[str] = (),
    dropout: bool = False,
    packed: bool = False,
    shift_labels: bool = True,
    token_arrays: Mapping[str, str | jax.ShapeDtypeStruct] | None = None,
    configuration: Mapping[str, Any] | None = None,
    tokens_per_row: int = 16,
    check_loss: bool = True,
) -> Adapted:
    """A user's own model as stages of parameters and functions.

    The functions get the user's own objects: for a Flax NNX module the module (`layer`: one layer
    of it) around the parameters at hand, for a pytree of parameters, such as Flax Linen's
    `variables["params"]`, that pytree (`layer`: one layer's part of it). In `embed` and `head_loss`
    only the parameters that they read have values. `batch` holds the arrays of
    `models.streamed.Batch`: `input_ids`, `targets` and `positions`, all int32 [B, T], and
    `segment_ids` where the rows are packed; for `layer` also `layer_index`, an int32 scalar that
    counts from 0. The functions run per device, in the dtype of the parameters unless the model
    casts them, and may change no state.

    Args:
      model: a Flax NNX module, or a pytree of arrays; only their shapes matter if the trainer is
        given the starting weights.
      layers: path of the list of layers in the model (`"layers"`, `"decoder.blocks"`);
        `slidedp_jax.Stacked("layers")` where each array there holds all layers (nn.scan, nnx.vmap);
        or a list of paths of layers and of stacks, bottom first.
      embed: (model, batch) -> hidden states [B, T, D], or a dict of arrays [B, T, ...] where layers
        hand more than that to the layers above; these travel in one dtype.
      layer: (layer, x, batch) -> x, or one such function per layer. Layers that are equal but for
        the values of their parameters are compiled once; a layer's number kept as an attribute
        makes it another layer. A layer with a loss of its own returns (x, aux): aux is a float32
        scalar, the *sum* over the rows at hand with its coefficient, and is minimised beside the
        head's (`models.streamed.LayerOutput`). One that gives sums for `loss_of_sums` returns
        (x, aux or None, sums): a dict of float32 arrays, each a *sum* over the rows at hand.
      head_loss: (model, x, batch) -> float scalar: the *sum* of the losses of the supervised tokens
        (`batch["targets"]` is the token to predict, -100 where nothing counts).
      vocab_size: number of token ids that the embedding accepts, V.
      whole_loss: (model, batch) -> float scalar, the *mean* loss of the supervised tokens by the
        model's own forward pass, with which the stages are compared at once (`Adapted.check`).
      loss_of_sums: (list of the sums of each layer that gives some, added up over the whole step)
        -> float32 scalar, which is added to the *mean* loss of the supervised tokens: for what is
        no sum over tokens, such as the balance of experts. Or that and a dict of float32 scalars
        that `StepMetrics.figures` will have.
      unused: shell-style patterns of parameters that the model's own forward pass does not read;
        they are not trained, and `write_back` leaves them as they are.
      dropout: the model draws random numbers in training. It does so row by row, from keys that
        depend on seed, step, row and layer (`slidedp_jax.adapter.randomness`): an NNX module finds
        them in its own `nnx.Rngs`, and all functions in `batch["key"]`, from which they can make
        what a call is handed (`nnx.Rngs(dropout=batch["key"])`). Evaluation draws nothing: modules
        run as `eval()` sets them, and there is no `batch["key"]`.
      packed: every batch has `segment_ids`.
      shift_labels: position t predicts label t + 1. False: the label at t is what t predicts, for a
        model that shifts its inputs itself, masked tokens, or targets of your own.
      token_arrays: name -> dtype of further arrays [rows, tokens] that every batch will have, such
        as `{"loss_weights": "float32"}`, or `jax.ShapeDtypeStruct((K,), "float32")` for
        [rows, tokens, K]. The functions find them in `batch` as they were given (not shifted, 0 in
        rows that fill up).
      configuration: what the model was built from, JSON-able, such as
        `dataclasses.asdict(config)`. Checkpoints record it, and one of another configuration is
        refused by the names of its fields; without it they know names and shapes of parameters
        alone.
      tokens_per_row: T of the row on which the functions are traced here, for models that do not
        take any.
      check_loss: compute `head_loss`, and `layer` where it has a loss, once on made-up numbers, to
        see that they are sums over rows.

    Raises:
      UserError: the model does not fit, with what was found and what to change.
    """
    parts: dict[str, Any] = {
        "layers": layers,
        "embed": embed,
        "layer": layer,
        "head_loss": head_loss,
    }
    _check_signatures(embed=embed, layer=layer, head_loss=head_loss, whole_loss=whole_loss)
    if isinstance(model, nnx.Module):
        source = from_nnx(model, **parts, dropout=dropout)
    else:
        source = from_tree(model, **parts)
    _warn_of_one_stack(source)
    left_out = _matching(unused, source)
    _check_dtypes(source)
    arrays = _token_arrays(token_arrays or {})
    batch = example_batch(1, tokens_per_row, packed=packed, token_arrays=arrays)
    claims = claim(source, batch, dropout=dropout, unused=left_out)
    _warn_of_vocab_size(claims.embed, vocab_size)
    if dropout and not any(claims.draws):
        _LOG.warning(
            "dropout=True, but neither embed, layer nor head_loss draws random numbers: pass the "
            "model rngs made of batch['key'], or give it modules in training mode with rates "
            "above 0"
        )
    _check_sums(claims.gives_sums, loss_of_sums)
    streamed = replace(
        streamed_model(source, claims, vocab_size=vocab_size, unused=left_out),
        random=dropout,
        loss_of_sums=None if loss_of_sums is None else partial(_loss_and_figures, loss_of_sums),
        shift_labels=shift_labels,
        token_arrays=arrays,
        configuration=_as_json(configuration or {}),
    )
    if check_loss:
        check_sum_over_rows(streamed, claims.hidden.joined, vocab_size, packed=packed)
    adapted = Adapted(
        model=streamed,
        source=source,
        unused=left_out,
        tokens_per_row=tokens_per_row,
        packed=packed,
    )
    if whole_loss is not None:
        adapted.check(whole_loss)
    return adapted


def _check_sums(gives_sums: bool, loss_of_sums: Callable[..., Any] | None) -> None:
    if gives_sums and loss_of_sums is None:
        raise UserError(
            "a layer returns (x, aux, sums), but nobody says what its sums are for: give "
            "loss_of_sums, or return (x, aux)"
        )
    if loss_of_sums is not None and not gives_sums:
        raise UserError(
            "loss_of_sums is given, but no layer returns (x, aux, sums) with a dict of sums"
        )


def _loss_and_figures(
    loss_of_sums: Callable[..., Any], sums: tuple[Any, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the user's function gives, with no figures where it gives the loss alone."""
    result = loss_of_sums(list(sums))
    loss, figures = result if isinstance(result, tuple) else (result, {})
    if getattr(loss, "shape", None) != () or loss.dtype != jnp.float32:
        raise UserError(f"loss_of_sums returned {loss}; it must return one float32 number")
    return loss, dict(figures)


def _warn_of_one_stack(source: Source) -> None:
    if len(source.layers) == 1 and looks_stacked(source.layers[0][1]):
        path, tree = source.layers[0]
        _LOG.warning(
            "the one layer at %s is made of arrays whose first dimensions are all %d: if these are "
            "%d layers, pass layers=slidedp_jax.Stacked(%r); as one they are all on the device at "
            "once",
            path,
            jax.tree.leaves(tree)[0].shape[0],
            jax.tree.leaves(tree)[0].shape[0],
            path,
        )


def _warn_of_vocab_size(embed: Mapping[str, Any], vocab_size: int) -> None:
    """JAX gives NaN, and no error, for ids beyond a table."""
    sizes = {size for leaf in embed.values() for size in leaf.shape}
    if sizes and max(sizes) < vocab_size:
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in embed.items())
        _LOG.warning(
            "vocab_size is %d, but no parameter of embed has so many entries (%s): JAX gives nan "
            "for ids beyond a table",
            vocab_size,
            shapes,
        )


_ARGUMENTS = {
    "embed": ("model", "batch"),
    "layer": ("layer", "x", "batch"),
    "head_loss": ("model", "x", "batch"),
    "whole_loss": ("model", "batch"),
}


def _check_signatures(**functions: Any) -> None:
    """Whether the user's functions take what they will be called with.

    Raises:
      UserError: one does not.
    """
    for name, given in functions.items():
        for fn in given if isinstance(given, Sequence) else [given]:
            if fn is None:
                continue
            try:
                signature = inspect.signature(fn)
            except (TypeError, ValueError):  # some have none
                continue
            try:
                signature.bind(*_ARGUMENTS[name])
            except TypeError:
                wanted = ", ".join(_ARGUMENTS[name])
                raise UserError(
                    f"{name} takes {signature}; it is called as {name}({wanted})"
                ) from None


def _matching(patterns: Sequence[str], source: Source) -> frozenset[str]:
    """Parameters that fit a pattern of `unused`."""
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in source.shapes if fnmatch.fnmatchcase(name, pattern)}
        if not names:
            raise UserError(
                f"unused={pattern!r} fits no parameter; names are like {next(iter(source.shapes))}"
            )
        found |= names
    return frozenset(found)


def _as_json(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint will say of it."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(configuration)))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"configuration= cannot be written as JSON ({error}); give its fields as numbers, "
            "strings, lists and dicts: str() of a dtype or an enum will do"
        ) from None
    return found


def _token_arrays(
    given: Mapping[str, str | jax.ShapeDtypeStruct],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Dtype and shape per token of each array."""
    taken = sorted(given.keys() & RESERVED)
    if taken:
        raise UserError(
            f"token_arrays names {taken}, which every batch has its own use for; rename"
        )
    return {
        name: spec
        if isinstance(spec, jax.ShapeDtypeStruct)
        else jax.ShapeDtypeStruct((), jnp.dtype(spec))
        for name, spec in given.items()
    }


def _check_parameters(parameters: Mapping[str, np.ndarray], names: Set[str]) -> None:
    missing, unknown = names - parameters.keys(), parameters.keys() - names
    if missing or unknown:
        raise UserError(
            f"write_back got {len(parameters)} parameters for a model of {len(names)}: "
            f"{len(missing)} are missing (such as {min(missing, default='none')}), {len(unknown)} "
            f"unknown (such as {min(unknown, default='none')}); pass trainer.parameters() of this "
            "very model"
        )


def _check_dtypes(source: Source) -> None:
    for name, leaf in source.shapes.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"parameter {name} is {leaf.dtype}; parameters are trained and must be floats. "
                "Keep numbers that are not trained out of the parameters (in NNX any variable that "
                "is no nnx.Param, in a pytree a constant of the functions)"
            )
