"""`python -m planner`: output, exit codes, and no JAX anywhere behind it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slidedp_jax.planner.command import main

ROOT = Path(__file__).parents[2]
JOB = ["--preset", "qwen3-4b", "--hardware", "h200", "--tokens_per_step", "32768"]


def test_planner_imports_no_jax():
    modules = sorted(
        f"slidedp_jax.planner.{path.stem}"
        for path in (ROOT / "planner").glob("*.py")
        if path.stem not in ("__init__", "__main__")
    )
    assert "slidedp_jax.planner.search" in modules
    code = (
        f"import sys, {', '.join(modules)}\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'jax', 'jaxlib', 'flax', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "planner", *JOB], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "qwen3-4b, 8 rows x 4096 = 32,768 tokens per step" in done.stdout


def test_text_has_every_part(capsys):
    assert main([*JOB, "--total_tokens", "36000000", "--price_per_device_hour", "2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "strategy (36 layer chunks)",
        "update_policy          deferred",
        "memory of each device:",
        "boundary_activations",
        "host memory:",
        "optimizer_state",
        "step:",
        "tokens/s, MFU",
        "host_update",
        "next best",
        "36,000,000 tokens:",
        "cost ",
    ):
        assert part in text


def test_json_agrees_with_itself(capsys):
    assert main([*JOB, "--json", "--max_grad_norm", "0", "--total_tokens", "1000"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"]["strategy"]["update_policy"] == "eager"
    memory = plan["chosen"]["memory"]
    assert memory["device_bytes"] == pytest.approx(sum(memory["device"].values()))
    assert memory["host_bytes"] == pytest.approx(sum(memory["host"].values()))
    time = plan["chosen"]["time"]
    assert time["tokens_per_s"] == pytest.approx(32768 / time["step_s"])
    assert plan["completion"]["hours"] == pytest.approx(1000 / time["tokens_per_s"] / 3600)
    assert plan["completion"]["cost"] is None
    assert plan["model"]["num_parameters"] == 4_022_468_096


def test_what_does_not_fit_exits_with_1(capsys):
    code = main(["--preset", "qwen3-32b", "--hardware", "rtx4090", "--tokens_per_step", "32768"])
    assert code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "host memory: needs" in captured.err
    assert "has 120.00 GiB" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "qwen9", *JOB[2:]], "No preset is named 'qwen9'"),
        ([*JOB, "--seq_length", "1000"], "must be a multiple of --seq_length 1000"),
        ([*JOB, "--document_length", "5000"], "between 1 and --seq_length 4096"),
        ([*JOB, "--host_memory_gib", "lots"], "give a number above 0, or 'here'"),
        ([*JOB, "--host_memory_gib", "-1"], "give a number above 0, or 'here'"),
        ([*JOB, "--num_devices", "0"], "at least one"),
        ([*JOB, "--max_grad_norm", "-1"], "use 0 for none"),
    ],
)
def test_wrong_commands_exit_with_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
FOLDER_JOB = ["--hardware", "h200", "--tokens_per_step", "8192", "--json"]


def _plan_of_folder(folder, config, capsys):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["--model_config", str(folder), *FOLDER_JOB]) == 0
    by_folder = json.loads(capsys.readouterr().out)
    assert main(["--model_config", str(folder / "config.json"), *FOLDER_JOB]) == 0
    assert json.loads(capsys.readouterr().out) == by_folder
    return by_folder


def test_a_folder_is_planned_by_its_config_not_by_its_name(tmp_path, capsys):
    plan = _plan_of_folder(tmp_path / "Qwen3-8B", QWEN3_06B, capsys)
    assert plan["model"]["num_parameters"] == 596_049_920
    assert _plan_of_folder(tmp_path / "foo", QWEN3_06B, capsys) == plan
    pruned = _plan_of_folder(tmp_path / "bar", QWEN3_06B | {"num_hidden_layers": 26}, capsys)
    layer = 15_730_944  # 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) + 2 * 1024 + 2 * 128
    assert pruned["model"]["num_parameters"] == 596_049_920 - 2 * layer


def test_a_window_that_is_switched_off_changes_nothing(tmp_path, capsys):
    plan = _plan_of_folder(tmp_path / "a", QWEN3_06B, capsys)
    off = QWEN3_06B | {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 28}
    assert _plan_of_folder(tmp_path / "b", off, capsys) == plan


def test_a_folder_without_config_exits_with_2(tmp_path, capsys):
    assert main(["--model_config", str(tmp_path), *FOLDER_JOB]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_unknown_flags_are_errors():
    with pytest.raises(SystemExit) as caught:
        main([*JOB, "--num_device", "2"])
    assert caught.value.code == 2


def test_this_machines_memory(capsys):
    assert main(["--preset", "tiny", "--hardware", "cpu", "--tokens_per_step", "256",
                 "--seq_length", "64", "--host_memory_gib", "here"]) == 0  # fmt: skip
    captured = capsys.readouterr()
    assert "GiB available, bound by" in captured.err
    assert "not measured" in captured.out


def test_packed_documents_cost_less_attention(capsys):
    def model_flops(*extra):
        assert main([*JOB, "--json", *extra]) == 0
        return json.loads(capsys.readouterr().out)["chosen"]["time"]["model_flops"]

    assert model_flops("--document_length", "500") < model_flops()


def test_the_pool_limit_is_mentioned_when_gradients_exceed_it(capsys):
    arguments = ["--preset", "qwen3-32b", "--hardware", "h200", "--num_devices", "8",
                 "--tokens_per_step", "65536", "--host_memory_gib", "770",
                 "--optimizer_state_bytes", "4", "--gradient_route", "host_sum"]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "above its limit of 462 GiB: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=" in out
    assert main([*arguments, "--host_memory_gib", "2000"]) == 0
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" not in capsys.readouterr().out
