"""An optax transformation taken apart into a function of one block of elements.

Valid for element-wise transformations: the update of an element depends on that element's value,
gradient and state and on scalars shared by all parameters (step count, injected hyperparameters).
That is checked, not assumed: programs that read other parameters are refused from their jaxpr, and
each distinct program is run on a matrix as a whole and in pieces, over several steps and gradient
scales, which must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slidedp_jax.errors import UserError
from slidedp_jax.leaf_programs import leaf_programs, owner_of

LANES = 128
"""Blocks of a matrix are shown to the transformation as [block / LANES, LANES]: two dimensions."""

_GRADIENT_SCALES = (1e-3, 1.0, 1e6)


class ElementwiseOptimizer:
    """Groups of parameters with one update program each, and that program on blocks.

    Args:
      transformation: any element-wise optax gradient transformation. It sees the parameters as a
        flat dict from full name to array; masks may look at names and shapes.
      shapes: full parameter name -> shape.

    Attributes:
      groups: parameter name -> group number.
      state_dtypes: dtypes of the per-parameter state arrays, alike for all groups.

    Raises:
      UserError: the transformation is not element-wise, or groups need different state.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        shapes: Mapping[str, tuple[int, ...]],
    ):
        self._transformation = optax.with_extra_args_support(transformation)
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        programs, shared = leaf_programs(transformation, params)
        if shared.reads:
            raise UserError(
                "the optimizer keeps state that depends on all parameters or gradients (such as "
                f"{min(shared.reads)}), as estimated learning rates (D-Adaptation, Prodigy), "
                "apply_if_finite and MultiSteps do. Use an element-wise transformation such as "
                "adamw, lion or sgd; on_nonfinite='skip' and more microbatches per step replace "
                "the latter two"
            )
        for name, program in programs.items():
            if program.reads:
                raise UserError(
                    f"the optimizer's update of {name} reads other parameters "
                    f"(such as {min(program.reads)}), as a clip by the global norm does. Take the "
                    "clip out of the optax chain and pass max_grad_norm instead; it is exact and "
                    "overlaps with the updates"
                )
        texts = list(dict.fromkeys(program.text for program in programs.values()))
        self.groups = {name: texts.index(program.text) for name, program in programs.items()}
        self.representatives = [
            next(name for name in programs if self.groups[name] == group)
            for group in range(len(texts))
        ]
        self._params = self._fewest_parameters(params, texts)
        self.state_dtypes = self._common_state_dtypes()
        for group in range(len(texts)):
            self._check_elementwise(group)

    @property
    def num_groups(self) -> int:
        """Number of distinct update programs."""
        return len(self.representatives)

    def initial_shared(self) -> list[np.ndarray]:
        """Starting values of the state that no parameter owns (step counts and the like)."""

        def init() -> list[jax.Array]:
            params = {name: jnp.zeros(leaf.shape) for name, leaf in self._params.items()}
            return self._shared(self._transformation.init(params))

        with jax.default_device(jax.devices("cpu")[0]):
            return [np.asarray(leaf) for leaf in jax.jit(init)()]

    def init_block(
        self, group: int, values: jax.Array, shape: tuple[int, ...] | None = None
    ) -> list[jax.Array]:
        """Starting state of a flat block of master weights."""
        name, params = self._with_block(group, values, shape)
        state = self._transformation.init(params)
        return [leaf.reshape(-1) for leaf in self._owned(state, name)]

    def update_block(
        self,
        group: int,
        values: jax.Array,
        gradients: jax.Array,
        state: Sequence[jax.Array],
        shared: Sequence[jax.Array],
        shape: tuple[int, ...] | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """One step on a flat block: float32 [n], float32 [n], state [n] each -> the same.

        `shared` is the shared state before the step, the same for every block of the step. `shape`
        is what the transformation sees the block as; by default, a matrix if its group's are.
        """
        name, params = self._with_block(group, values, shape)
        shape = params[name].shape
        gradient_tree = {other: jnp.zeros_like(leaf) for other, leaf in params.items()}
        gradient_tree[name] = gradients.reshape(shape)
        tree = self._fill_state(params, name, [leaf.reshape(shape) for leaf in state], shared)
        updates, new_state = self._transformation.update(gradient_tree, tree, params)
        new_values = optax.apply_updates(params, updates)[name]
        return new_values.reshape(-1), [leaf.reshape(-1) for leaf in self._owned(new_state, name)]

    def advance_shared(self, shared: Sequence[Any]) -> list[jax.Array]:
        """The shared state after one step."""
        params = {name: jnp.zeros(leaf.shape) for name, leaf in self._params.items()}
        tree = self._fill_state(params, None, [], shared)
        return self._shared(self._transformation.update(params, tree, params)[1])

    def _fewest_parameters(
        self, params: dict[str, jax.ShapeDtypeStruct], texts: list[str]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The representatives alone if the programs stay the same without the others.

        Masks given as functions work on any tree; a mask given as a tree needs all of it.
        """
        few = {name: params[name] for name in self.representatives}
        try:
            programs, _ = leaf_programs(self._transformation, few)
        except (ValueError, KeyError, TypeError):
            return params
        same = all(programs[name].text == texts[self.groups[name]] for name in few)
        return few if same else params

    def _with_block(
        self, group: int, values: jax.Array, shape: tuple[int, ...] | None
    ) -> tuple[str, dict[str, jax.Array]]:
        """The parameter tree with `values`, shaped to its rank, in the representative's place."""
        name = self.representatives[group]
        params = {other: jnp.zeros(leaf.shape) for other, leaf in self._params.items()}
        rank = len(self._params[name].shape)
        if shape is None:
            lanes = math.gcd(LANES, values.size)
            shape = (1,) * (rank - 2) + (-1, lanes) if rank >= 2 else values.shape
        params[name] = values.reshape(shape)
        return name, params

    def _fill_state(
        self,
        params: dict[str, jax.Array],
        name: str | None,
        owned: Sequence[jax.Array],
        shared: Sequence[Any],
    ) -> Any:
        """A state tree for `params` with the given leaves of `name` and shared leaves."""
        tree = jax.eval_shape(self._transformation.init, params)
        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        own, common = iter(owned), iter(shared)
        leaves = []
        for path, leaf in flat:
            owner = owner_of(path, params)
            if owner is None:
                leaves.append(next(common))
            elif owner == name:
                leaves.append(next(own))
            else:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype))
        return jax.tree.unflatten(structure, leaves)

    def _owned(self, state: Any, name: str) -> list[Any]:
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        return [leaf for path, leaf in flat if owner_of(path, self._params) == name]

    def _shared(self, state: Any) -> list[Any]:
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        return [leaf for path, leaf in flat if owner_of(path, self._params) is None]

    def _common_state_dtypes(self) -> tuple[np.dtype, ...]:
        state = jax.eval_shape(self._transformation.init, self._params)
        per_group = []
        for name in self.representatives:
            leaves = self._owned(state, name)
            odd = [leaf.shape for leaf in leaves if leaf.shape != self._params[name].shape]
            if odd:
                raise UserError(
                    f"the optimizer keeps state of shape {odd[0]} for {name} of shape "
                    f"{self._params[name].shape}, so it is not element-wise (Adafactor, Muon and "
                    "the like); element-wise transformations such as adamw, lion or sgd are "
                    "supported"
                )
            per_group.append(tuple(np.dtype(leaf.dtype) for leaf in leaves))
        if len(set(per_group)) > 1:
            kinds = dict(zip(self.representatives, per_group, strict=True))
            raise UserError(
                f"parameters need different optimizer state ({kinds}); all parameters must keep "
                "the same kinds of state"
            )
        return per_group[0] if per_group else ()

    def _check_elementwise(self, group: int) -> None:
        """Run the program on a matrix as a whole and in three pieces; they must agree.

        Half of the weights start at 0, where an update of any size shows all its digits.
        """
        start = np.random.default_rng(0).standard_normal(6 * LANES * LANES).astype(np.float32)
        start[::2] = 0
        with jax.default_device(jax.devices("cpu")[0]):
            whole, pieces = (self._trial_steps(group, start, number) for number in (1, 3))
        for expected, got in zip(whole, pieces, strict=True):
            if not _agree(expected, got):
                worst = float(np.nanmax(np.abs(expected - got)))
                raise UserError(
                    f"the optimizer is not element-wise: updating {self.representatives[group]} as "
                    f"a whole and in pieces differs by up to {worst:.3g} (Muon, factored or "
                    "clipped updates do that). Use an element-wise transformation such as adamw, "
                    "lion or sgd, and max_grad_norm for clipping"
                )

    def _trial_steps(self, group: int, start: np.ndarray, pieces: int) -> list[np.ndarray]:
        """After each of a few steps: the weights that began at 0, all weights, each state."""
        rank = len(self._params[self.representatives[group]].shape)
        matrix = (1,) * (rank - 2) + (-1, 2 * LANES) if rank >= 2 else (start.size,)
        shape = matrix if pieces == 1 else None
        init = jax.jit(lambda part: self.init_block(group, part, shape))
        step = jax.jit(lambda *block: self.update_block(group, *block, shape))
        advance = jax.jit(self.advance_shared)
        parts = [jnp.asarray(part) for part in np.split(start, pieces)]
        states = [init(part) for part in parts]
        shared: Sequence[Any] = self.initial_shared()
        draw = np.random.default_rng(1)
        results = []
        for scale in _GRADIENT_SCALES:
            gradient = (scale * draw.standard_normal(start.size)).astype(np.float32)
            for number, part in enumerate(np.split(gradient, pieces)):
                parts[number], states[number] = step(parts[number], part, states[number], shared)
            shared = advance(shared)
            values = np.concatenate([np.asarray(part) for part in parts])
            results += [values[start == 0], values]
            for state in zip(*states, strict=True):
                results.append(np.concatenate([np.asarray(part, np.float32) for part in state]))
        return results


def _agree(expected: np.ndarray, got: np.ndarray) -> bool:
    """Equal but for rounding, on the scale of the largest value."""
    largest = float(np.nanmax(np.abs(expected), initial=0.0))
    atol = 1e-5 * largest if np.isfinite(largest) else 0.0
    return np.allclose(expected, got, rtol=1e-5, atol=atol, equal_nan=True)
