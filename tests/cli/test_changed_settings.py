"""Going on with other settings: what may change by itself, what when asked for, what never."""

import json
import re
import shutil

import pytest
from lanes import mostly_thorough
from runs import losses, metrics, tree_of, write_rows

from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import FIELDS, TrainArguments
from slidedp_jax.run.changes import (
    ALLOWABLE,
    DATA,
    MAY_CHANGE,
    PATHS,
    SCHEDULE,
    changed,
    check_settings,
    starts,
)
from slidedp_jax.train import main


@pytest.fixture(scope="module")
def begun(inputs, tmp_path_factory):
    """Two steps of three."""
    out = tmp_path_factory.mktemp("begun") / "run"
    inputs.train(out, max_steps=2)
    return out


@pytest.fixture
def out(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


def record(out):
    return json.loads((out / "run.json").read_text())


def test_every_name_is_a_setting_and_in_one_place():
    assert FIELDS.keys() >= MAY_CHANGE | {*ALLOWABLE, *PATHS}
    assert MAY_CHANGE.isdisjoint(ALLOWABLE)
    assert set(SCHEDULE) <= set(ALLOWABLE) and set(DATA) <= set(ALLOWABLE)
    never = FIELDS.keys() - MAY_CHANGE - {*ALLOWABLE, *PATHS}
    assert never == {"dtype", "optim", "freeze", "ema_decay", "seed"}


def test_another_learning_rate_is_refused_with_the_words_that_allow_it(inputs, out, capsys):
    before = tree_of(out)
    changed = {"learning_rate": 2e-2, "weight_decay": 0.1}
    assert main(inputs.command(out, max_steps=3, **changed)) == 1
    error = capsys.readouterr().err
    assert "--allow_changed learning_rate weight_decay." in error and "slidedp export" not in error
    assert tree_of(out) == before
    assert main(inputs.command(out, max_steps=3, allow_changed="weight_decay", **changed)) == 1
    error = capsys.readouterr().err
    assert "learning_rate was 0.01" in error and "weight_decay was" not in error
    inputs.train(out, max_steps=3, allow_changed=["learning_rate", "weight_decay"], **changed)
    said = capsys.readouterr().out
    assert "note: as allowed, learning_rate was 0.01, now 0.02" in said
    jump = "the learning rate jumps here from 0.01 to 0.02: learning_rate changed"
    assert f"note: {jump}" in said
    assert [m["learning_rate"] for m in metrics(out)] == [0.01, 0.01, 0.02]


def test_all_starts_are_remembered(inputs, out):
    settings = {"learning_rate": 2e-2, "allow_changed": "learning_rate", "save_steps": 7}
    inputs.train(out, max_steps=3, **settings)
    inputs.train(out, max_steps=3, **settings)  # nothing changes any more
    first, second, third = record(out)["starts"]
    assert first["arguments"]["learning_rate"] == 0.01 and first["from_step"] == 0
    assert second["from_step"] == 2 and second["changed"]["learning_rate"] == [0.01, 0.02]
    assert second["changed"]["save_steps"] == [500, 7] and second["changed"]["max_steps"] == [2, 3]
    assert third["from_step"] == 3 and third["changed"] == {}
    assert first["time"] <= second["time"] <= third["time"]
    (out / "run.json").unlink()
    inputs.train(out, max_steps=3, **settings)
    assert len(record(out)["starts"]) == 3  # those that the last checkpoint knows, and this one


def rates_by_name(*pairs):
    return {"learning_rate_by_name": json.dumps(dict(pairs))}


def test_the_order_of_patterns_counts(inputs, out, capsys):
    """The first that fits decides, so the same pairs in another order are other rates."""
    narrow, wide = ("lm_head*", 0.02), ("*", 0.01)
    rates = rates_by_name(narrow, wide)
    inputs.train(out, max_steps=3, **rates, allow_changed="learning_rate_by_name", dry_run=True)
    said = capsys.readouterr().out
    assert "learning rates of some weights jump here: learning_rate_by_name changed" in said
    run = record(out)
    run["arguments"]["learning_rate_by_name"] = dict([wide, narrow])
    (out / "run.json").write_text(json.dumps(run))
    assert main(inputs.command(out, max_steps=3, **rates)) == 1
    error = capsys.readouterr().err
    assert "learning_rate_by_name was {'*': 0.01, 'lm_head*': 0.02}, now" in error
    assert "--allow_changed learning_rate_by_name" in error


def test_settings_that_a_version_had_not_were_as_by_default(begun):
    before = record(begun)["arguments"]
    args = TrainArguments(**before | {"ema_decay": 0.9})
    older = {
        name: value for name, value in before.items() if name not in ("ema_decay", "z_loss_coef")
    }
    assert changed(args, older) == {"ema_decay": (None, 0.9)}
    previous = {"arguments": older}
    (_, now) = starts(previous, args, time="", from_step=2)
    assert now["changed"] == {"ema_decay": [None, 0.9]}
    with pytest.raises(UserError, match=r"ema_decay was None, now 0\.9"):
        check_settings(args, older, "run", by_content=True)


@pytest.mark.parametrize("change", [{"optim": "lion"}, {"seed": 7}, {"ema_decay": 0.9}], ids=str)
def test_what_cannot_change_says_how_to_start_from_the_weights(inputs, out, capsys, change):
    (name,) = change
    assert main(inputs.command(out, max_steps=3, learning_rate=2e-2, **change)) == 1
    error = capsys.readouterr().err
    assert f"{name} was" in error and "allow_changed" not in error
    assert f"`slidedp export {out} NEW`, then --model_name_or_path NEW" in error
    assert main(inputs.command(out, max_steps=3, allow_changed=name, **change)) == 1
    error = capsys.readouterr().err
    assert f"allow_changed names {name}; a run can go on with another learning_rate" in error
    assert f"slidedp export {out} NEW" in error


def test_other_rows_begin_at_their_beginning(inputs, out, capsys):
    rows = write_rows(out.parent / "rows.jsonl", 72)
    settings = {"train_file": rows, "max_steps": "null", "num_train_epochs": 1}
    assert main(inputs.command(out, **settings)) == 1
    error = capsys.readouterr().err
    assert "from their beginning: --allow_changed train_file" in error
    assert (
        "(48 rows of " in error and "72 rows of " in error and not re.search("[0-9a-f]{9}", error)
    )
    inputs.train(out, allow_changed="train_file", save_steps=1, **settings)
    said = capsys.readouterr().out
    assert "note: the training rows or their order are others: they begin anew here" in said
    assert "note: planned anew for other data" in said
    assert len(losses(out)) == 5  # two of the former, then all of the new
    later = [row for record in metrics(out)[2:] for row in record["row_ids"]]
    assert sorted(later) == list(range(72))
    shutil.rmtree(out / "checkpoints" / "step_00000005")
    inputs.train(out, allow_changed="train_file", save_steps=1, **settings)
    said = capsys.readouterr().out
    assert "at step 4" in said and "anew" not in said  # now they are the run's own
    again = [row for record in metrics(out)[2:] for row in record["row_ids"]]
    assert again == later


def test_a_run_that_left_nothing_is_no_obstacle(inputs, begun, tmp_path, capsys):
    """It ended before its first checkpoint, so nothing is lost by other settings or rows."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(begun / name, out)
    rows = write_rows(tmp_path / "rows.jsonl", 72)
    for change in ({"learning_rate": 2e-2, "optim": "sgd"}, {"train_file": rows}):
        assert main(inputs.command(out, max_steps=3, dry_run=True, **change)) == 0
        said = capsys.readouterr().out
        assert "note: the run in output_dir left no checkpoint: it begins anew, with other" in said
    assert main(inputs.command(out, max_steps=3, dry_run=True)) == 0
    assert "begins anew" not in capsys.readouterr().out
    (out / "export").mkdir()
    assert main(inputs.command(out, max_steps=3, learning_rate=2e-2)) == 1
    assert main(inputs.command(out, max_steps=3, train_file=rows)) == 1
    error = capsys.readouterr().err
    assert "learning_rate was 0.01" in error and "as token ids and labels (48 rows of" in error


@pytest.mark.parametrize(
    "change",
    mostly_thorough(
        [
            {"max_seq_length": 32},
            {"packing": True, "per_device_train_batch_size": 1},
            {"data_seed": 9},
        ],
        ({"data_seed": 9},),
    ),
    ids=str,
)
def test_other_ways_to_make_rows_go_on_too(inputs, out, capsys, change):
    name = next(iter(change))
    change |= {"rows_per_microbatch": 1}
    assert main(inputs.command(out, max_steps=3, **change)) == 1
    assert f"--allow_changed {name}." in capsys.readouterr().err
    inputs.train(out, max_steps=3, allow_changed=name, **change)
    said = capsys.readouterr().out
    assert "begin anew here" in said and "planned anew" in said and len(losses(out)) == 3


def test_a_clip_that_is_dropped_or_added_is_planned_for(inputs, out, capsys):
    """Without one, updates need not wait."""
    inputs.train(out, max_steps=3, max_grad_norm=0, allow_changed="max_grad_norm")
    assert "max_grad_norm was 1.0, now 0.0" in capsys.readouterr().out
    assert record(out)["plan"]["chosen"]["strategy"]["update_policy"] == "eager"
    inputs.train(out, max_steps=4, max_grad_norm=0.5, allow_changed="max_grad_norm")
    assert record(out)["plan"]["chosen"]["strategy"]["update_policy"] == "deferred"
