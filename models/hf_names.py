"""Under which names Hugging Face's files hold a model's parameters. Imports no JAX.

Only experts differ: here a layer's are two arrays, gate above up [E, 2F, D] and down [E, D, F], as
transformers has them in memory. Its files hold a matrix per expert, by one of two sets of names,
unless they were written as they are in memory (`fused`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from slidedp_jax.models.config import Shape

ExpertLayout = Literal["fused", "per_expert", "mixtral"]

_SPARSE = re.compile(r"(?P<layer>.*\.)mlp\.(?P<rest>gate\.weight|experts\.(gate_up|down)_proj)$")

_MATRICES = {
    "per_expert": ("mlp.experts.{}.{}_proj.weight", ("gate", "up"), "down"),
    "mixtral": ("block_sparse_moe.experts.{}.{}.weight", ("w1", "w3"), "w2"),
}
"""Name of an expert's matrix, and what the three are called."""


class Place(NamedTuple):
    """Where a tensor of a file belongs.

    Attributes:
      parameter: full name of the parameter.
      shape: of the tensor.
      expert: the expert whose matrix it is; None: it is all of the parameter.
      rows: of that expert's matrix.
    """

    parameter: str
    shape: Shape
    expert: int | None = None
    rows: slice = slice(None)

    @property
    def part(self) -> tuple[int, slice] | None:
        """The tensor within the parameter; None: all of it."""
        return None if self.expert is None else (self.expert, self.rows)


def layout_of(names: Iterable[str]) -> ExpertLayout:
    """How the files with these tensors hold experts, if there are any."""
    for name in names:
        if ".block_sparse_moe." in name:
            return "mixtral"
        if re.search(r"\.mlp\.experts\.\d+\.", name):
            return "per_expert"
    return "fused"


def published_layout(model_type: str) -> ExpertLayout:
    """How the files of a family are published; any version of transformers reads it."""
    return "mixtral" if model_type == "mixtral" else "per_expert"


def tensors_in_files(shapes: Mapping[str, Shape], layout: ExpertLayout) -> dict[str, Place]:
    """Name of every tensor of the files -> its place, parameter by parameter.

    Args:
      shapes: full name -> shape of every parameter.
      layout: of the experts.
    """
    places: dict[str, Place] = {}
    for name, shape in shapes.items():
        sparse = _SPARSE.match(name)
        if layout == "fused" or sparse is None:
            places[name] = Place(name, shape)
        elif sparse["rest"] == "gate.weight":
            own = "block_sparse_moe.gate.weight" if layout == "mixtral" else "mlp.gate.weight"
            places[sparse["layer"] + own] = Place(name, shape)
        else:
            places |= _matrices(name, shape, sparse["layer"], layout)
    return places


def _matrices(name: str, shape: Shape, layer: str, layout: ExpertLayout) -> dict[str, Place]:
    pattern, upper, down = _MATRICES[layout]
    num_experts, num_rows, num_columns = shape
    parts = upper if name.endswith("gate_up_proj") else (down,)
    rows = num_rows // len(parts)
    return {
        layer + pattern.format(expert, part): Place(
            name, (rows, num_columns), expert, slice(number * rows, (number + 1) * rows)
        )
        for expert in range(num_experts)
        for number, part in enumerate(parts)
    }
