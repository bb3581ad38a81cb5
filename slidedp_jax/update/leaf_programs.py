"""What an optax transformation computes for each parameter, read off its jaxpr.

Two parameters whose update is the same program (the same primitives with the same constants, shapes
aside) can share one update kernel; masks, `multi_transform` and per-parameter rates show up as
different programs. A program that reads another parameter's gradient, such as a clip by the global
norm, is seen at once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from slidedp_jax.jax_internals import called_program, jaxpr_of

_DRAWING = ("random_bits", "threefry2x32")
_SHAPES = re.compile(r"\[[\d,]*\]")


@dataclass(frozen=True)
class _Node:
    """A value: an input role, a literal, or output `index` of a primitive over other values."""

    operation: str
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[_Node, ...]
    index: int
    owner: str | None = None

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, kw_only=True)
class LeafProgram:
    """The update of one parameter.

    Attributes:
      text: canonical text of the program, equal for parameters that are treated alike.
      reads: names of other parameters whose values, gradients or state it reads.
      reads_value_alone: whether it reads neither a gradient nor any state.
      state_text: canonical text of what makes the parameter's next state, constants left out.
      draws: whether it draws random numbers.
    """

    text: str
    reads: frozenset[str]
    reads_value_alone: bool
    state_text: str
    draws: bool


def owner_of(path: Sequence[Any], names: Container[str]) -> str | None:
    """Name of the parameter to which a leaf of an optimizer state belongs, None if shared."""
    last = path[-1] if path else None
    key = getattr(last, "key", None)
    return key if isinstance(key, str) and key in names else None


def leaf_programs(
    transformation: optax.GradientTransformation, params: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, LeafProgram], LeafProgram]:
    """The program of every parameter of a flat dict, traced on its true shape.

    Also that of the state which no parameter owns, which reads whatever parameters it depends on.
    """
    transformation = optax.with_extra_args_support(transformation)
    params = dict(params)
    state = jax.eval_shape(transformation.init, params)

    def step(params: Any, gradients: Any, state: Any) -> tuple[Any, Any]:
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    closed, out_shape = jax.make_jaxpr(step, return_shape=True)(params, params, state)
    inputs = [*_roles("parameter", params, params), *_roles("gradient", params, params)]
    inputs += _roles("state", state, params)
    outputs = _interpret(jaxpr_of(closed), closed.consts, inputs)
    owned: dict[str | None, list[_Node]] = {name: [] for name in (None, *params)}
    for node, (path, _) in zip(outputs, _flat(out_shape), strict=True):
        owned[owner_of(path, params)].append(node)

    def program(name: str | None, shape: tuple[int, ...]) -> LeafProgram:
        text, numbers = _canonical(owned[name], name, shape)
        owners = {node.owner for node in numbers} - {None, name}
        inputs = [node.operation for node in numbers if not node.inputs]
        state = owned[name][0 if name is None else 1 :]  # a parameter's value comes first
        return LeafProgram(
            text=text,
            reads=frozenset(map(str, owners)),
            reads_value_alone=not any(what.startswith(("gradient", "state")) for what in inputs),
            state_text=_canonical(state, name, shape, constants=False)[0],
            draws=any(node.operation in _DRAWING for node in numbers),
        )

    programs = {name: program(name, tuple(leaf.shape)) for name, leaf in params.items()}
    return programs, program(None, ())


def _flat(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _roles(kind: str, tree: Any, params: Mapping[str, Any]) -> list[_Node]:
    """One input node per leaf; owned ones are told apart by their place, not by their name."""
    nodes = []
    for path, _ in _flat(tree):
        owner = owner_of(path, params)
        place = jax.tree_util.keystr(path[:-1] if owner else path)
        nodes.append(_Node(f"{kind}{place}", (), (), 0, owner))
    return nodes


def _interpret(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Node]) -> list[_Node]:
    """Nodes of a jaxpr's outputs; calls are looked through."""
    env: dict[Any, _Node] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _Node("const", (("value", str(const)),), (), 0)

    def read(atom: Any) -> _Node:
        if hasattr(atom, "val"):
            return _Node("literal", (("value", f"{atom.val!r} {atom.aval.dtype}"),), (), 0)
        return env[atom]

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        called = called_program(equation)
        if called is not None:
            results = _interpret(*called, arguments)
        else:
            params = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
            results = [
                _Node(equation.primitive.name, params, tuple(arguments), index)
                for index in range(len(equation.outvars))
            ]
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _canonical(
    outputs: Sequence[_Node], name: str | None, shape: tuple[int, ...], *, constants: bool = True
) -> tuple[str, dict[_Node, int]]:
    """Number the nodes below `outputs` in order of first use and write them down."""
    numbers: dict[_Node, int] = {}
    lines: list[str] = []

    def visit(root: _Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            pending = [child for child in node.inputs if child not in numbers]
            if pending:
                stack.extend(reversed(pending))
                continue
            stack.pop()
            if node in numbers:
                continue
            numbers[node] = len(numbers)
            owner = "own" if node.owner == name else node.owner
            told = () if node.operation in ("literal", "const") and not constants else node.params
            params = ",".join(f"{key}={_erase(value, shape)}" for key, value in told)
            children = [numbers[child] for child in node.inputs]
            lines.append(f"{node.operation}#{node.index}[{params}]{children} {owner}")

    for output in outputs:
        visit(output)
    lines.append(f"-> {[numbers[output] for output in outputs]}")
    return "\n".join(lines), numbers


def _erase(value: Any, shape: tuple[int, ...]) -> str:
    """Text of an equation's parameter without the leaf's own shape."""
    if value == shape and shape:
        return "SHAPE"
    return _SHAPES.sub("[]", str(value))
