"""`python -m planner`: output, exit codes, and no JAX anywhere behind it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slidedp_jax.planner.command import main
from slidedp_jax.planner.command_line import _parser

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
    job = [*JOB, "--no-resident_state"]
    assert main([*job, "--total_tokens", "36000000", "--price_per_device_hour", "2"]) == 0
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
        "host: 16 cores, 128.00 GiB, 52 GB/s to each GPU and back (assumed; --host_cores, "
        "--host_memory_gib, --link_gb_per_s)",
        "disk: 142.36 GiB: 3 checkpoints of 44.95 GiB (2 kept, one being written)",
        "  a save takes the disk about 32.2 s at 1.5 GB/s (assumed)",
        "  ten million tokens: 0.",
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


TOO_LARGE = ["--preset", "qwen3-32b", "--hardware", "rtx4090", "--tokens_per_step", "32768"]
ON_A_SMALL_HOST = ["--preset", "Qwen/Qwen3-8B", "--hardware", "rtx4090"]
ON_A_SMALL_HOST += ["--tokens_per_step", "16384", "--seq_length", "2048", "--host_memory_gib", "96"]


def test_what_does_not_fit_exits_with_1(capsys):
    assert main(TOO_LARGE) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "host memory: needs" in captured.err
    assert "has 120.00 GiB" in captured.err
    assert "(assumed; --host_cores, --host_memory_gib, --link_gb_per_s)" in captured.err


def planned(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    return plan


def test_what_would_fit_is_named_with_what_it_needs(capsys):
    assert main(ON_A_SMALL_HOST) == 1
    error = capsys.readouterr().err
    assert "--optim lion keeps 4 bytes" in error and "--freeze" in error
    for name, longer in (("lion", ""), ("adafactor", " or more")):
        plan = planned(capsys, *ON_A_SMALL_HOST, "--optim", name)
        need = plan["chosen"]["memory"]["host_bytes"] / 2**30
        line = f"- --optim {name} fits: it needs {need:.2f} GiB of host memory, "
        assert f"{line}{plan['chosen']['time']['step_s']:.2f} s{longer} a step.\n" in error


def test_where_no_optimizer_helps_its_need_is_said(capsys):
    assert main([*ON_A_SMALL_HOST[:-1], "40", "--optim", "lion"]) == 1
    error = capsys.readouterr().err
    assert "--optim adafactor still needs " in error and "--optim lion still" not in error
    assert main([*ON_A_SMALL_HOST, "--optimizer_state_bytes", "9"]) == 1  # none is named
    assert "--optim lion fits" not in capsys.readouterr().err


def test_fewer_rows_that_fit_the_devices_are_named(capsys):
    job = ["--preset", "qwen3-8b", "--hardware", "rtx4090", "--host_memory_gib", "500"]
    assert main([*job, "--tokens_per_step", "1048576"]) == 1
    error = capsys.readouterr().err
    plan = planned(capsys, *job, "--tokens_per_step", str(64 * 4096))
    need = plan["chosen"]["memory"]["device_bytes"] / 2**30
    line = "- a step of 64 rows of 4,096 tokens (--tokens_per_step 262144) fits: "
    assert line in error and f", {need:.2f} GiB of each device, " in error
    assert main([*job, "--tokens_per_step", "131072", "--device_memory_gib", "6"]) == 1
    line = "- a step of 1 row of 4,096 tokens (--tokens_per_step 4096) still needs "
    assert line in capsys.readouterr().err


def test_fewer_rows_that_fit_the_host_are_named(capsys):
    job = ["--preset", "qwen3-8b", "--hardware", "rtx4090"]
    assert main([*job, "--tokens_per_step", "32768"]) == 1
    error = capsys.readouterr().err
    plan = planned(capsys, *job, "--tokens_per_step", "16384")
    need = plan["chosen"]["memory"]["host_bytes"] / 2**30
    line = "- a step of 4 rows of 4,096 tokens (--tokens_per_step 16384) fits: "
    assert f"{line}{need:.2f} GiB of host memory, " in error
    assert f", {plan['chosen']['time']['tokens_per_s']:,.0f} tokens/s.\n" in error


def test_what_is_stated_rules_out_some_ways(capsys):
    assert main([*ON_A_SMALL_HOST, "--resident_state"]) == 1
    error = capsys.readouterr().err
    assert "--optim lion fits" in error and "- --optim adafactor" not in error


def test_json_also_of_what_does_not_fit(capsys):
    assert main([*ON_A_SMALL_HOST, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["assumed"] == [
        "host_cores",
        "link_gb_per_s",
        "device_memory_gib",
    ]
    (limit,) = found["limits"]
    assert (
        limit["name"] == "host memory" and limit["need_bytes"] > limit["have_bytes"] == 96 * 2**30
    )
    lion, adafactor, smaller, *others = found["ways_out"]
    assert [way.split()[1] for way in (lion, adafactor)] == ["lion", "adafactor"]
    assert any("--host_memory_gib" in way for way in others)
    assert smaller.startswith("a step of 1 row of 2,048 tokens (--tokens_per_step 2048) still ")
    assert "does not fit" in found["message"]


def test_optimizers_by_name_keep_what_they_keep(capsys):
    def kept(*extra):
        plan = planned(capsys, *JOB, "--no-resident_state", *extra)
        assert plan["disk"]["checkpoint_bytes"] == pytest.approx(
            4 * plan["model"]["num_parameters"]
            + plan["optimizer_state_bytes"] * plan["model"]["num_trained_parameters"]
        )
        return plan["optimizer_state_bytes"]

    assert kept() == kept("--optim", "adamw") == 8
    assert kept("--optim", "lion") == kept("--optim", "sgd") == 4
    assert kept("--optim", "adafactor") < 0.01 and 4 < kept("--optim", "muon") < 5
    assert kept("--optim", "lion", "--ema_decay", "0.999") == 8
    assert kept("--freeze", "model.embed_tokens.*") == 8


def test_what_training_keeps_on_the_host_is_planned_there(capsys):
    for extra in ([], ["--freeze", "model.norm.*"]):
        assert planned(capsys, *JOB, *extra)["chosen"]["strategy"]["resident_chunks"] > 0
    assert planned(capsys, *JOB, "--optim", "muon")["chosen"]["strategy"]["resident_chunks"] == 0


def test_frozen_parameters_and_whole_matrices_are_noted(capsys):
    assert main([*JOB, "--freeze", "model.embed_tokens.*", "--optim", "muon"]) == 0
    text = capsys.readouterr().out
    assert "note: 1 parameter array frozen, 3.63B of 4.02B parameters trained" in text
    assert "note: muon updates whole matrices on the host" in text
    notes = planned(capsys, *JOB, "--freeze", "model.embed_tokens.*", "--optim", "muon")["notes"]
    assert [note for note in text.splitlines() if note.startswith("note: ")] == [
        f"note: {note}" for note in notes
    ]


def test_what_is_stated_is_not_assumed(capsys):
    job = [*JOB, "--no-resident_state"]
    plan = planned(capsys, *job, "--host_cores", "8", "--link_gb_per_s", "12.5")
    assert plan["assumed"] == ["host_memory_gib", "device_memory_gib"]
    slower = plan["chosen"]["time"]["step_s"]
    assert slower > planned(capsys, *job)["chosen"]["time"]["step_s"]
    assert main([*job, "--host_cores", "8"]) == 0
    assert "host: 8 cores, " in capsys.readouterr().out
    assert main([*job, "--host_cores", "1"]) == 0
    assert "host: 1 core, " in capsys.readouterr().out


def test_one_row_is_one(capsys):
    job = ["--preset", "qwen3-0.6b", "--hardware", "h200", "--tokens_per_step", "4096"]
    assert main(job) == 0
    assert "qwen3-0.6b, 1 row x 4096 = 4,096 tokens per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "qwen9", *JOB[2:]], "No preset is named 'qwen9'"),
        ([*JOB, "--seq_length", "1000"], "must be a multiple of --seq_length 1000"),
        ([*JOB, "--document_length", "5000"], "between 1 and --seq_length 4096"),
        ([*JOB, "--host_memory_gib", "lots"], "give a number above 0, or 'here'"),
        ([*JOB, "--host_memory_gib", "-1"], "--host_memory_gib is -1.0; give a number above 0"),
        ([*JOB, "--host_cores", "0"], "--host_cores is 0; give a number above 0"),
        ([*JOB, "--num_devices", "0"], "at least one"),
        ([*JOB, "--max_grad_norm", "-1"], "use 0 for none"),
        ([*JOB, "--tokens_per_step", "0"], "must be a multiple of --seq_length"),
        ([*JOB, "--hardware", "rtx6090"], "No hardware preset is named 'rtx6090'"),
        ([*JOB, "--freeze", "nothing.*"], "no parameter is called 'nothing.*'"),
        ([*JOB, "--ema_decay", "1"], "between 0 and 1"),
        ([*JOB, "--save_total_limit", "0"], "save_total_limit is 0"),
        ([*JOB, "--optimizer_state_bytes", "-1"], "--optimizer_state_bytes is -1.0"),
        ([*JOB, "--optim", "muon", "--resident_state"], "not for --optim muon"),
        ([*JOB, "--total_tokens", "0"], "--total_tokens is 0"),
        ([*JOB, "--price_per_device_hour", "2"], "needs --total_tokens"),
        ([*JOB, "--total_tokens", "9", "--price_per_device_hour", "nan"], "hour is nan; give a"),
        ([*JOB, "--total_tokens", "9", "--price_per_device_hour", "-3"], "hour is -3.0; give a"),
        ([*JOB, "--total_tokens", "9", "--price_per_device_hour", "inf"], "hour is inf; give a"),
        ([*JOB, "--max_grad_norm", "nan"], "--max_grad_norm is nan; use 0 for none"),
        ([*JOB, "--layers_per_chunk", "999"], "the model has 36 layers"),
        ([*JOB, "--host_memory_budget_gib", "999"], "h200 has 128.00 GiB, use more than 0 and at"),
        ([*JOB, "--num_devices", "2", "--num_host_devices", "3"], "must be a multiple of the 2"),
        (["--model_name_or_path", "no/where", *JOB[2:]], "There is no folder no/where here."),
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
FOLDER_JOB = ["--hardware", "h200", "--tokens_per_step", "8192", "--json", "--no-resident_state"]


def _plan_of_folder(folder, config, capsys):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["--model_name_or_path", str(folder), *FOLDER_JOB]) == 0
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


@pytest.mark.thorough
def test_a_window_that_is_switched_off_changes_nothing(tmp_path, capsys):
    plan = _plan_of_folder(tmp_path / "a", QWEN3_06B, capsys)
    off = QWEN3_06B | {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 28}
    assert _plan_of_folder(tmp_path / "b", off, capsys) == plan


def test_a_folder_without_config_exits_with_2(tmp_path, capsys):
    assert main(["--model_config", str(tmp_path), *FOLDER_JOB]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_unknown_flags_are_errors_of_one_line(capsys):
    for words, message in (
        (["--num_device", "2"], "unknown flag --num_device (did you mean --num_devices"),
        (["--num_device=2"], "unknown flag --num_device (did you mean --num_devices"),
        (["--num_device", "2", "--zz=1"], "unknown flags --num_device (did you mean --num_devices"),
        (["more"], "unknown word more"),
        (["--compute_dtype", "int4"], "argument --compute_dtype/--dtype: invalid choice: 'int4'"),
        (["--optim", "lion", "--optimizer_state_bytes", "4"], "not allowed with argument --optim"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*JOB, *words])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") or message in error
        assert error.count("\n") == 1 and "`python -m planner --help` lists" in error


def test_every_flag_has_a_help_and_the_name_of_the_command_is_its_own(capsys):
    parser = _parser("x plan")
    assert all(action.help for action in parser._actions)
    with pytest.raises(SystemExit):
        main(["--help"], prog="slidedp plan")
    assert capsys.readouterr().out.startswith("usage: slidedp plan ")


def test_this_machines_memory(capsys):
    assert main(["--preset", "tiny", "--hardware", "cpu", "--tokens_per_step", "256",
                 "--seq_length", "64", "--host_memory_gib", "here"]) == 0  # fmt: skip
    captured = capsys.readouterr()
    assert "GiB available, bound by" in captured.err
    assert "not measured" in captured.out


def test_packed_documents_cost_less_attention(capsys):
    def model_flops(*extra):
        assert main([*JOB, "--no-resident_state", "--json", *extra]) == 0
        return json.loads(capsys.readouterr().out)["chosen"]["time"]["model_flops"]

    assert model_flops("--document_length", "500") < model_flops()


def test_the_pool_limit_is_mentioned_when_gradients_exceed_it(capsys):
    arguments = ["--preset", "qwen3-32b", "--hardware", "h200", "--num_devices", "8",
                 "--tokens_per_step", "65536", "--host_memory_gib", "820",
                 "--optimizer_state_bytes", "4", "--gradient_route", "host_sum"]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "above its limit of 492 GiB: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=" in out
    assert main([*arguments, "--host_memory_gib", "2000"]) == 0
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" not in capsys.readouterr().out
