"""Matrix products of a traced program: their operations, and how large some of them are."""

from __future__ import annotations

import math
from typing import Any

from slidedp_jax.jax_internals import inner_programs, jaxpr_of


def matmul_flops(program: Any) -> float:
    """Operations of all `dot_general` and convolutions of a program, 2 per multiplication and sum.

    Loops of known length count each turn, of branches the dearest one counts. Kernels that are
    opaque to JAX count as they estimate themselves, or nothing.
    """
    return sum(_equation_flops(equation) for equation in jaxpr_of(program).eqns)


def _equation_flops(equation: Any) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left: tuple[int, ...] = equation.invars[0].aval.shape
        return float(
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * math.prod(left[axis] for axis in contracted)
        )
    if name == "conv_general_dilated":
        kernel: tuple[int, ...] = equation.invars[1].aval.shape
        numbers = equation.params["dimension_numbers"]
        per_output = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
        return float(2.0 * math.prod(equation.outvars[0].aval.shape) * per_output)
    if name == "pallas_call":
        estimate = equation.params.get("cost_estimate")
        return float(estimate.flops) if estimate is not None else 0.0
    inner = [matmul_flops(part) for part in inner_programs(equation)]
    if name == "cond":
        return max(inner, default=0.0)
    return equation.params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def widest_product(program: Any, size: int) -> int:
    """Most rows of any product's result that has an axis of `size`; 0 if none has."""
    widest = 0
    for equation in jaxpr_of(program).eqns:
        if equation.primitive.name == "dot_general":
            result: Any = equation.outvars[0].aval
            shape = result.shape
            widest = max(widest, math.prod(shape) // size if size in shape else 0)
        inner = (widest_product(part, size) for part in inner_programs(equation))
        widest = max(widest, *inner, 0)
    return widest
