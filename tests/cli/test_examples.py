"""The files in docs/examples/: each fits the schema and is planned for the machine that it names.

The model folder is made on the spot: its config.json has the true shapes, its tokenizer is of
bytes, and a dry run needs no weights.
"""

import json
import pathlib
import re
import shlex

import pytest
import yaml
from lanes import mostly_thorough
from runs import DEMO, ROOT

from slidedp_jax.cli import main as slidedp
from slidedp_jax.models.config import named_config
from slidedp_jax.pretrained import from_pretrained
from slidedp_jax.run.arguments import FIELDS, parse_arguments
from slidedp_jax.run.checks import load_inputs
from slidedp_jax.run.config_schema import config_schema, config_schema_text
from slidedp_jax.run.ways_out import plan_or_ways_out

EXAMPLES = sorted(path.stem for path in (ROOT / "docs" / "examples").glob("*.yaml"))
OFTEN = ("qwen3-0.6b_1x24gib", "qwen2.5-72b_4x24gib")


def write_folder(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Configuration and tokenizer of a known shape."""
    known = named_config(name)
    folder.mkdir()
    DEMO["write_tokenizer"](folder, [], 259)
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
    config = DEMO["model_config"](known.vocab_size) | {
        **{field: getattr(known, field) for field in fields},
        "head_dim": known.head_dim,
        "max_window_layers": known.num_hidden_layers,
        "max_position_embeddings": known.max_position_embeddings,
        "model_type": known.model_type,
        "architectures": [{"qwen2": "Qwen2", "qwen3": "Qwen3"}[known.model_type] + "ForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert from_pretrained(folder, weights=False).config.num_parameters == known.num_parameters
    return folder


@pytest.mark.parametrize("name", mostly_thorough(EXAMPLES, OFTEN))
def test_an_example_is_planned_for_its_machine(name, tmp_path, monkeypatch):
    path = ROOT / "docs" / "examples" / f"{name}.yaml"
    text = path.read_text()
    (words,) = re.findall(r"^#   (--dry_run .*)$", text, re.M)
    settings = yaml.safe_load(text)
    model = settings["model_name_or_path"]
    folder = write_folder(tmp_path / "model", model.split("/")[1].lower())
    chat = {"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 780}
    row = json.dumps({"messages": chat}) + "\n"
    rows = settings["per_device_train_batch_size"] * settings.get("num_devices", 1)
    monkeypatch.chdir(tmp_path)
    for file in ("chats.jsonl", "held_out.jsonl"):
        pathlib.Path(file).write_text(row * (2 * rows))
    command = ["--config", str(path), "--model_name_or_path", str(folder), *shlex.split(words)]
    args = parse_arguments(command)
    assert args.hardware == "rtx4090" and args.num_devices == settings.get("num_devices")
    devices = args.num_devices or 1
    inputs = load_inputs(args, devices)
    plan = plan_or_ways_out(args, inputs, devices)
    memory, job = plan.chosen.memory, plan.job
    assert memory.host_bytes <= job.host_budget_bytes <= args.host_memory_gib * 2**30
    assert memory.device_bytes <= job.device_budget_bytes < 24 * 2**30
    assert job.batch.num_rows * job.batch.seq_length == 32_768 * devices
    size = re.search(r"_(\d)x24gib$", name)[1]
    assert int(size) == (args.num_devices or 1) and f"docs/examples/{name}.yaml" in text


def test_the_schema_is_that_of_the_settings(capsys):
    assert slidedp(["schema"]) == 0
    assert capsys.readouterr().out == config_schema_text()
    stored = ROOT / "docs" / "config.schema.json"
    assert stored.read_text() == config_schema_text(), "slidedp schema > docs/config.schema.json"
    assert list(config_schema()["properties"]) == list(FIELDS)
    assert slidedp(["schema", "x"]) == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_fit_the_schema_and_wrong_ones_do_not(name):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(config_schema())
    settings = yaml.safe_load((ROOT / "docs" / "examples" / f"{name}.yaml").read_text())
    assert not [*validator.iter_errors(settings)]
    for wrong in (
        {"weigth_decay": 0.1},
        {"learning_rate": "fast"},
        {"max_steps": 1.5},
        {"optim": "adam"},
        {"weight_decay_by_name": {"*": "much"}},
        {"packing": "perhaps"},
    ):
        assert [*validator.iter_errors(settings | wrong)], wrong
    for right in ({"learning_rate": "1e-5"}, {"max_grad_norm": None}, {"train_file": "a.jsonl"}):
        assert not [*validator.iter_errors(settings | right)], right
