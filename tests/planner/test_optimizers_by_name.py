"""Bytes of optimizer state by name, against the states that optax makes."""

import dataclasses

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.optimizers import LEANER, OPTIMIZERS, muon_updates, state_bytes
from slidedp_jax.run import optimizers
from slidedp_jax.run.arguments import TrainArguments

ARGS = TrainArguments(model_name_or_path="m", train_file=["f"], output_dir="o")
COUNTERS_BYTES = 64


@pytest.mark.parametrize("model", ["tiny", "qwen3-8b", "qwen2.5-0.5b", "olmoe-1b-7b"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_are_those_of_optax(name, model):
    shapes = named_config(model).parameter_shapes()
    made = optimizers.make_optimizer(dataclasses.replace(ARGS, optim=name), 1)
    expected = optimizers.state_bytes(made, shapes)
    assert 0 <= expected - state_bytes(name, shapes) <= COUNTERS_BYTES


def test_names_are_those_of_the_training_command():
    assert set(OPTIMIZERS) == set(optimizers._OPTIMIZERS) == set(LEANER)


def test_leaner_ones_keep_less():
    shapes = named_config("qwen3-0.6b").parameter_shapes()
    for name, others in LEANER.items():
        kept = [state_bytes(one, shapes) for one in (name, *others)]
        assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_muon_leaves_experts_to_adam():
    """Across an array of experts there is nothing to orthogonalise."""
    assert muon_updates("model.layers.0.self_attn.q_proj.weight", (64, 64))
    assert muon_updates("model.layers.0.mlp.gate.weight", (6, 64))
    assert not muon_updates("model.layers.0.mlp.experts.down_proj", (6, 64, 44))
