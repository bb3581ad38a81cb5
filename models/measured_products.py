"""How fast each realisation of experts' products is, where that was measured. Imports no JAX.

Written by `scripts/make/make_product_table.py` from records of `scripts/bench/bench_experts.py`;
not by hand.
"""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """One realisation of one product on one device, right against a product per expert.

    Attributes:
      device_kind: as JAX spells it.
      product: `forward`, `dgrad` or `wgrad`.
      experts: groups, E.
      rows: rows of all groups, padding not counted.
      columns: of the matrices [E, N, K], (N, K).
      form: `models.product_forms.Form`.
      tflop_per_s: 2 rows N K over the median time, padding and layout changes included.
    """

    device_kind: str
    product: str
    experts: int
    rows: int
    columns: tuple[int, int]
    form: str
    tflop_per_s: float


MEASURED: tuple[Measured, ...] = ()
