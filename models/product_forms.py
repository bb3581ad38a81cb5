"""Which realisation of experts' products runs, and why. Imports no JAX.

| form | |
|---|---|
| `portable` | a loop over blocks of rows, in any version of JAX on any device |
| `ragged_dot` | `jax.lax.ragged_dot_general`; on NVIDIA GPUs by cuDNN, if a flag of XLA says so |
| `mosaic`, `triton` | tokamax's kernels for NVIDIA GPUs, where that package is |

Each product (forward, by the rows, by the weights) has one, by what was measured on such a device
at the nearest shape (`models.measured_products`); `portable` where nothing was. No stopwatch has a
say, so the same software on the same device computes the same bits. What JAX makes of `ragged_dot`
without the flag multiplies every row with every expert's matrix: it is never chosen.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from slidedp_jax.jax_internals import RAGGED_DOT_FUSION, xla_flags
from slidedp_jax.models.compute_target import ComputeTarget
from slidedp_jax.models.measured_products import MEASURED, Measured

Form = Literal["portable", "ragged_dot", "mosaic", "triton"]
FORMS: tuple[Form, ...] = ("portable", "ragged_dot", "mosaic", "triton")
REQUESTS = ("auto", *FORMS)
"""What may be asked for."""

Product = Literal["forward", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = ("forward", "dgrad", "wgrad")


class Forms(NamedTuple):
    """The realisation of each product with one array of experts' matrices."""

    forward: Form
    dgrad: Form
    wgrad: Form


PORTABLE = Forms("portable", "portable", "portable")


def obstacles(form: Form, target: ComputeTarget, dtype: str) -> list[str]:
    """Why a realisation cannot run; empty if it can.

    Args:
      form: which one.
      target: where.
      dtype: compute dtype by name.
    """
    if form == "portable":
        return []
    found = []
    if form == "ragged_dot":
        if target.platform == "cuda" and RAGGED_DOT_FUSION not in xla_flags():
            found.append(
                f"XLA_FLAGS lacks {RAGGED_DOT_FUSION}, without which every row is multiplied with "
                "every expert's matrix"
            )
        return found
    if target.platform != "cuda":
        found.append(f"the platform is {target.platform}, tokamax's kernels are for cuda")
    if dtype != "bfloat16":
        found.append(f"the dtype is {dtype}, tokamax's kernels are used in bfloat16")
    if form == "mosaic" and (target.compute_capability or 0.0) < 9.0:
        found.append(f"compute capability is {target.compute_capability}, mosaic needs 9.0")
    if importlib.util.find_spec("tokamax") is None:
        found.append("tokamax is not installed (Python 3.12, JAX 0.11.1: the extra `tokamax`)")
    return found


def resolve_forms(
    requested: str,
    *,
    target: ComputeTarget,
    dtype: str,
    experts: int,
    rows: int,
    columns: tuple[int, int],
    table: Sequence[Measured] = MEASURED,
) -> Forms:
    """Decides which realisations serve one array of experts' matrices; static.

    Args:
      requested: `auto`, or the form of all products.
      target: where they will run.
      dtype: compute dtype by name.
      experts: E.
      rows: visits, T k.
      columns: (N, K) of the matrices [E, N, K].
      table: what was measured.

    Raises:
      ValueError: what was asked for is unknown, or cannot run; the message lists every obstacle.
    """
    if requested not in REQUESTS:
        raise ValueError(
            f"expert_products is {requested!r}; supported: {', '.join(map(repr, REQUESTS))}."
        )
    if requested != "auto":
        form = cast(Form, requested)
        if found := obstacles(form, target, dtype):
            raise ValueError(
                f"expert_products {form!r} cannot run: {'; '.join(found)}. Use 'auto' or "
                "'portable'."
            )
        return Forms(form, form, form)
    if dtype != "bfloat16":
        return PORTABLE  # nothing else was measured in any other
    can_run = {form for form in FORMS if not obstacles(form, target, dtype)}
    return Forms(
        *(
            _fastest(
                [
                    entry
                    for entry in table
                    if entry.device_kind == target.device_kind
                    and entry.product == product
                    and entry.form in can_run
                ],
                (rows / experts, *columns),
            )
            for product in PRODUCTS
        )
    )


def _fastest(entries: Sequence[Measured], shape: tuple[float, int, int]) -> Form:
    """The fastest at the nearest shape that was measured; of equal ones the first in the table."""
    if not entries:
        return "portable"

    def distance(entry: Measured) -> float:
        own = (entry.rows / entry.experts, *entry.columns)
        return sum(abs(math.log(one / other)) for one, other in zip(own, shape, strict=True))

    nearest = min(map(distance, entries))
    return cast(
        Form,
        max(
            (entry for entry in entries if distance(entry) == nearest),
            key=lambda entry: entry.tflop_per_s,
        ).form,
    )
