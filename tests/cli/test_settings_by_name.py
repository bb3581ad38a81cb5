"""Rates and decay by patterns of names; label smoothing and z-loss as settings of a run."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import losses, state
from safetensors.numpy import load_file

from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import TrainArguments, parse_arguments
from slidedp_jax.run.optimizers import check_patterns, make_optimizer
from slidedp_jax.train import main

MATRIX, NORM, EMBED = (
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)
SHAPES = {MATRIX: (6, 5), NORM: (5,), EMBED: (7, 5)}
NEEDED = {"model_name_or_path": "m", "train_file": ["f"], "output_dir": "o"}
RATES = {"*.embed_tokens.*": 3e-2, "*": 1e-2}
DECAYS = {"*norm.weight": 0.3, "model.embed_tokens.*": 0.0}


def arguments(**settings):
    common = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    return TrainArguments(**(NEEDED | common | settings))


def trees():
    rng = np.random.default_rng(0)
    return [
        {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in s.items()}
        for s in (SHAPES, SHAPES)
    ]


@pytest.mark.parametrize("optim", ["adamw", "lion", "sgd"])
def test_rates_and_decays_are_those_of_groups_in_optax(optim):
    """Against one optimizer per parameter, each with the numbers that the patterns give it."""
    params, gradients = trees()
    own = {MATRIX: (1e-2, 0.1), NORM: (1e-2, 0.3), EMBED: (3e-2, 0.0)}
    made = make_optimizer(
        arguments(optim=optim, learning_rate_by_name=RATES, weight_decay_by_name=DECAYS), 10
    )
    got, _ = made.update(gradients, made.init(params), params)
    for name, (rate, decay) in own.items():
        alone = {
            "adamw": lambda r, d: optax.adamw(r, weight_decay=d),
            "lion": lambda r, d: optax.lion(r, b1=0.9, b2=0.999, weight_decay=d),
            "sgd": lambda r, d: optax.chain(
                optax.trace(0.9), optax.add_decayed_weights(d), optax.scale(-r)
            ),
        }[optim](rate, decay)
        one = {name: params[name]}
        expected, _ = alone.update({name: gradients[name]}, alone.init(one), one)
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6, err_msg=name)


def test_without_patterns_it_is_optax_in_every_bit():
    params, gradients = trees()

    def mask(tree):
        return {name: name != NORM for name in tree}

    plain = {
        "adamw": optax.adamw(1e-2, weight_decay=0.1, mask=mask),
        "lion": optax.lion(1e-2, b1=0.9, b2=0.999, weight_decay=0.1, mask=mask),
    }
    for optim, expected in plain.items():
        made = make_optimizer(arguments(optim=optim), 10)
        for one, other in zip(
            made.update(gradients, made.init(params), params)[0].values(),
            expected.update(gradients, expected.init(params), params)[0].values(),
            strict=True,
        ):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"model.embed.*": 1e-3}, "that it fits, there are none. Names are like model.embed_tok"),
        ({"*": 1e-3, "*norm*": 1e-3}, "'\\*norm\\*' decides nothing.*all are taken by earlier"),
    ],
)
def test_a_pattern_that_decides_nothing_is_refused(patterns, said):
    with pytest.raises(UserError, match=said):
        check_patterns(arguments(learning_rate_by_name=patterns), SHAPES)
    check_patterns(arguments(learning_rate_by_name=RATES, weight_decay_by_name=DECAYS), SHAPES)


def test_numbers_of_patterns_are_read_as_others(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate_by_name:\n  '*.embed_tokens.*': 1e-6\n")
    words = ["--model_name_or_path", "m", "--train_file", "f", "--output_dir", "o"]
    got = parse_arguments([*words, "--config", str(path)])
    assert got.learning_rate_by_name == {"*.embed_tokens.*": 1e-6}
    for bad in ('{"a": "much"}', '{"a": -1}', '{"a": [1]}', "[1]"):
        with pytest.raises(UserError, match="weight_decay_by_name"):
            parse_arguments([*words, "--weight_decay_by_name", bad])
    with pytest.raises(UserError, match="not for muon"):
        parse_arguments([*words, "--optim", "muon", "--weight_decay_by_name", '{"*": 0.1}'])
    with pytest.raises(UserError, match="a learning_rate above 0"):
        arguments(learning_rate=0.0, learning_rate_by_name={"*": 1e-3})


def test_a_run_obeys_patterns_and_loss_settings_and_refuses_others_later(
    inputs, straight, tmp_path, capsys
):
    """Rate 0 leaves the head as it is; smoothing and z-loss raise the first loss as they must."""
    out = tmp_path / "run"
    settings = {
        "max_steps": 1,
        "learning_rate_by_name": json.dumps({"lm_head.*": 0}),
        "weight_decay": 0.5,
        "label_smoothing_factor": 0.2,
        "z_loss_coef": 1e-3,
    }
    inputs.train(out, **settings)
    start, end = load_file(inputs.model / "model.safetensors"), state(out, 1)
    head = "lm_head.weight"
    assert end[f"{head}/master"].tobytes() == start[head].astype(np.float32).tobytes()
    name = "model.embed_tokens.weight"
    assert np.abs(end[f"{name}/master"] - start[name]).max() > 1e-3
    record = json.loads((out / "run.json").read_text())["arguments"]
    assert record["label_smoothing_factor"] == 0.2 and record["z_loss_coef"] == 1e-3
    # The model is random, so Z is near log V and smoothing changes little.
    extra = 1e-3 * np.log(272) ** 2
    assert losses(out)[0] == pytest.approx(losses(straight)[0] + extra, rel=0.02)
    assert losses(out)[0] > losses(straight)[0]
    assert main(inputs.command(out, **(settings | {"max_steps": 2, "z_loss_coef": 0}))) == 1
    assert "--allow_changed z_loss_coef" in capsys.readouterr().err
