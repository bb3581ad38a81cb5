"""Flax NNX models: split once, merged inside traces around the user's own unchanged code."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from slidedp_jax.adapter.paths import Layers, layer_nodes, named_leaves
from slidedp_jax.adapter.source import (
    Key,
    NamedTree,
    Rows,
    Source,
    Tree,
    one_per_layer,
    shape_of,
)
from slidedp_jax.adapter.stacked import Stack
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import passed_through


def from_nnx(
    model: nnx.Module,
    *,
    layers: Layers,
    embed: Callable[..., jax.Array],
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    head_loss: Callable[..., jax.Array],
    dropout: bool,
) -> Source:
    """An NNX module; see `slidedp_jax.adapter.adapt`."""
    found = layer_nodes(model, layers, _is_layer)
    _refuse_shared(model, [(path, node) for path, node, _ in found])
    whole = Split(model, dropout)
    variables = dict(_parameters(model))
    assert variables.keys() == named_leaves(whole.tree).keys()
    splits: list[tuple[str, Split]] = []
    stacks = []
    for path, node, place in found:
        if place is None:
            splits.append((path, Split(node, dropout)))
            continue
        stack = Stack(place, nnx.to_pure_dict(nnx.state(node, nnx.Param)))
        stacks.append(stack)
        apart = enumerate(stack.names(path))
        splits += [(name, Split(node, dropout, (stack, number))) for number, name in apart]
    fns = one_per_layer(layer, len(splits))
    shared: list[tuple[Any, Split, Callable[..., Any]]] = []
    layer_fns = []
    for fn, (_, split) in zip(fns, splits, strict=True):
        same = [made for f, other, made in shared if f is fn and other.equals(split)]
        if not same:
            same = [split.wrap(fn, "layer")]
            shared.append((fn, split, same[0]))
        layer_fns.append(same[0])

    named = NamedTree(whole.tree, stacks)

    def held() -> dict[str, Any]:
        return {name: variable.get_raw_value() for name, variable in variables.items()}

    def write_back(parameters: Mapping[str, np.ndarray]) -> nnx.Module:
        nnx.update(model, named.of_leaves(named.written(parameters, held())))
        return model

    def of_whole(fn: Callable[..., Any], what: str) -> Callable[..., Any]:
        run = whole.wrap(fn, what)
        return lambda values, *rest: run(named.tree(values), *rest)

    return Source(
        shapes=named.shapes,
        value=lambda name: named.value(name, held()),
        layers=tuple((path, split.tree) for path, split in splits),
        embed=of_whole(embed, "embed"),
        layer_fns=tuple(layer_fns),
        head_loss=of_whole(head_loss, "head_loss"),
        whole=lambda fn: lambda values, batch: fn(whole.merged(named.tree(values), None), batch),
        stacked=bool(stacks),
        write_back=write_back,
    )


class Split:
    """A module's structure, the shapes of its parameters, and the rest of its state as constants.

    Args:
      module: the module.
      dropout: whether it draws random numbers.
      layer: a stack and the number of a layer in it, if the module is a stack of which this is one.

    Attributes:
      tree: `jax.ShapeDtypeStruct` of each `nnx.Param`, nested as in the module.
    """

    def __init__(self, module: nnx.Module, dropout: bool, layer: tuple[Stack, int] | None = None):
        graph, parameters, *others = nnx.split(module, nnx.Param, nnx.RngKey, nnx.RngCount, ...)
        self._graph: nnx.GraphDef[nnx.Module] = graph
        if layer is not None:
            others = [jax.tree.map(lambda leaf: _of_layer(leaf, *layer), part) for part in others]
        shape = shape_of if layer is None else layer[0].shape
        self.tree: Tree = jax.tree.map(shape, nnx.to_pure_dict(parameters))
        keys, counts, rest = others
        self._keys = jax.tree.map(_key_constant, nnx.to_pure_dict(keys))
        self._counts = jax.tree.map(_count, nnx.to_pure_dict(counts))
        self._rest = jax.tree.map(_constant, nnx.to_pure_dict(rest))
        self._dropout = dropout

    def equals(self, other: Split) -> bool:
        """Whether both are the same code over parameters of the same shapes."""
        if self._graph != other._graph or self.tree != other.tree:
            return False
        mine, structure = _flat(self._rest)
        theirs, other_structure = _flat(other._rest)
        return structure == other_structure and all(
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in zip(mine, theirs, strict=True)
        )

    def wrap(self, fn: Callable[..., Any], what: str) -> Callable[..., Any]:
        """`fn(module, ..., batch)` as a function of (tree, ..., batch, key) that changes no state.

        Without a key, a model with dropout runs as `module.eval()` sets it.
        """
        harmless: dict[bool, set[Any]] = {True: set(), False: set()}

        def call(tree: Tree, *arguments: Any) -> Any:
            *rest, key = arguments
            if key is not None:
                rest[-1] = Rows(rest[-1], key=key)
            module = self.merged(tree, key)
            before = _values(module)
            result = fn(module, *rest)
            changed = _replaced(before, _values(module)) - harmless[key is None]
            if changed:
                # Lifted transforms (nnx.remat, nnx.jit) replace what they do not change.
                found = _changed(self.merged(tree, key), fn, rest)
                self._check_unchanged({p: found[p] for p in changed & found.keys()}, what, key)
                harmless[key is None] |= changed - found.keys()
            return result

        return call

    def merged(self, tree: Tree, key: Key) -> nnx.Module:
        """The module around some values; without a key, one with dropout draws nothing."""
        module = self._merge(tree, key)
        if self._dropout and key is None:
            module.eval()
        return module

    def _merge(self, tree: Tree, key: Key) -> nnx.Module:
        own, treedef = jax.tree.flatten(self._keys)
        counts, rest = jax.tree.map(jnp.asarray, (self._counts, self._rest))
        if key is None:
            streams = [jax.random.wrap_key_data(one.data, impl=one.impl) for one in own]
        else:
            names = named_leaves(self._keys)
            streams = [jax.random.fold_in(key, zlib.crc32(name.encode())) for name in names]
            counts = jax.tree.map(jnp.zeros_like, counts)
        keys = jax.tree.unflatten(treedef, streams)
        return nnx.merge(self._graph, _union(_union(tree, rest), _union(keys, counts)))

    def _check_unchanged(self, changed: Mapping[Any, type], what: str, key: Key) -> None:
        """`changed`: type of each variable that changes, by path."""
        draws = [path for path, kind in changed.items() if issubclass(kind, nnx.RngState)]
        others = [path for path in changed if path not in draws]
        if others:
            listed = ", ".join(f"{'.'.join(map(str, p))} ({changed[p].__name__})" for p in others)
            raise UserError(
                f"{what} changed the module's state while running: {listed}. Streamed layers are "
                "computed twice and on several devices, so nothing but parameters may change, and "
                "those only in the update. Use layers without running statistics (LayerNorm or "
                "RMSNorm for BatchNorm, or model.eval() to freeze them), call the layer without a "
                "cache, and sow nothing (a layer returns a loss of its own as (x, aux))"
            )
        if draws and key is None and not self._dropout:
            listed = ", ".join(".".join(map(str, path)) for path in draws)
            raise UserError(
                f"{what} draws random numbers ({listed}). Pass dropout=True to adapt(), so that "
                "they depend on seed, step, row and layer alone, or switch them off with "
                "model.eval()"
            )


def _flat(constants: Any) -> tuple[list[np.ndarray], Hashable]:
    leaves, structure = jax.tree.flatten(constants)
    return leaves, structure


class _KeyData:
    """A PRNG key as plain numbers, usable in any trace."""

    def __init__(self, key: jax.Array):
        self.data = np.asarray(jax.random.key_data(key))
        self.impl = jax.random.key_impl(key)


def _key_constant(key: Any) -> Any:
    return _KeyData(key) if isinstance(key, jax.Array) else _KeyData(jax.random.key(0))


def _count(value: Any) -> np.ndarray:
    return np.asarray(value) if isinstance(value, jax.Array) else np.zeros((), value.dtype)


def _of_layer(value: Any, stack: Stack, number: int) -> Any:
    """One layer's part of a state that is no parameter: stacked along its first axis."""
    if not value.shape or value.shape[0] != stack.num_layers:
        raise UserError(
            f"the stack at {stack.path} holds {stack.num_layers} layers and a state of shape "
            f"{tuple(value.shape)} and {value.dtype} that is no nnx.Param; such a state must be "
            "stacked along its first axis. Keep constants out of the layers' variables"
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype)
    return value[number]


def _constant(value: Any) -> np.ndarray:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise UserError(
            f"the model has a state of shape {value.shape} and {value.dtype} that is no nnx.Param "
            "and has no value; build the model with values (not under nnx.eval_shape)"
        )
    return np.asarray(value)


def _values(module: nnx.Module) -> dict[Any, tuple[type, Any]]:
    """Type and raw value of each state variable by path."""
    return {
        path: (type(leaf), leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf)
        for path, leaf in nnx.to_flat_state(nnx.state(module))
    }


def _replaced(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    """Paths of variables that hold another object than before, or are new."""
    return {path for path in after if path not in before or after[path][1] is not before[path][1]}


def _changed(
    module: nnx.Module, fn: Callable[..., Any], arguments: Sequence[Any]
) -> dict[Any, type]:
    """Type of each variable that holds another value after `fn(module, *arguments)`, by path.

    What calls hand back as they were given it is known from the traced program.
    """
    graph, state = nnx.split(module)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    leaves, treedef = jax.tree.flatten(state)
    assert len(paths) == len(leaves)
    kinds: dict[Any, type] = {}

    def run(leaves: Any, before: Any, batch: Any) -> list[Any]:
        module = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        fn(module, *before, Rows(batch))
        after = _values(module)
        kinds.update({path: kind for path, (kind, _) in after.items()})
        return [value for _, value in after.values()]

    *before, batch = arguments
    program = jax.make_jaxpr(run)(leaves, before, dict(batch))
    known = {path: number for number, path in enumerate(paths)}
    origins = zip(kinds.items(), passed_through(program), strict=True)
    return {path: kind for (path, kind), origin in origins if origin != known.get(path, -1)}


def _union(left: Any, right: Any) -> Any:
    """Two nested dicts without a common leaf as one."""
    merged = dict(left)
    for key, value in right.items():
        merged[key] = _union(merged[key], value) if key in merged else value
    return merged


def _is_layer(node: Any) -> bool:
    return isinstance(node, nnx.Module) and not isinstance(node, Sequence | Mapping)


def _refuse_shared(model: nnx.Module, nodes: Sequence[tuple[str, nnx.Module]]) -> None:
    """A variable belongs to one layer, or to no layer."""
    owners: dict[int, str] = {}
    for path, node in nodes:
        for inner, variable in _parameters(node):
            name = f"{path}.{inner}"
            first = owners.setdefault(id(variable), name)
            if first != name:
                raise _shared(first, name)
    for name, variable in _parameters(model):
        if owners.get(id(variable), name) != name:
            raise _shared(owners[id(variable)], name)


def _parameters(module: nnx.Module) -> list[tuple[str, nnx.Variable[Any]]]:
    return [
        (".".join(map(str, path)), node)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
    ]


def _shared(first: str, second: str) -> UserError:
    return UserError(
        f"{first} and {second} are one parameter. A layer's parameters travel and are updated with "
        "that layer, so none may be shared between layers or with the rest of the model (embedding "
        "and head may share). Give each layer its own nnx.Param"
    )
