"""Evaluation as people use it: named sets, by epochs, stopping early, samples beside it."""

import hashlib
import json
import math
from types import SimpleNamespace

import pytest
from runs import metrics, write_rows
from test_held_out_rows import evaluations

from slidedp_jax.checkpoint.retention import list_steps, step_of
from slidedp_jax.data import BatchSource
from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import parse_arguments
from slidedp_jax.run.evaluations import (
    Measure,
    begins_anew,
    best_before,
    best_evaluated,
    evaluated,
    loss_terms,
)
from slidedp_jax.run.held_out import (
    checked_metric,
    evaluations_without_gain,
    held_out_sets,
    losses_line,
    losses_record,
    perplexity,
    row_fingerprints,
)
from slidedp_jax.train import main


def test_files_get_names_by_what_stands_before_the_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd=name.jsonl").write_text("{}")
    words = ["a.jsonl", "code=c.jsonl", "odd=name.jsonl", "code=x=y.jsonl", "/b c=d.jsonl"]
    assert held_out_sets(words) == {
        "": ["a.jsonl", "odd=name.jsonl", "/b c=d.jsonl"],
        "code": ["c.jsonl", "x=y.jsonl"],
    }


def test_the_loss_of_all_sets_is_that_of_all_tokens():
    record = losses_record({"": (1.0, 10), "code": (2.5, 30)})
    assert record["eval_loss"] == pytest.approx((10 + 75) / 40)
    assert record["eval_perplexity"] == pytest.approx(math.exp(85 / 40))
    assert record["eval_code_perplexity"] == math.exp(2.5) and record["eval_code_loss"] == 2.5
    assert record["eval_supervised_tokens"] == 40 and "eval__loss" not in record
    assert losses_record({"code": (0.1, 3)})["eval_loss"] == 0.1
    assert perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))
    line = losses_line(3, {"": (1.0, 10), "code": (2.5, 30)})
    assert line.startswith("step 3: held-out loss 2.1250 over 40 tokens, perplexity 8.373; files")
    assert line.endswith("without a name 1.0000 (2.718); code 2.5000 (12.18)")


def test_there_is_no_perplexity_of_more_than_the_cross_entropy(inputs, tmp_path, capsys):
    losses = {"": (1.0, 10), "code": (2.5, 30)}
    record = losses_record(losses, cross_entropy=False)
    assert record == {k: v for k, v in losses_record(losses).items() if "perplexity" not in k}
    line = losses_line(3, losses, cross_entropy=False)
    assert line.endswith("over 40 tokens; files without a name 1.0000; code 2.5000")
    settings = {"validation_file": inputs.rows, "metric_for_best_model": "perplexity"}
    words = inputs.command(tmp_path / "out", **settings, z_loss_coef=0.1, dry_run=True)
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "there is no perplexity" in error and "z_loss_coef 0.1: give eval_loss" in error


def test_what_the_loss_has_beside_the_cross_entropy():
    """A model's own load-balance loss counts, unless a setting turns it off."""
    base = ["--model_name_or_path", "m", "--train_file", "t", "--output_dir", "o"]
    dense, mixture = SimpleNamespace(num_experts=0), SimpleNamespace(num_experts=4)
    dense.router_aux_loss_coef = mixture.router_aux_loss_coef = 0.25

    def terms(config, *words):
        return loss_terms(parse_arguments([*base, *words]), config)

    assert terms(dense) == {} and terms(mixture) == {"router_aux_loss_coef": 0.25}
    assert terms(mixture, "--router_aux_loss_coef", "0") == {}
    words = ["--router_z_loss_coef", "0.5", "--z_loss_coef", "1e-4"]
    assert terms(mixture, "--router_aux_loss_coef", "0", *words) == {
        "z_loss_coef": 1e-4,
        "router_z_loss_coef": 0.5,
    }


def test_evaluations_without_gain_by_hand():
    def without(*values, threshold=0.0):
        return evaluations_without_gain(enumerate(values), threshold)

    assert without() == (0, None)
    assert without(3.0, 2.0, 2.0, 2.5) == (2, 1)
    assert without(3.0, 2.9, 2.85, threshold=0.2) == (2, 0)
    assert without(3.0, None, 2.0) == (0, 2) and without(3.0, None) == (1, 0)
    assert without(None, None) == (2, None)
    assert evaluations_without_gain([(9, 1.0), (3, 2.0)], 0.0) == (0, 9)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--metric_for_best_model", "accuracy"], "evaluations give eval_loss, eval_perplexity"),
        (["--metric_for_best_model", "eval_b_loss"], "eval_a_loss, eval_a_perplexity"),
        (["--early_stopping_patience", "0", "--eval_steps", "1"], "at least 1"),
        (["--early_stopping_patience", "2"], "give eval_steps or eval_epochs"),
        (["--eval_epochs", "0"], "eval_epochs is 0.0; it must be positive"),
        (["--early_stopping_threshold", "-1"], "not negative"),
        (["--train_file_weights", "1", "2"], "2 file weights for 1 files"),
        (["--train_file_weights", "x"], "a number is expected"),
        (["--dataset_num_proc", "0"], "at least 1, or auto"),
    ],
)
def test_settings_are_checked(words, what):
    base = ["--model_name_or_path", "m", "--train_file", "t", "--output_dir", "o"]
    with pytest.raises(UserError, match=what):
        parse_arguments([*base, "--validation_file", "a=x", *words])


def test_early_stopping_needs_rows():
    base = ["--model_name_or_path", "m", "--train_file", "t", "--output_dir", "o"]
    with pytest.raises(UserError, match="give a validation_file"):
        parse_arguments([*base, "--early_stopping_patience", "1"])


def test_the_metric_may_lack_its_beginning():
    assert checked_metric("loss", []) == "eval_loss"
    assert checked_metric("a_loss", ["a=x"]) == "eval_a_loss"


def test_the_best_step_goes_by_the_metric(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [
        {"step": 2, "eval_loss": 1.0, "eval_a_loss": 5.0},
        {"step": 4, "eval_loss": 2.0, "eval_a_loss": 4.0},
        {"step": 6, "eval_loss": 0.5, "eval_a_loss": None},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    measure = Measure(rows={"a": "rows"}, terms={})
    assert best_evaluated(path, [2, 4, 6], measure) == 6
    assert best_evaluated(path, [2, 4, 6], measure, "eval_a_loss") == 4
    assert best_evaluated(path, [2, 4, 6], measure, "eval_b_loss") is None


def test_what_is_compared_after_a_set_is_added_or_the_loss_changed(tmp_path):
    """By hand; the fingerprint of all sets together is as earlier versions wrote it."""
    path = tmp_path / "metrics.jsonl"
    rows = {"": "x", "a": "y"}
    smooth = {"label_smoothing_factor": 0.1}
    one, both = Measure(rows={"": "x"}, terms={}), Measure(rows=rows, terms={})
    other = Measure(rows=rows, terms=smooth)
    of_both = hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
    records = [
        {"step": 1, "eval_loss": 2.0, "eval_data": "x"},
        {"step": 2, "eval_loss": 1.0} | one.record(),
        {"step": 3, "eval_loss": 5.0, "eval_a_loss": 3.0, "eval_data": of_both},
        {"step": 3, "loss": 1.0},
        {"step": 4, "eval_loss": 4.0, "eval_a_loss": 4.0} | both.record(),
        {"step": 5, "eval_loss": 3.0, "eval_a_loss": 9.0}
        | {"eval_data": {"": "z", "a": "y"}, "eval_loss_terms": {}},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluated(path, one) == {1: 2.0, 2: 1.0}
    assert evaluated(path, both) == {3: 5.0, 4: 4.0}
    assert evaluated(path, both, "eval_a_loss") == {3: 3.0, 4: 4.0, 5: 9.0}
    steps = range(6)
    assert best_before(path, steps, both) == [1, 2, 5] and best_before(path, [4], both) == []
    assert best_before(path, steps, both, "eval_a_loss") == [1, 2]
    assert begins_anew(path, both, "eval_loss") and not begins_anew(path, both, "eval_a_loss")
    assert evaluated(path, other) == {3: 5.0}  # which does not tell its loss
    with path.open("a") as file:
        file.write(json.dumps({"step": 2, "eval_loss": 9.0} | both.record()) + "\n")
    assert best_before(path, steps, both) == [1, 5] and best_evaluated(path, steps, both) == 4


@pytest.mark.parametrize(
    "change", ["a set is added", pytest.param("another loss", marks=pytest.mark.thorough)]
)
def test_the_best_stays_when_evaluations_are_of_something_else(inputs, tmp_path, capsys, change):
    """Losses grow, so that the first is the best."""
    few = write_rows(tmp_path / "few.jsonl", 9)
    settings = {"save_best": True, "save_steps": 1, "save_total_limit": 1, "eval_steps": 1}
    settings |= {"learning_rate": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0}
    settings |= {"validation_file": [inputs.rows]}
    other = {"label_smoothing_factor": 0.5, "allow_changed": "label_smoothing_factor"}
    if change == "a set is added":
        other = {"validation_file": [inputs.rows, f"few={few}"]}
    out = tmp_path / "out"

    def goes_on(steps, **changes):
        inputs.train(out, max_steps=steps, **settings | changes)
        return [step_of(path) for path in list_steps(out / "checkpoints")], capsys.readouterr().out

    kept, said = goes_on(3)
    assert kept == [1, 3] and "anew" not in said
    kept, said = goes_on(5, **other)
    assert 1 in kept and "eval_loss is compared anew from here; " in said
    assert "step_00000001, the best so far, stays" in said and "  kept:  " in said
    last = evaluations(out)[-1]
    if change == "a set is added":
        assert set(last["eval_data"]) == {"", "few"} and "eval_loss_terms" not in last
    else:
        assert last["eval_loss_terms"] == {"label_smoothing_factor": 0.5}
        assert not [name for name in last if "perplexity" in name]
    kept, said = goes_on(6, **other)
    assert 1 in kept and "compared anew" not in said
    kept, said = goes_on(7, **other | {"save_best": False})
    assert kept == [7] and "the best checkpoint so far is no longer kept" in said


def test_which_steps_end_a_part_of_the_data():
    from runs import made_up_rows

    source = BatchSource(made_up_rows(10), max_seq_length=16, step_size=4)

    def passed(epochs):
        source.restore({**source.state(), "epoch": 0, "next_row": 0})
        assert not source.has_passed(epochs)
        found = []
        for step in range(1, 8):
            next(source)
            if source.has_passed(epochs):
                found.append(step)
        return found

    assert passed(1) == [3, 6]  # steps of 4, 4 and 2 rows
    assert passed(0.5) == [2, 3, 5, 6]
    assert passed(1.5) == [5]
    assert passed(0.1) == [1, 2, 3, 4, 5, 6, 7]


def test_a_part_of_the_data_that_ends_is_known_after_another_batch_size():
    """The step that ended was of the former size, which the state knows."""
    from runs import made_up_rows

    def at_row(row, step_size):
        source = BatchSource(made_up_rows(24), max_seq_length=16, step_size=step_size)
        while source.state()["next_row"] != row:
            next(source)
        return source

    resumed = BatchSource(made_up_rows(24), max_seq_length=16, step_size=12)
    resumed.restore(at_row(15, 3).state())
    assert not resumed.has_passed(0.5)  # row 12 was passed by the step before
    resumed.restore(at_row(12, 3).state())
    assert resumed.has_passed(0.5)
    small = BatchSource(made_up_rows(24), max_seq_length=16, step_size=3)
    small.restore(at_row(16, 8).state())
    assert small.has_passed(0.5)  # by the step from row 8 to 16
    state = at_row(16, 8).state()
    del state["previous"]
    small.restore(state)  # of a version that did not write it
    assert not small.has_passed(0.5)
    next(small)
    assert not small.has_passed(0.5) and small.state()["previous"] == [0, 16]


def test_sets_are_told_apart_and_samples_are_taken_at_each_evaluation(inputs, tmp_path, capsys):
    """48 rows, 24 a step: two steps an epoch."""
    few = write_rows(tmp_path / "few.jsonl", 9)
    settings = {"validation_file": [inputs.rows, f"few={few}"], "eval_epochs": 1, "max_steps": 4}
    settings |= {"sample_prompts": ["row"], "sample_max_new_tokens": 3, "sample_at_eval": True}
    settings |= {"save_best": True, "metric_for_best_model": "eval_few_loss", "save_steps": 2}
    inputs.train(out := tmp_path / "out", **settings, save_total_limit=1)
    records = evaluations(out)
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        few_tokens = record["eval_few_supervised_tokens"]
        others = record["eval_supervised_tokens"] - few_tokens
        assert 0 < few_tokens < others
        assert record["eval_perplexity"] == pytest.approx(math.exp(record["eval_loss"]))
        assert record["eval_few_perplexity"] == pytest.approx(math.exp(record["eval_few_loss"]))
        assert record["eval_few_loss"] != record["eval_loss"]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples] == [(0, "row"), (2, "row"), (4, "row")]
    printed = capsys.readouterr().out
    assert "held out: 57 rows (few 9)" in printed and "; few " in printed
    best = min(records, key=lambda record: record["eval_few_loss"])["step"]
    assert f"step_{best:08d} by eval_few_loss" in printed.split("  best:")[1].splitlines()[0]
    assert best in map(step_of, list_steps(out / "checkpoints"))


def test_training_stops_early_stays_so_and_goes_on_with_more_patience(inputs, tmp_path, capsys):
    """Without a learning rate nothing gets better: the first evaluation is the best."""
    settings = {"validation_file": inputs.rows, "eval_steps": 1, "learning_rate": 0}
    settings |= {"early_stopping_patience": 2, "max_steps": 9}
    inputs.train(out := tmp_path / "out", **settings)
    assert [record["step"] for record in metrics(out)] == [1, 2, 3]
    printed = capsys.readouterr().out
    assert "stopping early at step 3: 2 evaluations without a lower eval_loss" in printed
    assert "the best of step 1" in printed
    assert "done: 3 steps" in printed
    inputs.train(out, **settings)
    assert [record["step"] for record in metrics(out)] == [1, 2, 3]
    assert "stopping early at step 3" in capsys.readouterr().out
    inputs.train(out, **settings | {"early_stopping_patience": 3})
    assert [record["step"] for record in metrics(out)] == [1, 2, 3, 4]


def test_an_end_that_skipped_steps_have_brought_says_so(inputs, tmp_path, capsys):
    settings = {"validation_file": inputs.rows, "eval_steps": 1, "early_stopping_patience": 2}
    settings |= {"max_loss": 0.1, "on_nonfinite": "skip", "max_steps": 9, "save_at_end": False}
    inputs.train(tmp_path / "out", **settings)
    said = capsys.readouterr().out
    assert "the best of step 1; 2 of 2 steps since then were skipped" in said
    assert "  skipped:     3 steps, which changed no weight; of the learning rate's 9 steps" in said
    assert " 0 were taken" in said


def test_a_run_with_weights_is_not_continued_without(inputs, tmp_path, capsys):
    few = write_rows(tmp_path / "few.jsonl", 8)
    settings = {"train_file": [inputs.rows, few], "train_file_weights": ["0.5", "3"]}
    inputs.train(out := tmp_path / "out", **settings, max_steps=1)
    assert "50% of rows" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        inputs.train(out, **settings | {"train_file_weights": ["1", "3"]}, max_steps=2)
    assert "train_file_weights was [0.5, 3.0], now [1.0, 3.0]" in capsys.readouterr().err
    inputs.train(out, **settings, max_steps=2)
    rows = [row for record in metrics(out) for row in record["row_ids"]]
    assert len(rows) == 48 and all(rows.count(row) == 3 for row in range(48, 56))


def test_held_out_rows_are_known_by_names_and_content(inputs):
    from runs import made_up_rows

    one, other = (BatchSource(made_up_rows(n), max_seq_length=16, step_size=4) for n in (5, 6))
    found = row_fingerprints({"": one, "a": other, "b": one})
    assert found == {"": one.state()["data"], "a": other.state()["data"], "b": found[""]}
    assert found[""] != found["a"]
