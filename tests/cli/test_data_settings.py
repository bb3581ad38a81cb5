"""Tokenising as the command does it: processes, the cache of rows, word of how far it is."""

import json

import pytest
from runs import metrics

from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.run.data_progress import DataProgress
from slidedp_jax.run.data_settings import num_processes, token_cache


def arguments(*words):
    base = ["--model_name_or_path", "m", "--train_file", "t", "--output_dir", "o"]
    return parse_arguments([*base, *words])


def test_a_run_goes_on_with_the_same_rows_whether_they_are_kept_or_not(inputs, tmp_path, capsys):
    cache = tmp_path / "cache"
    settings = {"data_cache": cache, "dataset_num_proc": 2, "validation_file": inputs.rows}
    inputs.train(out := tmp_path / "out", **settings, max_steps=1)
    printed = capsys.readouterr().out
    assert f"kept in {cache}" in printed and "--data_cache null" in printed
    assert printed.count("read from") == 1  # the held-out rows, which are the same
    inputs.train(out, **settings, max_steps=2)
    assert capsys.readouterr().out.count("read from") == 2
    inputs.train(out, **settings | {"data_cache": "null", "dataset_num_proc": 1}, max_steps=3)
    assert "tokenised rows" not in capsys.readouterr().out
    unbroken = tmp_path / "unbroken"
    inputs.train(unbroken, validation_file=inputs.rows, max_steps=3)
    rows, losses = ([r[name] for r in metrics(out)] for name in ("row_ids", "loss"))
    assert rows == [record["row_ids"] for record in metrics(unbroken)]
    assert losses == [record["loss"] for record in metrics(unbroken)]


def test_large_files_are_kept_in_the_users_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_bytes(b"\n" * 1000)
    large.write_bytes(b"\n" * (1 << 20))
    folder = tmp_path / "xdg" / "slidedp_jax" / "tokenised"
    assert token_cache(arguments(), [str(small)]) is None and not folder.exists()
    assert token_cache(arguments(), [str(small), str(large)]) == folder
    assert token_cache(arguments("--data_cache", "null"), [str(large)]) is None
    assert token_cache(arguments("--data_cache", "here"), [str(small)]).name == "here"
    (tmp_path / "xdg" / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg" / "file"))
    assert token_cache(arguments(), [str(large)]) is None
    assert "tokenised rows are not kept in" in capsys.readouterr().out


def test_processes_are_a_number_or_found():
    assert num_processes(arguments()) is None
    assert num_processes(arguments("--dataset_num_proc", "3")) == 3


def test_lines_say_how_far_it_is_now_and_then():
    times, lines = iter([0.0, 1.0, 4.0, 4.0, 6.0, 15.0, 15.0, 20.0]), []
    progress = DataProgress("a.jsonl", now=lambda: next(times), print_line=lines.append)
    for share in (0.1, 0.2, 0.3, 0.5, 1.0):
        progress(int(1000 * share), share)
    assert lines == [
        "tokenising a.jsonl: 20%, 200 rows, 50 rows/s, 0:16 left",
        "tokenising a.jsonl: 50%, 500 rows, 33 rows/s, 0:15 left",
    ]


def test_weights_and_sets_from_a_yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    settings = {
        "model_name_or_path": "m",
        "train_file": ["a", "b"],
        "train_file_weights": [2, "0.5"],
        "output_dir": "o",
        "validation_file": ["code=c.jsonl"],
        "metric_for_best_model": "eval_code_loss",
        "eval_epochs": 0.5,
    }
    path.write_text(json.dumps(settings))
    args = parse_arguments(["--config", str(path)])
    assert args.train_file_weights == [2.0, 0.5] and args.best_metric == "eval_code_loss"
    assert args.eval_epochs == pytest.approx(0.5)
