"""Settings from file and command line: spellings, precedence, and what unknown names get."""

import json
import re
import typing

import pytest

from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import (
    FIELDS,
    TrainArguments,
    convert,
    parse_arguments,
)
from slidedp_jax.run.settings_help import help_text
from slidedp_jax.train import main

NEEDED = ["--model_name_or_path", "m", "--train_file", "a.jsonl", "--output_dir", "o"]


@pytest.fixture
def from_file(tmp_path):
    def parse(text, *words):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return parse_arguments([*NEEDED, "--config", str(path), *words])

    return parse


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", '"1e-5"', "0.00001", "1E-5", "'1.0e-5'"])
def test_small_numbers(from_file, text):
    for args in (
        from_file(f"learning_rate: {text}"),
        parse_arguments([*NEEDED, "--learning_rate", text.strip("\"'")]),
        parse_arguments([*NEEDED, f"--learning-rate={text.strip(chr(34) + chr(39))}"]),
    ):
        assert args.learning_rate == 1e-5 and type(args.learning_rate) is float


@pytest.mark.parametrize("text", ["None", "null", "none", "~", "'None'", ""])
def test_nothing(from_file, text):
    assert from_file(f"max_grad_norm: {text}").clip is None
    assert from_file(f"save_steps: {text}").save_steps is None
    word = text.strip("'")
    assert parse_arguments([*NEEDED, "--max_grad_norm", word]).max_grad_norm is None
    with pytest.raises(UserError, match="learning_rate"):
        parse_arguments([*NEEDED, "--learning_rate", word])


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("no", False), ("true", True), ("False", False)]
)
def test_truth(from_file, text, value):
    for quoted in (text, f'"{text}"'):
        assert from_file(f"packing: {quoted}").packing is value
    assert parse_arguments([*NEEDED, "--packing", text]).packing is value
    assert parse_arguments([*NEEDED, "--packing"]).packing is True


def test_zero_limit_means_no_clipping(from_file):
    assert from_file("max_grad_norm: 0").clip is None
    assert from_file("max_grad_norm: 0.5").clip == 0.5


@pytest.mark.parametrize("from_file", [False, True])
def test_every_choice_of_every_setting_is_taken_and_no_other(from_file):
    hints = typing.get_type_hints(TrainArguments)
    names = [name for name, hint in hints.items() if choices_of(hint)]
    assert {"optim", "weight_route", "gradient_route", "dtype", "loss_on"} <= set(names)
    for name in names:
        for value in choices_of(hints[name]):
            assert convert(name, value if from_file else [value]) == value
        with pytest.raises(UserError, match=f"{name} is 'nonsense'; it can be"):
            convert(name, "nonsense" if from_file else ["nonsense"])
    assert convert("gradient_route", "null") is None


def choices_of(hint):
    """Values of a Literal, also where None is allowed beside them."""
    parts = (hint, *typing.get_args(hint))
    found = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return typing.get_args(found[0]) if found else ()


@pytest.mark.parametrize(
    "settings", [{"optim": "muon"}, {"optim": "adafactor"}, {"gradient_route": "host_sum"}]
)
def test_resident_state_is_refused_where_it_cannot_be(settings):
    base = {"model_name_or_path": "m", "train_file": ["f"], "output_dir": "o"}
    TrainArguments(**base, **settings)
    with pytest.raises(UserError, match="resident_state"):
        TrainArguments(**base, **settings, resident_state=True)


def test_whole_numbers(from_file):
    assert from_file("max_steps: 1e3").max_steps == 1000
    for bad in ("1.5", "many", "[1, 2]", "true", "inf", "nan"):
        with pytest.raises(UserError, match="max_steps"):
            from_file(f"max_steps: {bad}")


@pytest.mark.parametrize("bad", ["nan", "inf", "-1", "soon"])
def test_numbers_out_of_range(from_file, bad):
    with pytest.raises(UserError, match="learning_rate"):
        from_file(f"learning_rate: '{bad}'")


def test_the_command_line_wins_and_the_rest_of_the_file_stays(from_file):
    args = from_file(
        "learning_rate: 1e-3\nseed: 7\ntrain-file: [x, y]\n", "--learning_rate", "2e-3"
    )
    assert args.learning_rate == 2e-3 and args.seed == 7
    assert args.train_file == ["a.jsonl"]


def test_lists_and_mappings(from_file, tmp_path):
    (tmp_path / "all.yaml").write_text(
        "model_name_or_path: m\ntrain-file: [x, y]\noutput_dir: o\ncolumns: {text: body}\n"
    )
    args = parse_arguments(["--config", str(tmp_path / "all.yaml")])
    assert args.train_file == ["x", "y"] and args.columns == {"text": "body"}
    args = parse_arguments(
        [*NEEDED, "--columns", '{"text": "body"}', "--validation-file", "1", "2"]
    )
    assert args.columns == {"text": "body"} and args.validation_file == ["1", "2"]
    with pytest.raises(UserError, match="columns"):
        parse_arguments([*NEEDED, "--columns", "text=body"])
    assert from_file("train_file: one.jsonl").train_file == ["a.jsonl"]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("weigth_decay", "weight_decay"),
        ("learning_rte", "learning_rate"),
        ("lr", "learning_rate"),
        ("cutoff_len", "max_seq_length"),
        ("sample_packing", "packing"),
        ("micro_batch_size", "per_device_train_batch_size"),
        ("train_on_inputs", "loss_on"),
        ("zzz", "--help"),
    ],
)
def test_unknown_names_get_the_right_one(from_file, key, hint):
    with pytest.raises(UserError, match=f"{key}.*{hint}"):
        from_file(f"{key}: 1")
    with pytest.raises(UserError, match=f"{key}.*{hint}"):
        parse_arguments([*NEEDED, f"--{key}", "1"])


def test_all_unknown_names_are_answered_at_once(from_file):
    with pytest.raises(UserError) as caught:
        from_file("lr: 1\nweigth_decay: 1\n", "--gpus", "2", "--zzz", "1", "--seed", "1")
    lines = str(caught.value).splitlines()
    assert [line.split(";")[0].split()[-1] for line in lines] == [
        *("lr", "weigth_decay", "--gpus", "--zzz")
    ]
    assert "learning_rate" in lines[0] and "weight_decay" in lines[1] and "`devices`" in lines[2]


def test_files_that_are_not_settings(from_file, tmp_path):
    with pytest.raises(UserError, match="optimizer"):
        from_file("optimizer:\n  learning_rate: 1e-3\n")
    with pytest.raises(UserError, match="line 2, column"):
        from_file("seed: 1\n   learning_rate: 1e-3\n")
    with pytest.raises(UserError, match="list"):
        from_file("- seed\n")
    with pytest.raises(UserError, match="twice"):
        from_file("max-steps: 1\nmax_steps: 2\n")
    with pytest.raises(UserError, match=r"absent\.yaml"):
        parse_arguments([*NEEDED, "--config", str(tmp_path / "absent.yaml")])


def test_commands_that_are_not_settings():
    with pytest.raises(UserError, match="twice"):
        parse_arguments([*NEEDED, "--seed", "1", "--seed", "2"])
    with pytest.raises(UserError, match="output_dir"):
        parse_arguments(NEEDED[:4])
    with pytest.raises(UserError, match="folder"):
        parse_arguments(["folder", *NEEDED])
    with pytest.raises(UserError, match=r"seed.*1.*2"):
        parse_arguments([*NEEDED, "--seed", "1", "2"])


def test_negative_numbers_are_values():
    with pytest.raises(UserError, match=r"weight_decay is -0\.1"):
        parse_arguments([*NEEDED, "--weight_decay", "-0.1"])


def test_help_lists_everything_and_errors_exit_with_two(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == help_text().strip()
    assert all(f"--{name} " in printed for name in FIELDS)
    assert max(map(len, printed.splitlines())) <= 80
    texts = {words.split()[0]: words for words in printed.split("\n  --")[1:]}
    for name, hint in typing.get_type_hints(TrainArguments).items():
        said = texts[name].partition("[")[0]
        for choice in choices_of(hint):
            assert len(re.findall(rf"\b{choice}\b", said)) >= 1, name
        listed = ", ".join(choices_of(hint))
        assert not listed or " ".join(said.split()).count(listed) <= 1, name
    assert main([*NEEDED, "--weigth_decay", "0.1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "weight_decay" in error


def test_the_resolved_settings_are_stored(straight):
    record = json.loads((straight / "run.json").read_text())
    assert set(record["arguments"]) == set(FIELDS)
    assert record["arguments"]["learning_rate"] == 1e-2
    assert record["arguments"]["adam_beta2"] == 0.999
    assert record["versions"]["jax"] and record["kernel_form"] == "whole"
    assert record["plan"] and record["data"]["num_tokens"] > 0
