"""The stages held against the user's own whole model: loss, gradients, and where values part.

Both sides are computed in float32 at the same weights on the same rows. A gradient is compared by
two numbers for each parameter, its norm and its product with fixed pseudo-random signs, so that no
gradient need be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.adapter.place import WholePass, place
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import inner_programs, jaxpr_of
from slidedp_jax.models.batch_arrays import IGNORED
from slidedp_jax.models.streamed import LayerOutput, Stage, StreamedModel

TOLERANCE = 1e-4
"""Relative, of the loss; gradients may differ by ten times as much."""

LOW_PRECISION = 100
"""How many times the tolerance where the model computes in bfloat16 or float16 by itself."""

WholeLoss = Callable[[Mapping[str, Any], Mapping[str, Any]], jax.Array]
"""(all parameters by name, batch) -> mean loss of the supervised tokens."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Stages and whole model on one batch, in float32.

    Attributes:
      loss: mean of the supervised tokens' losses, by the stages.
      whole_loss: the same by the user's whole model.
      gradient_norm: global norm of the gradients, by the stages.
      whole_gradient_norm: the same by the user's whole model.
      largest_difference: of any parameter's gradient, relative to its norm.
    """

    loss: float
    whole_loss: float
    gradient_norm: float
    whole_gradient_norm: float
    largest_difference: float


def compare(
    model: StreamedModel,
    whole_loss: WholeLoss,
    values: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    *,
    rtol: float | None = None,
) -> Agreement:
    """Loss and gradients of the stages against those of the whole model.

    Args:
      model: the adapted model.
      whole_loss: the user's.
      values: of all parameters by name, float32, those that no stage has among them.
      batch: as the model's functions see it.
      rtol: relative tolerance of the loss; None: `TOLERANCE`, more in low precision.

    Raises:
      UserError: they differ; the message says in which stage or parameters, if it can.
    """
    with jax.default_matmul_precision("highest"):
        return _Comparison(model, whole_loss, values, batch, rtol).result()


class _Comparison:
    def __init__(
        self,
        model: StreamedModel,
        whole_loss: WholeLoss,
        values: Mapping[str, np.ndarray],
        batch: Mapping[str, np.ndarray],
        rtol: float | None,
    ):
        self._model = model
        self._batch = {name: jnp.asarray(array) for name, array in batch.items()}
        self._for_stages = {n: array for n, array in self._batch.items() if n != "labels"}
        self._count = float((batch["targets"] != IGNORED).sum())
        self._whole_loss = whole_loss
        self._values = {name: jnp.asarray(array) for name, array in values.items()}
        program = jax.make_jaxpr(whole_loss)(self._values, self._batch)
        self._program = program
        _check_scalar(program)
        factor = LOW_PRECISION if _is_low_precision(program) else 1
        self._rtol = TOLERANCE * factor if rtol is None else rtol

    def result(self) -> Agreement:
        stages = _StagePass(self._model, self._values, self._for_stages, self._count)
        loss, marks = stages.run()
        whole, whole_marks = self._whole()
        if not np.isfinite(whole):
            raise UserError(
                f"the whole loss is {whole} (by the stages {loss}) at the model's weights, each a "
                "little moved, so nothing can be compared: give check() a batch that the model can "
                "compute, and the model weights that it can"
                f"{self._of_vocab_size()}"
            )
        missed = [n for n in whole_marks if n not in marks and whole_marks[n][0] > 0]
        if missed:
            raise UserError(
                f"the model's own forward pass reads {', '.join(missed[:5])}, which no stage has "
                "(unused= names it): its gradient is not zero"
            )
        if not _close(loss, whole, self._rtol):
            raise UserError(self._of_losses(loss, whole, stages))
        norm, whole_norm = _norm(marks), _norm({n: whole_marks[n] for n in marks})
        apart = {n: _distance(marks[n], whole_marks[n], whole_norm) for n in marks}
        wrong = [name for name, distance in apart.items() if not distance <= 10 * self._rtol]
        if wrong:
            raise UserError(self._of_gradients(wrong, marks, whole_marks, stages, whole))
        return Agreement(
            loss=loss,
            whole_loss=whole,
            gradient_norm=norm,
            whole_gradient_norm=whole_norm,
            largest_difference=max(apart.values()),
        )

    def _of_vocab_size(self) -> str:
        shapes = jax.tree.leaves(self._model.embed.shapes)
        if any(self._model.vocab_size <= size for leaf in shapes for size in leaf.shape):
            return ""
        return (
            f". vocab_size is {self._model.vocab_size}, more than any table of embed has entries: "
            "JAX gives nan for ids beyond one"
        )

    def _whole(self) -> tuple[float, dict[str, np.ndarray]]:
        @jax.jit
        def run(values: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(self._whole_loss)(values, batch)
            return loss, _marks(gradients)

        loss, marks = run(self._values, self._batch)
        return float(loss), jax.tree.map(np.asarray, marks)

    def _of_losses(self, loss: float, whole: float, stages: _StagePass) -> str:
        said = (
            f"the stages do not compute the loss of the whole model: {loss:.7g} by embed, layer "
            f"and head_loss, {whole:.7g} by the model's own forward pass"
        )
        if _close(loss * self._count, whole, self._rtol):
            return (
                f"{said}, which is the sum over the {self._count:.0f} supervised tokens; the whole "
                "loss must be their mean, as the trainer reports it"
            )
        return f"{said}. {self._place(stages, whole)}"

    def _of_gradients(
        self,
        wrong: list[str],
        marks: Mapping[str, np.ndarray],
        whole_marks: Mapping[str, np.ndarray],
        stages: _StagePass,
        whole: float,
    ) -> str:
        listed = ", ".join(
            f"{name} (norm {marks[name][0]:.4g}, whole model {whole_marks[name][0]:.4g})"
            for name in wrong[:5]
        )
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        return (
            f"the stages give the loss of the whole model but other gradients, of {listed}{more}. "
            f"{self._place(stages, whole)}. If values agree everywhere, one side stops a gradient "
            "that the other does not"
        )

    def _place(self, stages: _StagePass, whole: float) -> str:
        """Where values part, in words."""

        def stage(number: int, x: jax.Array) -> jax.Array | bool:
            if number <= len(self._model.layers):
                return stages.layer(number - 1, x)
            return _close(stages.loss_from(x), whole, self._rtol)

        own = [self._model.embed, *self._model.layers, self._model.head]
        or_sums = "" if self._model.loss_of_sums is None else " or loss_of_sums"
        return place(
            WholePass(self._program, self._values, self._batch, stages.hidden[0].size),
            stages.hidden,
            ["embed", *(layer.name for layer in self._model.layers), f"head_loss{or_sums}"],
            [one.parameter_names() for one in own],
            stage,
            self._rtol,
        )


class _StagePass:
    """Loss and gradients, one stage at a time."""

    def __init__(
        self,
        model: StreamedModel,
        values: Mapping[str, jax.Array],
        batch: Mapping[str, jax.Array],
        count: float,
    ):
        self._model = model
        self._values = values
        self._batch = batch
        self._scale = jnp.float32(1 / count)
        self.hidden: list[jax.Array] = []
        self._of_layers = self._of_step = 0.0
        self._derivatives: dict[int, Any] = {}

    def run(self) -> tuple[float, dict[str, np.ndarray]]:
        model = self._model
        embed = self._params(model.embed)
        x = jax.jit(model.embed_fn)(embed, self._batch)
        self.hidden, total, sums = [x], 0.0, {}
        for number, (stage, fn) in enumerate(zip(model.layers, model.layer_fns, strict=True)):
            output = jax.jit(fn)(self._params(stage), x, self._of_layer(number))
            x = output.x if isinstance(output, LayerOutput) else output
            total += _own_loss(output)
            if isinstance(output, LayerOutput) and output.sums is not None:
                sums[number] = output.sums
            self.hidden.append(x)
        self._of_layers, self._of_step = total, self._differentiate(sums)
        marks: dict[str, np.ndarray] = {}
        losses, dx, tied = self._head(embed, x, marks)
        for number in reversed(range(len(model.layers))):
            dx = self._layer(number, dx, marks)
        self._embed(embed, dx, tied, marks)
        return (total + losses) * float(self._scale) + self._of_step, marks

    def _differentiate(self, sums: dict[int, Any]) -> float:
        """The loss over the whole step, here one batch, and its derivatives for the layers."""
        if not sums or self._model.loss_of_sums is None:
            return 0.0
        of_step = jax.value_and_grad(self._model.loss_of_sums, has_aux=True)
        (loss, _), derivatives = jax.jit(of_step)(tuple(sums.values()))
        self._derivatives = dict(zip(sums, derivatives, strict=True))
        return float(loss)

    def layer(self, number: int, x: jax.Array) -> jax.Array:
        """What a layer gives of some hidden states."""
        stage, fn = self._model.layers[number], self._model.layer_fns[number]
        output = _forward(fn, self._params(stage), x, self._of_layer(number))
        result: jax.Array = output.x if isinstance(output, LayerOutput) else output
        return result

    def loss_from(self, x: jax.Array) -> float:
        """The mean loss, with other hidden states for the head."""
        embed = self._params(self._model.embed) if self._model.tied else None
        head = self._params(self._model.head)
        losses = _forward(self._model.head_loss_fn, head, embed, x, self._batch)
        return (self._of_layers + float(losses)) * float(self._scale) + self._of_step

    def _head(self, embed: Any, x: jax.Array, marks: dict[str, np.ndarray]) -> Any:
        tied = self._model.tied

        @jax.jit
        def run(head: Any, embed: Any, x: jax.Array, batch: Any, scale: jax.Array) -> Any:
            loss, pullback = jax.vjp(
                lambda h, e, x: self._model.head_loss_fn(h, e, x, batch), head, embed, x
            )
            gradients, of_embed, dx = pullback(scale)
            return loss, _marks(gradients), of_embed, dx

        head = self._params(self._model.head)
        loss, of_head, of_embed, dx = run(
            head, embed if tied else None, x, self._batch, self._scale
        )
        self._note(self._model.head, of_head, marks)
        return float(loss), dx, of_embed

    def _layer(self, number: int, dx: jax.Array, marks: dict[str, np.ndarray]) -> jax.Array:
        stage, fn = self._model.layers[number], self._model.layer_fns[number]
        arguments = (self._params(stage), self.hidden[number], self._of_layer(number))
        gradients, dx = _backward(fn, *arguments, dx, self._scale, self._derivatives.get(number))
        self._note(stage, gradients, marks)
        return dx

    def _embed(self, embed: Any, dx: jax.Array, tied: Any, marks: dict[str, np.ndarray]) -> None:
        @jax.jit
        def run(embed: Any, dx: jax.Array, tied: Any, batch: Any) -> Any:
            (gradients,) = jax.vjp(lambda e: self._model.embed_fn(e, batch), embed)[1](dx)
            if tied is not None:
                gradients = jax.tree.map(jnp.add, gradients, tied)
            return _marks(gradients)

        self._note(self._model.embed, run(embed, dx, tied, self._batch), marks)

    def _params(self, stage: Stage) -> Any:
        values = [self._values[name] for name in stage.parameter_names()]
        return jax.tree.unflatten(jax.tree.structure(stage.shapes), values)

    def _of_layer(self, number: int) -> dict[str, jax.Array]:
        return {**self._batch, "layer_index": jnp.full(1, number, jnp.int32)}

    def _note(self, stage: Stage, found: Any, marks: dict[str, np.ndarray]) -> None:
        leaves = map(np.asarray, jax.tree.leaves(found))
        marks.update(zip(stage.parameter_names(), leaves, strict=True))


def _own_loss(output: Any) -> float:
    if isinstance(output, LayerOutput) and output.aux is not None:
        return float(output.aux)
    return 0.0


@partial(jax.jit, static_argnums=0)
def _forward(fn: Any, *arguments: Any) -> Any:
    return fn(*arguments)


@partial(jax.jit, static_argnums=0)
def _backward(
    fn: Any,
    params: Any,
    x: jax.Array,
    batch: Any,
    dx: jax.Array,
    scale: jax.Array,
    derivatives: Any,
) -> tuple[Any, jax.Array]:
    output, pullback = jax.vjp(lambda p, x: fn(p, x, batch), params, x)
    cotangent: Any = dx
    if isinstance(output, LayerOutput):
        cotangent = LayerOutput(dx, None if output.aux is None else scale, derivatives)
    gradients, dx = pullback(cotangent)
    return _marks(gradients), dx


def _marks(gradients: Any) -> Any:
    """Of each gradient its norm and its product with signs, float32 [2]."""

    def mark(gradient: jax.Array) -> jax.Array:
        flat = gradient.astype(jnp.float32).reshape(-1)
        signs = jnp.where(jnp.sin(jnp.arange(flat.size, dtype=jnp.float32) * 1.7) < 0, -1.0, 1.0)
        return jnp.stack([jnp.sqrt(jnp.sum(flat**2)), jnp.sum(flat * signs)])

    return jax.tree.map(mark, gradients)


def _norm(marks: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(mark[0]) ** 2 for mark in marks.values())))


def _distance(mark: np.ndarray, wanted: np.ndarray, whole_norm: float) -> float:
    """Of two gradients, relative; what is a rounding residue of all gradients counts little."""
    size = max(float(wanted[0]), 1e-3 * whole_norm, float(np.finfo(np.float32).tiny))
    return float(np.max(np.abs(mark - wanted))) / size


def _close(value: float, wanted: float, rtol: float) -> bool:
    return abs(value - wanted) <= rtol * max(abs(wanted), abs(value))


def _check_scalar(program: Any) -> None:
    results: list[Any] = [result.aval for result in jaxpr_of(program).outvars]
    if [result.shape for result in results] != [()] or not _is_float(results[0]):
        raise UserError(
            f"whole_loss returned {results}; it must return one float, the mean loss of the "
            "supervised tokens (batch['targets'] >= 0) by the model's own forward pass"
        )


def _is_low_precision(program: Any) -> bool:
    """Whether anything is computed in a float of two bytes or fewer."""
    for equation in jaxpr_of(program).eqns:
        results: list[Any] = [result.aval for result in equation.outvars]
        if any(_is_float(result) and result.dtype.itemsize <= 2 for result in results):
            return True
        if any(map(_is_low_precision, inner_programs(equation))):
            return True
    return False


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))
