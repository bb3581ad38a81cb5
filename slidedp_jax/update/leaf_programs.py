"""What an optax transformation computes for each parameter, read off its jaxpr.

Two parameters whose update is the same program (the same primitives with the same constants, shapes
aside) can share one update kernel; masks, `multi_transform` and per-parameter rates show up as
different programs. A program that reads another parameter's gradient, such as a clip by the global
norm, is seen at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
      text: canonical text of the program and of what makes the starting state, equal for parameters
        that are treated alike.
      reads: names of other parameters whose values, gradients or state it reads.
      reads_value_alone: whether it reads neither a gradient nor any state.
      state_text: canonical text of what makes the parameter's next state, constants left out.
      draws: whether it draws random numbers from a key that is not the parameter's own.
    """

    text: str
    reads: frozenset[str]
    reads_value_alone: bool
    state_text: str
    draws: bool


def owners_of(tree: Any, names: Container[str]) -> list[str | None]:
    """For each leaf of an optimizer state the name of the parameter it belongs to, None if shared.

    What lies under a parameter's name is that parameter's, whatever it is kept in. But a name that
    has names below it is a label, as `multi_transform` has them, and a whole number by itself that
    lies deeper is a count.
    """
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [
        [depth for depth, key in enumerate(path) if getattr(key, "key", None) in names]
        for path, _ in flat
    ]
    labels = {
        path[: depth + 1]
        for (path, _), depths in zip(flat, named, strict=True)
        for depth in depths[:-1]
    }

    def owner(path: tuple[Any, ...], leaf: Any, depths: list[int]) -> str | None:
        if not depths or path[: depths[-1] + 1] in labels:
            return None
        deeper = depths[-1] < len(path) - 1
        if deeper and not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.integer):
            return None
        name: str = path[depths[-1]].key
        return name

    return [owner(path, leaf, depths) for (path, leaf), depths in zip(flat, named, strict=True)]


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
    starts = _starts(transformation, params)
    inputs = [*_roles("parameter", params, params), *_roles("gradient", params, params)]
    inputs += _roles("state", state, params)
    outputs = _interpret(jaxpr_of(closed), closed.consts, inputs)
    owned: dict[str | None, list[_Node]] = {name: [] for name in (None, *params)}
    for node, owner in zip(outputs, owners_of(out_shape, params), strict=True):
        owned[owner].append(node)

    def program(name: str | None, shape: tuple[int, ...]) -> LeafProgram:
        text, numbers = _canonical(owned[name], name, shape)
        start, of_start = _canonical(starts[name], name, shape)
        owners = {node.owner for node in (*numbers, *of_start)} - {None, name}
        inputs = [node.operation for node in numbers if not node.inputs]
        state = owned[name][0 if name is None else 1 :]  # a parameter's value comes first
        return LeafProgram(
            text=f"{start}\n{text}",
            reads=frozenset(map(str, owners)),
            reads_value_alone=not any(what.startswith(("gradient", "state")) for what in inputs),
            state_text=_canonical(state, name, shape, constants=False)[0],
            draws=any(
                node.operation in _DRAWING and not _has_own_key(node, name) for node in numbers
            ),
        )

    programs = {name: program(name, tuple(leaf.shape)) for name, leaf in params.items()}
    return programs, program(None, ())


def _starts(
    transformation: optax.GradientTransformation, params: Mapping[str, Any]
) -> dict[str | None, list[_Node]]:
    """What the starting state of each parameter is made of, and that which no parameter owns."""
    closed, state = jax.make_jaxpr(transformation.init, return_shape=True)(dict(params))
    inputs = _roles("parameter", params, params)
    outputs = _interpret(jaxpr_of(closed), closed.consts, inputs)
    owned: dict[str | None, list[_Node]] = {name: [] for name in (None, *params)}
    for node, owner in zip(outputs, owners_of(state, params), strict=True):
        owned[owner].append(node)
    return owned


def _has_own_key(drawing: _Node, name: str | None) -> bool:
    """Whether what random numbers are made of comes from the parameter's own state."""
    seen: set[_Node] = set()
    stack = list(drawing.inputs)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if name is not None and node.owner == name and node.operation.startswith("state"):
            return True
        stack.extend(node.inputs)
    return False


def _flat(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _roles(kind: str, tree: Any, params: Mapping[str, Any]) -> list[_Node]:
    """One input node per leaf; owned ones are told apart by their place, not by their name."""
    nodes = []
    for (path, _), owner in zip(_flat(tree), owners_of(tree, params), strict=True):
        place = jax.tree_util.keystr(
            tuple(key for key in path if owner is None or getattr(key, "key", None) != owner)
        )
        nodes.append(_Node(f"{kind}{place}", (), (), 0, owner))
    return nodes


def _interpret(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Node]) -> list[_Node]:
    """Nodes of a jaxpr's outputs; calls are looked through."""
    env: dict[Any, _Node] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _Node("const", (("value", _text_of(const)),), (), 0)

    def read(atom: Any) -> _Node:
        if hasattr(atom, "val"):
            return _Node("literal", (("value", f"{atom.val!r} {atom.aval.dtype}"),), (), 0)
        return env[atom]

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        called = called_program(equation)
        if called is not None:
            results = _interpret(*called, arguments)
        elif equation.primitive.name == "cond":
            results = _branches(equation.params["branches"], arguments)
        else:
            params = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
            results = [
                _Node(equation.primitive.name, params, tuple(arguments), index)
                for index in range(len(equation.outvars))
            ]
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _text_of(constant: Any) -> str:
    """Tells constants apart; NumPy's own text of a large one leaves most of it out."""
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    text = array.tobytes() if array.size > 16 else str(array).encode()
    return f"{array.dtype}{array.shape} {hashlib.sha256(text).hexdigest()}"


def _branches(branches: Sequence[Any], arguments: Sequence[_Node]) -> list[_Node]:
    """Results of a `lax.cond` or `lax.switch`, each of which one program of all may make."""
    index, *operands = arguments
    of_each = [
        _interpret(jaxpr_of(branch), getattr(branch, "consts", ()), operands) for branch in branches
    ]
    return [_Node("cond", (), (index, *choices), 0) for choices in zip(*of_each, strict=True)]


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
