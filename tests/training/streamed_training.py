"""Small streamed runs, and what they leave behind."""

import contextlib
import dataclasses

import numpy as np
import optax

from slidedp_jax import Trainer
from slidedp_jax.models import decoder
from slidedp_jax.models.config import ModelConfig, named_config
from slidedp_jax.models.token_loss import PLAIN
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.layout import ChunkLayout

BLOCK_SIZE = 256


def small_config(*, tied: bool = False, layers: int = 4) -> ModelConfig:
    """Compiles in seconds; head_dim is not hidden / heads, and no size is a multiple of a block."""
    return dataclasses.replace(
        named_config("tiny"),
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        num_hidden_layers=layers,
        layer_windows=(None,) * layers,
        tie_word_embeddings=tied,
    )


def strategy(*, rows_per_step: int | None = None, num_devices: int = 1, **changes) -> Strategy:
    """fp32 compute, one layer per chunk and eight host devices, unless changed.

    With `rows_per_step`, as many microbatches as those rows need on `num_devices`.
    """
    fields = {
        "layers_per_chunk": 1,
        "rows_per_microbatch": 4,
        "num_microbatches": 1,
        "compute_dtype": "float32",
        "num_host_devices": 8,
        "block_size": BLOCK_SIZE,
        "loss_chunk_tokens": 100,
    }
    fields |= changes
    if rows_per_step is not None:
        at_once = num_devices * fields["rows_per_microbatch"]
        fields["num_microbatches"] = -(-rows_per_step // at_once)
    return Strategy(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Figures of every step, then master weights and optimizer state by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray]
    state: list[dict[str, np.ndarray]]


@contextlib.contextmanager
def trainer(
    config,
    optimizer: optax.GradientTransformation,
    plan: Strategy,
    router_losses=None,
    token_loss=PLAIN,
    **options,
):
    """A trainer of `config` that is closed at the end; the kernel form is not measured."""
    model = decoder.build(config, router_losses=router_losses, token_loss=token_loss)
    options = {"kernel_form": "whole"} | options
    with Trainer(model, optimizer, strategy=plan, **options) as it:
        yield it


def train(config, optimizer, plan, batches, **options) -> Run:
    """One streamed step per batch."""
    with trainer(config, optimizer, plan, **options) as it:
        metrics = [it.step(batch) for batch in batches]
        return Run(
            losses=[figures.loss for figures in metrics],
            norms=[figures.grad_norm for figures in metrics],
            parameters=it.parameters(),
            state=optimizer_state(it.store),
        )


def optimizer_state(store) -> list[dict[str, np.ndarray]]:
    """Per state array (for adamw mu and nu), values by name of the parameters that have it."""
    kept = {name: len(store.state_specs(name)) for name in store.parameter_names}
    return [
        {name: store.read_state(name, index) for name in kept if index < kept[name]}
        for index in range(max(kept.values()))
    ]


def assert_bitwise_equal(run: Run, other: Run, *, norms: bool = True) -> None:
    """Losses, norms, weights and state agree in every bit."""
    assert run.losses == other.losses
    if norms:
        assert run.norms == other.norms
    assert differing(run, other) == []


def differing(run: Run, other: Run) -> list[str]:
    """Names of parameters whose weights or state differ in any bit."""
    trees = [(run.parameters, other.parameters), *zip(run.state, other.state, strict=True)]
    return sorted(
        {
            name
            for tree, other_tree in trees
            for name in tree
            if tree[name].tobytes() != other_tree[name].tobytes()
        }
    )


def assert_close_to_plain_adam(run: Run, plain, *, learning_rate: float) -> None:
    """Against (losses, norms, parameters, state) of `plain_training.train` with an Adam in it.

    Tolerances and their reasons: `test_against_plain_optax`.
    """
    losses, norms, expected, state = plain
    np.testing.assert_allclose(run.losses, losses, rtol=2e-6)
    np.testing.assert_allclose(run.norms, norms, rtol=5e-6)
    assert run.parameters.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            run.parameters[name], values, rtol=0, atol=0.01 * learning_rate, err_msg=name
        )
    adam = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
    for got, wanted in zip(run.state, adam, strict=True):
        for name, values in wanted.items():
            atol = 2e-5 * float(np.abs(values).max())
            np.testing.assert_allclose(got[name], values, rtol=0, atol=atol, err_msg=name)


def padding(layouts: list[ChunkLayout]) -> int:
    """Elements of all chunks that are not parameters."""
    return sum(layout.padded_size - layout.num_parameters for layout in layouts)
