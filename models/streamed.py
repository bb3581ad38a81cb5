"""What the runtime needs to know of a model: stages of parameters and pure functions over them.

A decoder is an embedding stage, a list of layer stages and a head stage. The runtime packs,
streams and updates the parameters of each stage; it calls the functions below inside its own
traces, per device, on that device's rows. Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from slidedp_jax.models.token_loss import PLAIN, TokenLoss
from slidedp_jax.wording import short_count

Params = Any
"""Pytree of arrays of one stage, in the compute dtype inside the runtime's traces."""

Batch = Mapping[str, jax.Array]
"""Arrays of the rows at hand, each with leading dimension B:

- `input_ids` int32 [B, T];
- `targets` int32 [B, T]: the token that position t must predict, or -100 where nothing is
  supervised (already shifted: the model does not shift);
- `positions` int32 [B, T]: RoPE positions, restarting with each packed document;
- `segment_ids` int32 [B, T]: 0 is padding, documents of a row are 1, 2, ...; attention stays inside
  a segment. Absent when every row is one document without padding on its left;
- `document_starts` int32 [B, M + 1] and `document_lengths` int32 [B, M]: the same segments as
  offsets within the row, beside `segment_ids` only (what cuDNN's packed kernel wants);
- `row_seeds` uint32 [B, 3]: seed of the run, number of the step (the first is 1) and place of the
  row among the step's rows. Only for a model that asks for them (`StreamedModel.random`), and only
  while it is trained: whatever is drawn from them and from the stage's index is the same for any
  number of devices and microbatches, and when a layer is computed again;
- whatever `StreamedModel.token_arrays` names, [B, T, ...], as the user's batch has it (0 in rows
  that fill up);
- `layer_index` int32 [1]: the layer that runs, in layer functions only, beside `row_seeds` and for
  a model that asks for it (`StreamedModel.indexed`).
"""


Sums = Any
"""Pytree of float32 arrays that add up: over rows, microbatches and devices."""


class LayerOutput(NamedTuple):
    """What a layer gives that has more to give than hidden states.

    Attributes:
      x: hidden states [B, T, D].
      aux: float32 scalar, the layer's own loss: its *sum* over the rows at hand with its
        coefficient, to which rows that fill up add nothing. It joins the sum of the token losses,
        so the step minimises both per supervised token. None: it has none.
      sums: what a loss over all rows of the step is a function of (`StreamedModel.loss_of_sums`),
        summed over the rows at hand. None: nothing.
    """

    x: jax.Array
    aux: jax.Array | None = None
    sums: Sums | None = None


LayerFn = Callable[[Params, jax.Array, Batch], jax.Array | LayerOutput]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Parameters that travel together.

    Attributes:
      name: prefix of the stage's parameter names, `""` for none (`model.layers.3`).
      shapes: pytree of `jax.ShapeDtypeStruct`; the dtypes are ignored (masters are float32).
      item: what a checkpoint calls the stage; empty for `name`.
    """

    name: str
    shapes: Any
    item: str = ""

    def parameter_names(self) -> list[str]:
        """Full names: `name` and the tree path, joined by dots, in the order of the leaves."""
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(self.shapes)[0]]
        inner = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        return [".".join(part for part in (self.name, leaf) if part) for leaf in inner]


def _num_parameters(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


Cache = Any
"""Pytree of arrays that one layer keeps while rows grow, each with leading dimension B."""

EmbedFn = Callable[[Params, Batch], jax.Array]
"""(embed params, batch) -> x [B, T, D]."""

HeadLossFn = Callable[[Params, Params | None, jax.Array, Batch], jax.Array]
"""(head params, embed params or None, x, batch) -> float32 scalar, the *sum* of token losses."""

LossOfSums = Callable[[tuple[Sums, ...]], tuple[jax.Array, dict[str, jax.Array]]]
"""Sums over the whole step of each layer that gives some, bottom first -> loss and figures.

The loss is a float32 scalar with its coefficient, no sum over tokens: it is added to the mean loss
of the supervised tokens. Figures are float32 scalars by name, to be reported."""

CachedFn = Callable[[Params, jax.Array, Batch, Cache], tuple[jax.Array, Cache]]


@dataclass(frozen=True, kw_only=True)
class VocabularyForm:
    """A lookup in a table of [V, D] and a loss that is cross-entropy after a plain projection.

    Of such a model both can be taken in slices of the vocabulary (`models.sliced_loss`).

    Attributes:
      projection: full name of the projection [V, D]; of a tied model, the table of the embedding,
        which has no other parameter.
      hidden_fn: (head params, x [..., D]) -> what the projection is multiplied with, [..., D],
        token by token; where the head has a projection of its own, that is None in the params.
      token_loss: label smoothing and z-loss.
    """

    projection: str
    hidden_fn: Callable[[Params, jax.Array], jax.Array]
    token_loss: TokenLoss = PLAIN


@dataclass(frozen=True, kw_only=True)
class CachedForm:
    """A decoder's layers as generation runs them: what was computed of earlier tokens is kept.

    Rows begin at position 0 and are padded on their right. As in `StreamedModel.layer_fns`, layers
    of equal structure share one function object.

    Attributes:
      prefill_fns: per layer (params, x [B, T, D], batch, cache) -> (x, cache), over whole prompts.
        The batch has `positions`, `segment_ids` (1, padding 0), `document_starts` and
        `document_lengths`.
      decode_fns: per layer the same over one more token of each row, x [B, 1, D], batch with
        `positions` [B, 1].
      init_cache: (rows, capacity in tokens, dtype) -> empty cache of one layer.
      max_tokens: longest row, prompt and completion.
    """

    prefill_fns: tuple[CachedFn, ...]
    decode_fns: tuple[CachedFn, ...]
    init_cache: Callable[[int, int, Any], Cache]
    max_tokens: int


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamedModel:
    """A decoder as the runtime sees it.

    Attributes:
      embed: parameters of the token embedding.
      layers: parameters of each layer, bottom first.
      head: parameters of the final norm and, untied, the output projection.
      embed_fn: (embed params, batch) -> x [B, T, D].
      layer_fns: one function per layer, (layer params, x, batch) -> x or `LayerOutput`. Layers of
        equal structure must share one function object: it is the key under which a chunk is
        compiled. Backward calls them again; what must not be computed again has a name
        (`models.named_results`).
      head_loss_fn: the sum of the losses of the supervised tokens. Embed params are given when
        `tied` is true.
      layer_fns_for: (block_tokens) -> the same layers that compute what treats each token by itself
        so many tokens of a row at a time; None: they cannot.
      head_logits_fn: (head params, embed params or None, x) -> float32 logits [B, T, V].
      tied: the head also reads the embedding's parameters.
      vocab_size: number of token ids that the embedding accepts.
      initial_value: (full parameter name, shape, seed) -> float32 array, for training from scratch;
        depends on nothing else, so chunking and device count do not change it.
      embed_for: (compute dtype) -> `embed_fn` with the constants that it has in that dtype, given
        weights in float32, at which it is differentiated; None: it has no constants.
      head_loss_for: (loss_chunk_tokens) -> the same loss that holds the logits of so many tokens at
        once, which is what a strategy decides; None: the loss is as it is, and no strategy has a
        say in it.
      vocabulary: how embedding and head are taken in slices of the vocabulary, or None: the head's
        loss is an affair of its own.
      loss_of_sums: the loss that no layer, device or microbatch can know alone, of the `sums` that
        layers give. Backward gets its derivatives by them as constants, so it is exact. None: there
        is none.
      cached: the layers in a form that keeps keys and values, or None: no text can be generated.
      random: the functions read `row_seeds`; without them they draw nothing (evaluation).
      indexed: a layer function reads `layer_index`.
      shift_labels: position t predicts label t + 1; otherwise labels are targets as they are.
      token_arrays: name -> dtype and shape of what further arrays that every batch must have hold
        for each token: shape () is [R, T], (K,) is [R, T, K].
      configuration: what the functions were built from, JSON-able; a checkpoint of another
        configuration is refused by the names of its fields.
    """

    embed: Stage
    layers: tuple[Stage, ...]
    head: Stage
    embed_fn: EmbedFn
    layer_fns: tuple[LayerFn, ...]
    head_loss_fn: HeadLossFn
    head_logits_fn: Callable[[Params, Params | None, jax.Array], jax.Array]
    tied: bool
    vocab_size: int
    initial_value: Callable[[str, tuple[int, ...], int], np.ndarray]
    embed_for: Callable[[Any], EmbedFn] | None = None
    head_loss_for: Callable[[int], HeadLossFn] | None = None
    layer_fns_for: Callable[[int], tuple[LayerFn, ...]] | None = None
    vocabulary: VocabularyForm | None = None
    loss_of_sums: LossOfSums | None = None
    cached: CachedForm | None = None
    random: bool = False
    indexed: bool = False
    shift_labels: bool = True
    token_arrays: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: the stages with their sizes."""
        sizes = [_num_parameters(stage.shapes) for stage in self.stages()]
        kinds = len(set(self.layer_fns))
        layers = (
            f"{len(self.layers)} layers" if kinds == 1 else f"{len(self.layers)} of {kinds} kinds"
        )
        return (
            f"<StreamedModel: {short_count(sum(sizes))} parameters; embedding "
            f"{short_count(sizes[0])}{' (tied)' if self.tied else ''}, {layers} of up to "
            f"{short_count(max(sizes[1:-1]))} ({self.layers[0].name or 'unnamed'} ...), head "
            f"{short_count(sizes[-1])}; vocabulary {self.vocab_size:,}>"
        )

    def head_loss(self, loss_chunk_tokens: int) -> HeadLossFn:
        """The loss under a strategy that says `loss_chunk_tokens`."""
        if self.head_loss_for is None:
            return self.head_loss_fn
        return self.head_loss_for(loss_chunk_tokens)

    def stages(self) -> tuple[Stage, ...]:
        """All stages in forward order."""
        return (self.embed, *self.layers, self.head)
