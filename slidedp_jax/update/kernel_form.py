"""Which form of the update kernel runs: looked up, since forms differ in the last bit.

A form that were timed at the start would make two runs of one command end in different bits. What
decides is recorded in every checkpoint and in `run.json`, and a resumed run goes on with it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Literal, get_args

KernelForm = Literal["blocked", "fused", "whole"]

Version = tuple[int, int]

_FASTEST: Mapping[str, Mapping[Version, KernelForm]] = {
    "x86_64": {(0, 10): "whole", (0, 11): "fused", (0, 12): "blocked"},
}
"""Architecture of the host -> first version of JAX -> form that is fastest from there on.

`scripts/bench/bench_host_update.py` measures a row and says how far it is from the fastest.
"""

RESIDENT_FORM: KernelForm = "whole"
"""Of state on the compute devices: XLA fuses the expression, there are no blocks to walk over."""


def kernel_form(jax_version: str, machine: str | None = None) -> KernelForm:
    """The form for a version of JAX: that of the newest row which is not newer.

    Args:
      jax_version: such as `0.11.2`.
      machine: architecture of the host, as `platform.machine()` gives it; None: this one. One that
        is not in the table takes the rows of x86_64.
    """
    rows = _FASTEST.get(machine or platform.machine(), _FASTEST["x86_64"])
    version = major_minor(jax_version)
    known = [first for first in rows if first <= version]
    return rows[max(known, default=min(rows))]


def check_form(form: str | None) -> None:
    """Whether there is a form of that name; None is fine.

    Raises:
      ValueError: there is none.
    """
    if form is not None and form not in get_args(KernelForm):
        raise ValueError(f"kernel_form={form!r}; allowed: {get_args(KernelForm)}, or None")


def major_minor(version: str) -> Version:
    """`0.11.2.dev3` -> (0, 11)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
