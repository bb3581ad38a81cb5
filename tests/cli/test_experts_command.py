"""A mixture of experts through the command: it learns, resumes, averages and exports."""

import json

import numpy as np
import pytest
from runs import Inputs, losses, metrics, write_model
from safetensors.numpy import load_file

from slidedp_jax.train import main

EXPERTS = 4
SETTINGS = {
    "max_steps": 6,
    "save_steps": 3,
    "router_aux_loss_coef": 0.05,
    "router_z_loss_coef": 0.001,
    "ema_decay": 0.9,
    "export": True,
    "export_dtype": "float32",
    "packing": "true",
    "per_device_train_batch_size": 1,
    "rows_per_microbatch": 1,
}


@pytest.fixture(scope="module")
def mixture(inputs, tmp_path_factory) -> Inputs:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return Inputs(model=write_model(folder, experts=EXPERTS), rows=inputs.rows)


@pytest.fixture(scope="module")
def straight(mixture, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    mixture.train(out, **SETTINGS)
    return out


def test_it_learns_and_says_how_its_routers_do(straight):
    found = losses(straight)
    assert found[-1] < found[0] - 0.3
    for record in metrics(straight):
        of_routers = 0.05 * record["load_balance_loss"] + 0.001 * record["router_z_loss"]
        assert record["aux_loss"] == pytest.approx(of_routers, rel=1e-5)
        assert 1 / EXPERTS <= record["busiest_expert_share"] <= 1 / 2
        assert 0 < record["router_entropy"] <= np.log(EXPERTS)
    record = json.loads((straight / "run.json").read_text())
    portable = dict.fromkeys(("forward", "dgrad", "wgrad"), "portable")
    assert record["expert_products"] == {
        "mlp.experts.gate_up_proj": portable,
        "mlp.experts.down_proj": portable,
    }
    model = record["plan"]["model"]
    assert model["num_active_parameters"] < model["num_parameters"]


def test_it_resumes_bit_for_bit_and_exports_what_transformers_names(mixture, straight, tmp_path):
    out = tmp_path / "run"
    mixture.train(out, **SETTINGS | {"max_steps": 3, "export": False})
    (out / "run.json").write_text((straight / "run.json").read_text())
    mixture.train(out, **SETTINGS)
    assert losses(out) == losses(straight)
    source = load_file(mixture.model / "model.safetensors")
    assert f"model.layers.0.mlp.experts.{EXPERTS - 1}.up_proj.weight" in source
    for name in ("export", "export_ema"):
        one, other = (load_file(run / name / "model.safetensors") for run in (out, straight))
        assert one.keys() == source.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in source)
    trained = load_file(straight / "export" / "model.safetensors")
    moved = {key for key, value in source.items() if (value != trained[key]).any()}
    assert {f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in range(EXPERTS)} <= moved


@pytest.mark.parity
def test_the_export_loads_in_transformers_with_nothing_missing(mixture, straight):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        straight / "export", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    source = transformers.AutoModelForCausalLM.from_pretrained(mixture.model, dtype=torch.float32)
    ids = torch.arange(20, 60)[None] % 259
    with torch.no_grad():
        after, before = (it(ids).logits for it in (model, source))
    assert torch.isfinite(after).all()
    assert (after - before).abs().max() > 0.1


def test_router_losses_may_change_when_allowed(mixture, straight, tmp_path, capsys):
    out = tmp_path / "run"
    mixture.train(out, **SETTINGS | {"max_steps": 1, "export": False, "save_at_end": "true"})
    words = mixture.command(out, **SETTINGS | {"max_steps": 2, "router_aux_loss_coef": 0.0})
    assert main(words) == 1
    assert "--allow_changed router_aux_loss_coef" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router_aux_loss_coef": 0.1}, "are for mixtures of experts; qwen3 models have none"),
        ({"expert_products": "portable"}, "is for mixtures of experts; qwen3 models have none"),
    ],
)
def test_dense_models_have_neither_routers_nor_experts(inputs, tmp_path, capsys, settings, message):
    assert main(inputs.command(tmp_path / "run", **settings)) == 1
    assert message in capsys.readouterr().err


def test_kernels_that_cannot_run_here_are_refused_by_name(mixture, tmp_path, capsys):
    words = mixture.command(tmp_path / "run", expert_products="mosaic", dtype="bfloat16")
    assert main(words) == 1
    assert "the platform is cpu" in capsys.readouterr().err
