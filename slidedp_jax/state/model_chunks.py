"""Which parameters of a model are trained, and how its stages are cut into chunks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import LayerFn, StreamedModel
from slidedp_jax.planner.chunking import LARGEST_PIECE
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.freezing import frozen_names
from slidedp_jax.state.layout import FROZEN, ChunkLayout, lay_out


def trained_shapes(model: StreamedModel, frozen: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of every parameter that no pattern of `frozen` fits.

    Raises:
      UserError: a pattern fits no parameter, or all are frozen.
    """
    shapes = {
        name: tuple(leaf.shape)
        for stage in model.stages()
        for name, leaf in zip(stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True)
    }
    trained = shapes.keys() - frozen_names(shapes, frozen)
    return {name: shape for name, shape in shapes.items() if name in trained}


def chunks_of(
    model: StreamedModel,
    strategy: Strategy,
    *,
    groups: Mapping[str, int],
    kinds: Mapping[str, int],
    whole: Collection[str] = (),
) -> tuple[list[ChunkLayout], list[tuple[Any, ...]]]:
    """Layouts of embedding, layer chunks and head, and the layer functions of each layer chunk.

    Args:
      model: its stages.
      strategy: how they are cut.
      groups: parameter name -> group within its kind of update.
      kinds: parameter name -> kind of update; parameters that are not in it are frozen.
      whole: parameters that are updated as a whole, on the host.

    Raises:
      UserError: nothing is trained, or a chunk cannot be updated where the strategy wants it.
    """
    projection = None
    if strategy.vocab_slices > 1:
        projection = _check_slices(model, strategy)

    def layout(name: str, stages: Sequence[Any]) -> ChunkLayout:
        names = [parameter for stage in stages for parameter in stage.parameter_names()]
        return lay_out(
            name,
            stages,
            groups,
            block_size=strategy.block_size,
            num_pieces=strategy.num_host_devices * strategy.num_hosts,
            by_rows=projection if projection in names else None,
            kinds={parameter: kinds.get(parameter, FROZEN) for parameter in names},
        )

    fns = _layer_fns(model, strategy)
    layouts = [layout("embed", [model.embed])]
    layer_fns = []
    for first in range(0, len(model.layers), strategy.layers_per_chunk):
        last = min(first + strategy.layers_per_chunk, len(model.layers))
        layouts.append(layout(f"layers.{first}-{last - 1}", model.layers[first:last]))
        layer_fns.append(tuple(fns[first:last]))
    layouts.append(layout("head", [model.head]))
    if not any(part.trained_parts for part in layouts):
        raise UserError("the optimizer changes no parameter (set_to_zero for all); train some")
    resident = strategy.resident_chunks
    _check_resident(layouts[:resident], whole)
    _check_pieces(layouts[resident:])
    _check_no_slices(layouts[:resident], projection)
    layouts[:resident] = [replace(chunk, resident=True) for chunk in layouts[:resident]]
    return layouts, layer_fns


def _layer_fns(model: StreamedModel, strategy: Strategy) -> tuple[LayerFn, ...]:
    if not strategy.layer_block_tokens:
        return model.layer_fns
    if model.layer_fns_for is None:
        raise UserError(
            f"the strategy runs layers in blocks of {strategy.layer_block_tokens} tokens, which "
            "those of this model cannot; plan with layer_block_tokens=0"
        )
    return model.layer_fns_for(strategy.layer_block_tokens)


def _check_slices(model: StreamedModel, strategy: Strategy) -> str:
    """The projection's name, if the model can be taken in slices."""
    if model.vocabulary is None:
        raise UserError(
            f"the strategy takes the head in {strategy.vocab_slices} slices of the vocabulary, but "
            "this model's loss is an affair of its own; plan with vocab_slices=1"
        )
    return model.vocabulary.projection


def _check_no_slices(resident: Sequence[ChunkLayout], projection: str | None) -> None:
    for layout in resident:
        if projection in [slot.name for slot in layout.slots]:
            raise UserError(
                f"the strategy keeps the state of {len(resident)} chunks on the devices, among "
                f"them that of {projection}, which it takes in slices of the vocabulary: those are "
                "sent to the host. Plan with fewer resident_chunks, or vocab_slices=1"
            )


def _check_pieces(layouts: Sequence[ChunkLayout]) -> None:
    """The update's program counts the elements of a piece in int32."""
    for layout in layouts:
        for part in layout.trained_parts:
            if part.piece_size > LARGEST_PIECE:
                raise UserError(
                    f"{layout.name} has {part.padded_size:,} parameters on {part.num_pieces} host "
                    f"devices, each of which can update at most {LARGEST_PIECE:,}; use fewer "
                    "layers_per_chunk, or more num_host_devices"
                )


def _check_resident(layouts: Sequence[ChunkLayout], whole: Collection[str]) -> None:
    if found := [slot.name for layout in layouts for slot in layout.slots if slot.name in whole]:
        raise UserError(
            f"the strategy keeps the state of {len(layouts)} chunks on the devices, but "
            f"{len(found)} of their parameters (such as {found[0]}) are updated as a whole on the "
            "host, because the optimizer is not element-wise; plan with resident_state=False, for "
            "resident_chunks=0"
        )
