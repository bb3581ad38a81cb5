"""An optax transformation taken apart into one update program per group of parameters.

A parameter's program reads its own value, gradient and state, and scalars shared by all parameters
(step count, injected hyperparameters). Programs that read other parameters are refused from their
jaxpr. Whether a group's program may be run on blocks of a parameter is found out by `elementwise`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slidedp_jax.errors import UserError
from slidedp_jax.update.leaf_programs import LeafProgram, leaf_programs, owners_of
from slidedp_jax.update.state_meaning import StateMeaning, digest, hyperparameters, leaf_names


class DecomposedOptimizer:
    """Groups of parameters with one update program each.

    Args:
      transformation: an optax gradient transformation. It sees the parameters as a flat dict from
        full name to array; masks may look at names and shapes.
      shapes: full parameter name -> shape.

    Attributes:
      groups: parameter name -> group number.
      representatives: the first parameter of each group.
      idle: per group, whether its program leaves parameters as they are and keeps no state.
      texts: per group, its program, as text in a form of its own.
      shared_text: the same of the state that no parameter owns.
      meaning: what the state arrays of each parameter are.

    Raises:
      UserError: the update of a parameter depends on other parameters.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        shapes: Mapping[str, tuple[int, ...]],
    ):
        self._transformation = optax.with_extra_args_support(transformation)
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        programs, shared = _programs(transformation, params)
        if any(program.draws for program in (shared, *programs.values())):
            raise UserError(
                "the optimizer draws random numbers (add_noise, noisy_sgd) from one key, and which "
                "ones a parameter gets depends on all others. Leave the noise out of the optax "
                "chain (dropout belongs to the model), or keep a key for each parameter"
            )
        if shared.reads:
            raise UserError(
                "the optimizer keeps state that depends on all parameters or gradients (such as "
                f"{min(shared.reads)}), as estimated learning rates (D-Adaptation, Prodigy) and "
                "apply_if_finite do. Use a transformation that treats every parameter by itself, "
                "such as adamw, lion or muon; on_nonfinite='skip' replaces the latter"
            )
        for name, program in programs.items():
            if program.reads:
                raise UserError(
                    f"the optimizer's update of {name} reads other parameters "
                    f"(such as {min(program.reads)}), as a clip by the global norm does. Take the "
                    "clip out of the optax chain and pass max_grad_norm instead; it is exact and "
                    "overlaps with the updates. If there is no clip, it treats all parameters in "
                    "one loop, which cannot be taken apart: write it as one of each parameter "
                    "(`jax.tree.map`)"
                )
        texts = list(dict.fromkeys(program.text for program in programs.values()))
        self.groups = {name: texts.index(program.text) for name, program in programs.items()}
        self.representatives = [
            next(name for name in programs if self.groups[name] == group)
            for group in range(len(texts))
        ]
        self.texts, self.shared_text = texts, shared.text
        self.meaning = self._meaning(params, programs)
        self._params = self._fewest_parameters(params, texts)
        self.idle = [
            programs[name].reads_value_alone and self._leaves_values(group)
            for group, name in enumerate(self.representatives)
        ]

    @property
    def num_groups(self) -> int:
        """Number of distinct update programs."""
        return len(self.representatives)

    def shape(self, group: int) -> tuple[int, ...]:
        """Shape of the group's representative."""
        return tuple(self._params[self.representatives[group]].shape)

    def initial_shared(self) -> list[np.ndarray]:
        """Starting values of the state that no parameter owns (step counts and the like)."""

        def init() -> list[jax.Array]:
            params = {name: jnp.zeros(leaf.shape) for name, leaf in self._params.items()}
            return self._shared(self._transformation.init(params))

        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return [np.asarray(leaf) for leaf in jax.jit(init)()]

    def advance_shared(self, shared: Sequence[Any]) -> list[jax.Array]:
        """The shared state after one step."""
        params = {name: jnp.zeros(leaf.shape) for name, leaf in self._params.items()}
        tree = self._fill_state(params, None, [], shared)
        return self._shared(self._transformation.update(params, tree, params)[1])

    def init(self, group: int, values: jax.Array) -> list[jax.Array]:
        """Starting state of an array that stands for a parameter of the group."""
        name, params = self._with(group, values)
        return self._owned(self._transformation.init(params), name)

    def update(
        self,
        group: int,
        values: jax.Array,
        gradients: jax.Array,
        state: Sequence[jax.Array],
        shared: Sequence[jax.Array],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """One step of such an array: float32 values, gradients of the same shape, state -> new.

        `shared` is the shared state before the step, the same for every parameter of the step.
        """
        name, params = self._with(group, values)
        gradient_tree = {other: jnp.zeros_like(leaf) for other, leaf in params.items()}
        gradient_tree[name] = gradients
        tree = self._fill_state(params, name, state, shared)
        updates, new_state = self._transformation.update(gradient_tree, tree, params)
        return optax.apply_updates(params, updates)[name], self._owned(new_state, name)

    def state_shapes(
        self, group: int, shape: tuple[int, ...] | None = None
    ) -> list[jax.ShapeDtypeStruct]:
        """State of the group's representative, or of an array of another shape in its place."""
        values = jax.ShapeDtypeStruct(shape or self.shape(group), jnp.float32)
        shapes: list[jax.ShapeDtypeStruct] = jax.eval_shape(
            lambda leaf: self.init(group, leaf), values
        )
        return shapes

    def _meaning(
        self, params: Mapping[str, Any], programs: Mapping[str, LeafProgram]
    ) -> StateMeaning:
        state = jax.eval_shape(self._transformation.init, dict(params))
        named: dict[str | None, list[str]] = {name: [] for name in (None, *params)}
        owners = owners_of(state, params)
        for owner, name in zip(owners, leaf_names(state), strict=True):
            named[owner].append(name)
        free, scheduled = hyperparameters(state, owners)
        return StateMeaning(
            hyperparameters=free,
            scheduled=scheduled,
            names={name: tuple(named[name]) for name in params},
            programs={name: digest(programs[name].state_text) for name in params},
            shared=tuple(named[None]),
        )

    def _leaves_values(self, group: int) -> bool:
        """Whether a step changes nothing and keeps no state, for programs that read the value."""
        if self.state_shapes(group):
            return False
        small = np.random.default_rng(0).standard_normal(self._small_shape(group))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            values = jnp.asarray(small, jnp.float32)
            shared = self.initial_shared()
            step = jax.jit(lambda leaf, shared: self.update(group, leaf, leaf, [], shared)[0])
            return np.array_equal(step(values, shared), values)

    def _small_shape(self, group: int) -> tuple[int, ...]:
        return tuple(min(size, 8) for size in self.shape(group))

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

    def _with(self, group: int, values: jax.Array) -> tuple[str, dict[str, jax.Array]]:
        """The parameter tree with `values` in the representative's place."""
        name = self.representatives[group]
        params = {other: jnp.zeros(leaf.shape) for other, leaf in self._params.items()}
        return name, params | {name: values}

    def _fill_state(
        self,
        params: dict[str, jax.Array],
        name: str | None,
        owned: Sequence[jax.Array],
        shared: Sequence[Any],
    ) -> Any:
        """A state tree for `params` with the given leaves of `name` and shared leaves."""
        tree = jax.eval_shape(self._transformation.init, params)
        flat, structure = jax.tree.flatten(tree)
        own, common = iter(owned), iter(shared)
        leaves = []
        for leaf, owner in zip(flat, owners_of(tree, params), strict=True):
            if owner is None:
                leaves.append(next(common))
            elif owner == name:
                leaves.append(next(own))
            else:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype))
        return jax.tree.unflatten(structure, leaves)

    def _owned(self, state: Any, name: str) -> list[Any]:
        owners = owners_of(state, self._params)
        return [o for o, own in zip(jax.tree.leaves(state), owners, strict=True) if own == name]

    def _shared(self, state: Any) -> list[Any]:
        owners = owners_of(state, self._params)
        return [o for o, own in zip(jax.tree.leaves(state), owners, strict=True) if own is None]


def _check_state(transformation: optax.GradientTransformation, params: dict[str, Any]) -> None:
    """Refuse state that cannot be stored."""
    state = jax.eval_shape(transformation.init, params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            place = jax.tree_util.keystr(path)
            raise UserError(
                f"the optimizer keeps a random key in its state ({place}), as add_noise and "
                "noisy_sgd do, from which all parameters draw in turn: which numbers one gets "
                "depends on all others. Leave the noise out of the optax chain (dropout belongs "
                "to the model), or keep a key for each parameter as integers (jax.random.key_data)"
            )


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """What a transformation raises when it is traced on a dict of parameters."""
    try:
        yield
    except UserError:
        raise
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise _not_to_be_run(error) from error
        raise UserError(
            f"the optimizer wants more than gradients ({error}): the loss of the step, as "
            "reduce_on_plateau, momo and polyak_sgd do, or the loss at other weights, as line "
            "searches and lbfgs do. Updates may begin before the loss is known, and it is not "
            "computed again. Use a transformation of gradients, such as adamw; a learning rate "
            "that follows the loss is set between steps (Trainer.set_hyperparameters)"
        ) from None
    except (AttributeError, KeyError, ValueError, AssertionError) as error:
        raise _not_to_be_run(error) from error


def _not_to_be_run(error: Exception) -> UserError:
    return UserError(
        "the optimizer cannot be run on a dict from parameter name to array: "
        f"{type(error).__name__}: {error}. It sees the trained parameters like that, and nothing "
        "else; what keeps a second set of weights as its parameters (optax.lookahead) does not fit "
        "(ema_decay keeps an average)"
    )


def _programs(
    transformation: optax.GradientTransformation, params: dict[str, Any]
) -> tuple[dict[str, LeafProgram], LeafProgram]:
    with _in_words():
        _check_state(transformation, params)
        return leaf_programs(transformation, params)
