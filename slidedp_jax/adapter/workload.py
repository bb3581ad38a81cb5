"""An adapted model as the planner sees it: parameters from shapes, work and memory measured.

Operations are counted in the traced programs at two row lengths, which tells what grows with the
tokens (products with weights) from what grows with their square (attention). Memory and traffic
come from XLA's own account of the compiled layer for one and for two rows: what the second row adds
is what rows cost. Letters: T tokens of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.adapter.claims import example_batch
from slidedp_jax.adapter.matmul_flops import matmul_flops, widest_product
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import bytes_accessed, temporary_bytes
from slidedp_jax.models.frozen_names import frozen_names
from slidedp_jax.models.named_results import DECIDED, named_bytes
from slidedp_jax.models.streamed import LayerFn, LayerOutput, Stage, StreamedModel
from slidedp_jax.planner.workload import StageWork, Workload, parameter_groups

LOGITS_BYTES = 4
MANY_ROWS = 64
"""Rows whose logits no loss is taken to hold at once unless it holds those of any number."""


def measured_workload(
    model: StreamedModel,
    *,
    tokens_per_row: int,
    compute_dtype: str = "bfloat16",
    packed: bool = False,
    frozen: Sequence[str] = (),
    name: str = "adapted model",
) -> Workload:
    """What a step of `model` costs on this process's first device, per stage and token.

    Compiles forward and backward of each distinct layer, and the head, for two small batches of
    rows as long as those of the run: for a model whose attention keeps all scores, memory per token
    grows with the row.

    Args:
      model: an adapted model (`slidedp_jax.adapt(...).model`).
      tokens_per_row: T of the run.
      compute_dtype: dtype of the parameters that the functions are given.
      packed: the batches have `segment_ids`.
      frozen: patterns of full names that stay as they are, as the trainer will be given. Products
        with frozen weights are taken to be their share of a layer's matrices.
      name: for reports.

    Returns:
      Workload. Attention is counted as executed, so an MFU that is made of it counts masked pairs
      that the model computes nevertheless.
      Memory holds for rows of this length, packed or not: plan without `documents_per_row`.

    Raises:
      UserError: a pattern of `frozen` fits nothing, or all.
    """
    stages = (model.embed, *model.layers, model.head)
    try:
        kept = frozen_names([name for one in stages for name in one.parameter_names()], frozen)
    except ValueError as error:
        raise UserError(str(error)) from None
    probe = _Probe(model, tokens_per_row, jnp.dtype(compute_dtype), packed)
    layers: dict[Any, StageWork] = {}
    for stage, fn in zip(model.layers, model.layer_fns, strict=True):
        if fn not in layers:
            layers[fn] = probe.layer(stage, fn)
    head, own_loss_tokens = probe.head()
    embed = StageWork(
        name="embed",
        group_parameters=_groups(model.embed),
        elementwise_elements=2 * probe.hidden_size,
    )
    return Workload(
        name=name,
        embed=_with_frozen(embed, model.embed, kept),
        layers=tuple(
            _with_frozen(layers[fn], stage, kept)
            for stage, fn in zip(model.layers, model.layer_fns, strict=True)
        ),
        head=_with_frozen(head, model.head, kept),
        tied=model.tied,
        hidden_size=probe.boundary_width(),
        vocab_size=model.vocab_size,
        own_loss_tokens=own_loss_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class _Growth:
    """What one more row adds, in elements of the compute dtype per token."""

    workspace: int
    traffic: int


class _Probe:
    """Traces and compiles one model's functions on batches of chosen shapes."""

    def __init__(self, model: StreamedModel, tokens: int, dtype: jnp.dtype, packed: bool):
        self._model = model
        self._tokens = tokens
        self._dtype = dtype
        self._packed = packed
        self.hidden_size = self._hidden(1, tokens).shape[-1]

    def boundary_width(self) -> int:
        """What passes between stages, at its widest, in elements of the compute dtype."""
        x, batch = self._hidden(1, self._tokens), self._of_layer(1, self._tokens)
        widest = x.dtype.itemsize
        of_each = zip(self._model.layer_fns, self._model.layers, strict=True)
        for fn, stage in dict(reversed(list(of_each))).items():  # each function once
            output = jax.eval_shape(fn, self._params(stage), x, batch)
            x = output.x if isinstance(output, LayerOutput) else output
            widest = max(widest, x.dtype.itemsize)
        return int(-(-self.hidden_size * widest // self._dtype.itemsize))

    def layer(self, stage: Stage, fn: LayerFn) -> StageWork:
        """Work of one layer."""
        params = self._params(stage)

        def forward(rows: int, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return fn, (params, self._hidden(rows, tokens), self._of_layer(rows, tokens))

        def backward(rows: int, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            x, batch = self._hidden(rows, tokens), self._of_layer(rows, tokens)

            def run(params: Any, x: jax.Array, dy: jax.Array, batch: Any) -> Any:
                return jax.vjp(lambda p, h: fn(p, h, batch), params, x)[1](dy)

            return run, (params, x, jax.eval_shape(fn, params, x, batch), batch)

        linear, quadratic = self._flops(forward)
        ahead, back = self._growth(forward), self._growth(backward)
        residuals = min(self._residuals(fn, params), back.workspace)
        return StageWork(
            name="layers",
            group_parameters=_groups(stage),
            matmul_parameters=round(linear / 2),
            # The planner counts T^2 / 2 pairs of 4 operations per head and dim.
            attention_heads=1 if quadratic else 0,
            attention_head_dim=round(quadratic / 2),
            residual_elements=residuals,
            decided_elements=self._decided(forward),
            forward_workspace_elements=ahead.workspace,
            backward_workspace_elements=back.workspace - residuals,
            elementwise_elements=ahead.traffic,
        )

    def head(self) -> tuple[StageWork, float | None]:
        """Work of the head, and `Workload.own_loss_tokens`."""
        model = self._model
        params = self._params(model.head)
        embed = self._params(model.embed) if model.tied else None

        def forward(rows: int, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            arguments = (params, embed, self._hidden(rows, tokens), self._batch(rows, tokens))
            return model.head_loss_fn, arguments

        def backward(rows: int, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            _, arguments = forward(rows, tokens)

            def run(head: Any, embed: Any, x: jax.Array, batch: Any) -> Any:
                return jax.grad(lambda h, e, y: model.head_loss_fn(h, e, y, batch), (0, 1, 2))(
                    head, embed, x
                )

            return run, arguments

        linear, _ = self._flops(forward)
        work = StageWork(
            name="head",
            group_parameters=_groups(model.head),
            matmul_parameters=round(linear / 2),
            elementwise_elements=4 * self.hidden_size,
        )
        if model.head_loss_for is not None:
            return work, None
        fn, arguments = forward(MANY_ROWS, self._tokens)
        at_once = widest_product(jax.make_jaxpr(fn)(*arguments), model.vocab_size)
        # From so many rows on, memory grows only if the logits are kept for the gradient after all.
        rows = -(-at_once // self._tokens) if at_once < MANY_ROWS * self._tokens else 1
        logits = model.vocab_size * LOGITS_BYTES / self._dtype.itemsize
        grows = self._growth(backward, max(1, rows)).workspace > logits / 2
        return work, math.inf if grows else max(1, at_once)

    def _flops(self, make: Callable[..., Any]) -> tuple[float, float]:
        """Operations a and b of a T + b T^2 for one row of T tokens."""
        t = self._tokens
        one, two = (
            matmul_flops(jax.make_jaxpr(fn)(*arguments))
            for fn, arguments in (make(1, t), make(1, 2 * t))
        )
        quadratic = max(0.0, (two - 2 * one) / (2 * t**2))
        return one / t - quadratic * t, quadratic

    def _growth(self, make: Callable[..., Any], rows: int = 1) -> _Growth:
        """What further rows add to `rows`."""
        temporaries, traffic = [], []
        for number in (rows, 2 * rows):
            fn, arguments = make(number, self._tokens)
            compiled = jax.jit(fn).lower(*arguments).compile()
            temporaries.append(temporary_bytes(compiled))
            traffic.append(bytes_accessed(compiled))

        def per_token(figures: Sequence[float]) -> int:
            added = max(0.0, figures[1] - figures[0])
            return math.ceil(added / (rows * self._tokens * self._dtype.itemsize))

        return _Growth(workspace=per_token(temporaries), traffic=per_token(traffic))

    def _residuals(self, fn: LayerFn, params: Any) -> int:
        """What JAX keeps between forward and backward, before XLA fuses any of it away."""

        def kept(rows: int) -> float:
            x, batch = self._hidden(rows, self._tokens), self._of_layer(rows, self._tokens)
            pullback = jax.eval_shape(
                lambda p, h, b: jax.vjp(lambda p, h: fn(p, h, b), p, h)[1], params, x, batch
            )
            leaves = jax.tree.leaves(pullback)
            return float(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))

        return math.ceil((kept(2) - kept(1)) / (self._tokens * self._dtype.itemsize))

    def _decided(self, make: Callable[..., Any]) -> int:
        """What backward must be given instead of computing it again."""

        def named(rows: int) -> int:
            fn, arguments = make(rows, self._tokens)
            return named_bytes(jax.make_jaxpr(fn)(*arguments), DECIDED)

        return math.ceil((named(2) - named(1)) / (self._tokens * self._dtype.itemsize))

    def _params(self, stage: Stage) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self._dtype), stage.shapes
        )

    def _batch(self, rows: int, tokens: int) -> dict[str, Any]:
        names = self._model.token_arrays
        return dict(example_batch(rows, tokens, packed=self._packed, token_arrays=names))

    def _of_layer(self, rows: int, tokens: int) -> dict[str, Any]:
        index = jax.ShapeDtypeStruct((1,), jnp.int32)
        return {**self._batch(rows, tokens), "layer_index": index}

    def _hidden(self, rows: int, tokens: int) -> Any:
        embed = self._params(self._model.embed)
        return jax.eval_shape(self._model.embed_fn, embed, self._batch(rows, tokens))


def _groups(stage: Stage, frozen: Collection[str] = ()) -> tuple[int, ...]:
    """Of the parameters that are not frozen."""
    leaves = jax.tree.leaves(stage.shapes)
    names = stage.parameter_names()
    return parameter_groups(
        {
            name: tuple(leaf.shape)
            for name, leaf in zip(names, leaves, strict=True)
            if name not in frozen
        }
    )


def _with_frozen(work: StageWork, stage: Stage, frozen: Collection[str]) -> StageWork:
    """The same work with some parameters left as they are; products by the share of matrices."""
    names = stage.parameter_names()
    if not set(names) & set(frozen):
        return work
    leaves = jax.tree.leaves(stage.shapes)
    sizes = {n: leaf.size for n, leaf in zip(names, leaves, strict=True) if len(leaf.shape) > 1}
    kept = sum(size for name, size in sizes.items() if name in frozen)
    share = kept / sum(sizes.values()) if sizes else 0.0
    groups = _groups(stage, frozen)
    return replace(
        work,
        group_parameters=groups,
        frozen_parameters=work.num_parameters - sum(groups),
        frozen_matmul_parameters=round(share * work.matmul_parameters),
    )
