"""Learning rates against transformers and by hand; which parameters decay, and by how much."""

import math

import numpy as np
import pytest
from runs import losses, metrics, state
from safetensors.numpy import load_file

from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.learning_rate import learning_rate, num_warmup_steps
from slidedp_jax.run.optimizers import decays


def arguments(**settings):
    return TrainArguments(
        **({"model_name_or_path": "m", "train_file": ["f"], "output_dir": "o"} | settings)
    )


def rates(num_steps, **settings):
    schedule = learning_rate(arguments(learning_rate=2e-3, **settings), num_steps)
    return np.array([float(schedule(step)) for step in range(num_steps + 1)])


def test_cosine_by_hand():
    got = rates(10, lr_scheduler_type="cosine", warmup_steps=2)
    expected = [0, 1e-3] + [1e-3 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-10)


def test_linear_with_a_floor_by_hand():
    got = rates(4, lr_scheduler_type="linear", warmup_ratio=0.0, min_lr_ratio=0.5)
    np.testing.assert_allclose(got, [2e-3, 1.75e-3, 1.5e-3, 1.25e-3, 1e-3], rtol=1e-6)


def test_constant_ignores_the_ratio_but_not_the_steps():
    assert set(rates(5, lr_scheduler_type="constant")) == {np.float32(2e-3)}
    got = rates(4, lr_scheduler_type="constant_with_warmup", warmup_ratio=0.5)
    np.testing.assert_allclose(got, [0, 1e-3, 2e-3, 2e-3, 2e-3], rtol=1e-6)


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.03, 100, 3), (0.1, 7, 1), (0.3, 10, 3)])
def test_the_ratio_rounds_up(ratio, steps, warmup):
    assert num_warmup_steps(arguments(warmup_ratio=ratio), steps) == warmup
    assert num_warmup_steps(arguments(warmup_ratio=ratio, warmup_steps=5), steps) == 5


@pytest.mark.parity
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "constant_with_warmup"])
def test_rates_equal_transformers(kind, warmup):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    # In transformers "constant" has no warm-up at all; here warmup_steps is obeyed if given.
    name = "constant_with_warmup" if kind == "constant" and warmup else kind
    scheduler = transformers.get_scheduler(name, optimizer, warmup, 40)
    expected = []
    for _ in range(41):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    got = rates(40, lr_scheduler_type=kind, warmup_steps=warmup, warmup_ratio=0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parity
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("kind", "decay", "floor"),
    [
        ("inverse_sqrt", "cosine", 0.0),
        ("warmup_stable_decay", "cosine", 0.0),
        ("warmup_stable_decay", "linear", 0.2),
        ("warmup_stable_decay", "1-sqrt", 0.1),
    ],
)
def test_more_rates_equal_transformers(kind, decay, floor, warmup):
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    if kind == "inverse_sqrt":
        scheduler = optimization.get_inverse_sqrt_schedule(optimizer, warmup)
    else:
        scheduler = optimization.get_wsd_schedule(
            optimizer, warmup, 10, 40, decay_type=decay, min_lr_ratio=floor
        )
    expected = []
    for _ in range(41):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    shape = {"lr_decay_steps": 10, "lr_decay_type": decay, "min_lr_ratio": floor}
    got = rates(40, lr_scheduler_type=kind, warmup_steps=warmup, warmup_ratio=0.0, **shape)
    # There the warm-up begins at `min_lr_ratio`, here at 0 as with all schedules.
    first = warmup if floor else 0
    np.testing.assert_allclose(got[first:], expected[first:], rtol=1e-5, atol=1e-9)


def test_the_decay_by_hand():
    """A tenth of 20 steps by default; where it is longer than what is left, after the warm-up."""
    wsd = {"lr_scheduler_type": "warmup_stable_decay", "lr_decay_type": "linear"}
    got = rates(20, warmup_steps=2, **wsd)
    np.testing.assert_allclose(got, [0, 1e-3, *[2e-3] * 17, 1e-3, 0], rtol=1e-6, atol=1e-10)
    got = rates(6, warmup_steps=4, lr_decay_steps=100, **wsd)
    np.testing.assert_allclose(got, [0, 5e-4, 1e-3, 1.5e-3, 2e-3, 1e-3, 0], rtol=1e-6, atol=1e-10)
    got = rates(8, lr_scheduler_type="inverse_sqrt", warmup_steps=2, min_lr_ratio=0.6)
    expected = [0, 1e-3, *(2e-3 * max(0.6, (2 / k) ** 0.5) for k in range(2, 9))]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-10)


def test_the_rate_depends_on_the_step_alone():
    schedule = learning_rate(arguments(warmup_steps=3), 10)
    forward = [float(schedule(step)) for step in range(11)]
    backward = [float(schedule(step)) for step in reversed(range(11))]
    assert forward == backward[::-1]


def test_norms_and_biases_do_not_decay():
    assert decays("model.embed_tokens.weight", (8, 4)) and decays("lm_head.weight", (8, 4))
    assert decays("model.layers.0.self_attn.q_proj.weight", (4, 4))
    for name in (
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ):
        assert not decays(name, (4,))


@pytest.mark.thorough
def test_parameters_without_gradient_only_decay(inputs, tmp_path):
    """Rows of the embedding that no text holds: scaled by (1 - lr wd) per step, moments zero."""
    out = tmp_path / "run"
    inputs.train(out, max_steps=10, weight_decay=0.5)
    start, end = load_file(inputs.model / "model.safetensors"), state(out, 10)
    name = "model.embed_tokens.weight"
    unused = slice(259, None)
    expected = start[name][unused].astype(np.float64) * (1 - 1e-2 * 0.5) ** 10
    np.testing.assert_allclose(end[f"{name}/master"][unused], expected, rtol=1e-6)
    assert not end[f"{name}/state_0"][unused].any() and not end[f"{name}/state_1"][unused].any()


def test_norms_do_not_decay_in_a_run(inputs, tmp_path):
    """The first update with decay and without differs by the decay of the matrices alone."""
    for decay in (0.0, 0.5):
        inputs.train(tmp_path / str(decay), max_steps=1, weight_decay=decay)
    without, decayed = (state(tmp_path / str(decay), 1) for decay in (0.0, 0.5))
    for name, value in load_file(inputs.model / "model.safetensors").items():
        difference = decayed[f"{name}/master"] - without[f"{name}/master"]
        expected = -1e-2 * 0.5 * value * (value.ndim > 1)
        np.testing.assert_allclose(difference, expected, rtol=0, atol=5e-7, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "accumulation"), [(1, 3), (3, 1)])
def test_accumulation_equals_the_big_batch(inputs, straight, tmp_path, rows, accumulation):
    """Rows of unequal length: the mean is over supervised tokens of the whole step."""
    out = tmp_path / "run"
    inputs.train(
        out,
        max_steps=5,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        rows_per_microbatch=rows,
    )
    np.testing.assert_allclose(losses(out), losses(straight)[:5], rtol=1e-5)
    for key in ("grad_norm", "num_supervised_tokens"):
        got, expected = ([m[key] for m in metrics(run)][:5] for run in (out, straight))
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_logged_rates_are_those_used(inputs, tmp_path):
    out = tmp_path / "run"
    inputs.train(out, max_steps=4, lr_scheduler_type="linear", warmup_steps=2)
    got = [m["learning_rate"] for m in metrics(out)]
    np.testing.assert_allclose(got, [0, 5e-3, 1e-2, 5e-3], rtol=1e-6)
