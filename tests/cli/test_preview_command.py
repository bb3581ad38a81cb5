"""`slidedp preview`: what becomes of the rows, from the words of a training command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import ROOT

from slidedp_jax.cli import main as slidedp
from slidedp_jax.errors import UserError
from slidedp_jax.preview import DATA_FLAGS, main
from slidedp_jax.run.arguments import FIELDS, parse_arguments
from slidedp_jax.run.checks import load_inputs
from slidedp_jax.run.data_settings import example_settings

ANSWERS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture
def words(inputs):
    return ["--model_name_or_path", str(inputs.model), "--train_file", str(inputs.rows)]


def test_report_packing_and_examples(words, inputs, capsys):
    assert slidedp(["preview", *words]) == 0
    printed = capsys.readouterr().out
    for part in (
        f"data     {inputs.rows}",
        "rows     48 rows in, 48 kept, 0 dropped, 0 truncated",
        "lengths  shortest ",
        ", p50 ",
        ", p90 ",
        ", p99 ",
        ", longest ",
        "packing  one example per row: 48 rows",
        "example 0 (row 0)",
        "example 2 (row 2)",
        "<|im_start|>assistant\n⟦ab ab 14<|im_end|>⟧",
    ):
        assert part in printed
    assert "example 3" not in printed and "\x1b" not in printed


def test_the_words_of_a_training_command_are_taken(inputs, tmp_path, capsys):
    command = inputs.command(tmp_path / "out")
    assert main([*command, "--num-examples", "0"]) == 0
    assert "example" not in capsys.readouterr().out.split("packing  one example")[0]
    assert not (tmp_path / "out").exists()
    (tmp_path / "run.yaml").write_text(f"train_file: {inputs.rows}\nlearning_rate: 1e-4\n")
    words = ["--model_name_or_path", str(inputs.model), "--config", str(tmp_path / "run.yaml")]
    assert main(words) == 0 and "example 0" in capsys.readouterr().out


def test_validation_files_are_told_as_training_files_are(words, tmp_path, capsys):
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"messages": ANSWERS}, {"messages": []}, {"messages": ANSWERS[:1]}]
    rows.append({"prompt": "p", "completion": "long " * 99})
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    extra = ["--validation_file", str(held_out), "--skip_bad_rows", "--max_seq_length", "64"]
    assert main([*words, *extra, "--max_train_samples", "2"]) == 0
    training, evaluation = capsys.readouterr().out.split("for evaluation\n")
    assert "2 rows in, 2 kept" in training
    for part in (
        "4 rows in, 2 kept, 2 dropped, 1 truncated",
        "1 dropped: conversations without an assistant message",
        f"skipped  {held_out}:2: `messages` must be a list",
        "⟦a<|im_end|>⟧",
    ):
        assert part in evaluation


def test_chosen_rows(words, tmp_path, capsys):
    assert main([*words, "--rows", "5", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("example 5 (row 5)") < printed.index("example 1 (row 1)")
    assert "example 0" not in printed
    assert main([*words, "--rows", "48"]) == 1
    assert "48 rows, numbered from 0 to 47" in capsys.readouterr().err
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": ANSWERS[:1]}) + "\n" + json.dumps({"text": "ab"}))
    assert main([*words[:2], "--train_file", str(path), "--rows", "0"]) == 1
    assert "--rows 0: nothing of this row is trained on" in capsys.readouterr().err


def test_long_examples_are_shortened_unless_asked(words, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "ab " * 300}))
    command = [*words[:2], "--train_file", str(path)]
    assert main(command) == 0 and "tokens ...]" in capsys.readouterr().out
    assert main([*command, "--full"]) == 0 and "ab " * 299 in capsys.readouterr().out


def test_colours(words, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main([*words, "--color", "always"]) == 0 and "\x1b[32m⟦" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(words) == 0 and "\x1b[32m⟦" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(words) == 0 and "\x1b" not in capsys.readouterr().out


def test_a_folder_of_a_tokenizer_alone_and_one_without(inputs, tmp_path, capsys):
    """Nothing is read of the weights; ids need no tokenizer."""
    (tmp_path / "t").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "t" / name).write_bytes((inputs.model / name).read_bytes())
    rows = ["--train_file", str(inputs.rows)]
    assert main(["--model_name_or_path", str(tmp_path / "t"), *rows]) == 0
    assert "⟦ab ab 14" in capsys.readouterr().out
    (tmp_path / "t" / "tokenizer.json").unlink()
    assert main(["--model_name_or_path", str(tmp_path / "t"), *rows]) == 1
    assert f"error: {tmp_path / 't'} has no tokenizer.json" in capsys.readouterr().err
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [1, 2, 3]}')
    assert main(["--model_name_or_path", str(tmp_path / "t"), "--train_file", str(ids)]) == 0
    assert "1⟦2 3⟧" in capsys.readouterr().out


def test_wrong_commands(words, capsys):
    assert main([]) == 2 and "slidedp preview" in capsys.readouterr().out
    assert main([*words, "--max_seq_lenght", "9"]) == 2
    assert "did you mean max_seq_length" in capsys.readouterr().err
    assert main(words[:2]) == 2
    error = capsys.readouterr().err
    assert "--train_file" in error and "output_dir" not in error
    assert main([*words[:2], "--train_file", "no.jsonl"]) == 1
    assert "no.jsonl does not exist" in capsys.readouterr().err


def test_help_lists_what_makes_a_difference(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"--{name} " in printed for name in DATA_FLAGS)
    assert {"chat_template_path", "columns", "validation_file"} <= set(DATA_FLAGS) <= set(FIELDS)
    assert "--learning_rate" not in printed


def test_a_closed_pipe_is_no_error(words):
    command = [sys.executable, "-m", "slidedp_jax.cli", "preview", *words, "--num_examples", "48"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 0


def test_preview_and_training_read_rows_alike(inputs, monkeypatch):
    extra = ["--max_seq_length", "77", "--loss_on", "all", "--over_long", "drop"]
    extra += ["--truncation_keep", "end", "--append_eos", "no", "--skip_bad_rows"]
    extra += ["--max_train_samples", "3", "--columns", '{"text": "t"}']
    extra += ["--chat_template_kwargs", '{"a": 1}', "--output_dir", "o"]
    base = ["--model_name_or_path", str(inputs.model), "--train_file", str(inputs.rows)]
    args, read = parse_arguments([*base, *extra]), []

    def record(paths, tokenizer, settings, **_):
        read.append(settings)
        raise UserError("enough")

    monkeypatch.setattr("slidedp_jax.pretrained.load_examples", record)
    with pytest.raises(UserError, match="enough"):
        load_inputs(args, 1)
    assert read == [example_settings(args)]
    assert read != [example_settings(parse_arguments([*base, "--output_dir", "o"]))]
