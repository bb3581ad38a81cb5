"""A resumed run is the run: dates, places of files, evaluations, exports, logs."""

import datetime
import json
import math
import shutil

import pytest
from runs import checkpoints, losses, metrics, write_rows
from test_held_out_rows import evaluations

from slidedp_jax import export
from slidedp_jax.errors import UserError
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.run.arguments import TrainArguments, parse_arguments
from slidedp_jax.run.evaluations import Measure, has_evaluation
from slidedp_jax.run.learning_rate import num_warmup_steps
from slidedp_jax.run.metrics_file import MetricsFile, as_json, drop_after
from slidedp_jax.run.model_card import is_card_of, model_card
from slidedp_jax.run.record import read_run, write_run
from slidedp_jax.run.same_inputs import base_model_name
from slidedp_jax.run.settings_help import help_text
from slidedp_jax.train import main
from slidedp_jax.trainer import Trainer

DATED = (
    "{{ strftime_now('%d %B %Y %S') }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def short(inputs, tmp_path_factory):
    """Two steps, with a template of its own that prints the date, and the export."""
    out = tmp_path_factory.mktemp("short") / "run"
    template = out.parent / "dated.jinja"
    template.write_text(DATED)
    inputs.train(out, max_steps=2, chat_template_path=template, export=True)
    return out


@pytest.fixture
def going_on(short, tmp_path):
    """A copy of it, and the settings to go on with."""
    out = shutil.copytree(short, tmp_path / "run")
    return out, {"chat_template_path": short.parent / "dated.jinja", "export": True}


@pytest.fixture
def later(monkeypatch):
    """A call from which on it is another day."""

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(days=40, seconds=7)

    def change():
        monkeypatch.setattr("slidedp_jax.run.folder.datetime.datetime", Later)
        monkeypatch.setattr("slidedp_jax.data.chat_template.datetime", Later)

    return change


def started(out):
    return json.loads((out / "run.json").read_text())["started"]


def test_dates_in_templates_are_those_of_the_first_start(inputs, going_on, capsys, later):
    out, settings = going_on
    first = started(out)
    later()
    inputs.train(out, max_steps=3, **settings)
    assert "at step 2" in capsys.readouterr().out and len(losses(out)) == 3
    assert started(out) == first
    again = out.parent / "again"
    inputs.train(again, max_steps=1, save_at_end=False, **settings | {"export": False})
    assert started(again) > first
    prints = [json.loads((p / "run.json").read_text())["fingerprints"] for p in (out, again)]
    assert prints[0]["rows"] != prints[1]["rows"]
    assert prints[0]["tokenizer"] == prints[1]["tokenizer"]


def test_a_missing_run_json_keeps_the_date(inputs, going_on, later):
    out, settings = going_on
    first = started(out)
    (out / "run.json").unlink()
    later()
    inputs.train(out, max_steps=2, **settings)
    assert started(out) == first


def test_moved_folders_and_other_spellings_are_the_same(inputs, going_on, capsys, monkeypatch):
    out, settings = going_on
    elsewhere = out.parent / "elsewhere"
    shutil.copytree(inputs.model, elsewhere / "a 'mödel\"")
    shutil.copy(inputs.rows, elsewhere / "renamed.jsonl")
    shutil.copy(settings["chat_template_path"], elsewhere / "t.jinja")
    monkeypatch.chdir(elsewhere)
    moved = {"model_name_or_path": "./a 'mödel\"", "train_file": "../elsewhere/renamed.jsonl"}
    inputs.train(out, max_steps=3, **settings | moved | {"chat_template_path": "t.jinja"})
    assert "at step 2" in capsys.readouterr().out and len(losses(out)) == 3
    arguments = json.loads((out / "run.json").read_text())["arguments"]
    assert arguments["model_name_or_path"] == "./a 'mödel\""


def test_other_content_is_refused(inputs, going_on, capsys):
    out, settings = going_on
    rows = write_rows(out.parent / "rows.jsonl", 47)
    model = shutil.copytree(inputs.model, out.parent / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append(added[-1] | {"id": added[-1]["id"] + 1, "content": "<|never|>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    for changed, named in (
        ({"train_file": rows}, "other data or another order"),
        ({"model_name_or_path": model}, f"the tokenizer in {model} differ"),
    ):
        assert main(inputs.command(out, max_steps=3, **settings | changed)) == 1
        assert named in capsys.readouterr().err
    shutil.rmtree(out / "checkpoints")
    assert main(inputs.command(out, max_steps=3, **settings | {"train_file": rows})) == 1
    assert "the training rows" in capsys.readouterr().err


def test_records_are_json_and_those_of_earlier_versions_are_understood(tmp_path):
    arguments = {"warmup_steps": 0, "learning_rate": 1.0}
    record = {"arguments": arguments, "started": "2024-01-01T00:00:00"}
    write_run(tmp_path, record | {"plan": {"worst": math.inf, "all": [math.nan, 1.0]}})
    assert json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert read_run(tmp_path, None)[0]["arguments"]["warmup_steps"] == 0
    write_run(tmp_path, {"arguments": arguments})
    previous, _ = read_run(tmp_path, None)
    assert previous["arguments"]["warmup_steps"] is None and previous["fingerprints"] is None


# Exports.


def test_the_export_command_ships_the_runs_own_template(short, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "configure", lambda **_: None)
    out = tmp_path / "out"
    assert export.main([str(short), str(out)]) == 0
    assert (out / "chat_template.jinja").read_text() == DATED
    exported = {path.name: path.read_bytes() for path in out.iterdir()}
    assert exported == {path.name: path.read_bytes() for path in (short / "export").iterdir()}


def as_before(folder, path="same"):
    """Records as earlier versions wrote them, of a template at some path."""
    for file in (folder / "run.json", *folder.glob("checkpoints/*/trainer.json")):
        record = json.loads(file.read_text())
        record.pop("digest", None)
        inside = record.get("extra", {}).get("run", record)
        for name in ("started", "chat_template", "fingerprints", "data_counts", "base_model"):
            del inside[name]
        if path != "same":
            inside["arguments"]["chat_template_path"] = path
        file.write_text(json.dumps(record))


def test_templates_of_earlier_runs_are_read_from_where_they_were(
    short, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(export, "configure", lambda **_: None)
    run = shutil.copytree(short, tmp_path / "run")
    as_before(run)
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == DATED
    gone = shutil.copytree(short, tmp_path / "gone")
    as_before(gone, "/nowhere.jinja")
    assert export.main([str(gone), str(tmp_path / "again")]) == 1
    assert "/nowhere.jinja, which cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_an_export_that_is_asked_for_anew_is_written(inputs, going_on):
    """By another rounding, dtype or step; the same is left alone."""
    out, settings = going_on
    settings = settings | {"max_steps": 2}
    weights = out / "export" / "model.safetensors"
    made, seen = weights.stat().st_mtime_ns, [weights.read_bytes()]
    inputs.train(out, **settings)
    assert weights.stat().st_mtime_ns == made
    for changed in (
        {"export_rounding": "nearest"},
        {"export_dtype": "float32"},
        {"export_dtype": "float32", "max_steps": 3},
    ):
        inputs.train(out, **settings | changed)
        seen.append(weights.read_bytes())
    assert len(set(seen)) == 4
    card = (out / "export" / "README.md").read_text()
    assert "| step | 3 |" in card and "| weights | float32 |" in card


def test_the_model_card_says_what_a_reader_needs_and_no_path(short):
    card = (short / "export" / "README.md").read_text()
    for text in (
        "library_name: transformers",
        "| base model | model |",
        "| step | 2 |",
        "| weights | bfloat16, rounded ",
        "| training data | 48 of 48 rows, ",
        "| optimizer | adamw, peak learning rate 0.01 (constant), weight decay 0, gradient clip",
        "slidedp_jax 0.1.0, python 3.",
    ):
        assert text in card, card
    assert "base_model:" not in card  # which is for names on the hub
    assert "/" not in card.replace("/ema", "") and not (short / "export/slidedp_jax_step").exists()


def test_cards_are_told_apart():
    run = {"base_model": "Qwen/Qwen3-4B", "arguments": None, "data_counts": None}
    card = model_card(run, step=12, weights="float16")
    assert card.startswith("---\nbase_model: Qwen/Qwen3-4B\n")
    assert is_card_of(card, step=12, weights="float16")
    assert not is_card_of(card, step=1, weights="float16")
    assert not is_card_of(card, step=12, weights="float16, moving average with decay 0.9")
    assert not is_card_of("", step=12, weights="float16")


def test_a_models_name_has_no_place_in_it(tmp_path):
    cached = tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    assert base_model_name(str(cached)) == base_model_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    (tmp_path / "mine").mkdir()
    assert base_model_name(f"{tmp_path}/mine/") == "mine"
    assert base_model_name("/gone/since/model") == "model"


def test_leftovers_go_at_the_next_start(inputs, short, tmp_path):
    """Of exports, checkpoints and files; whatever comes of that start."""
    out = tmp_path / "run"
    for name in (".export.abc.partial", ".export.partial", "checkpoints/.step_00000001.partial"):
        (out / name).mkdir(parents=True)
        (out / name / "model.safetensors").write_bytes(b"x" * 1000)
    (out / ".run.json.x.partial").touch()
    shutil.copy(short / "run.json", out)
    settings = {"chat_template_path": short.parent / "dated.jinja"}
    assert main(inputs.command(out, per_device_train_batch_size=999, **settings)) == 1
    assert [path for path in out.rglob("*") if ".partial" in path.name] == []


# Evaluations.


@pytest.fixture
def held_out(tmp_path):
    return write_rows(tmp_path / "held_out.jsonl", 9)


def test_a_final_evaluation_that_is_missing_is_made(inputs, going_on, held_out, capsys):
    """Once for the same rows."""
    out, settings = going_on
    settings |= {"max_steps": 2, "validation_file": held_out}
    for number in (1, 1, 2):
        if number == 2:
            write_rows(held_out, 8)
        inputs.train(out, **settings)
        assert [record["step"] for record in evaluations(out)] == [2] * number
        assert len(losses(out)) == 2
    assert capsys.readouterr().out.count("step 2: held-out loss") == 2
    one, other = evaluations(out)
    assert one["eval_supervised_tokens"] > other["eval_supervised_tokens"]


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_an_evaluation_that_was_due_when_a_signal_came_is_made(
    inputs, tmp_path, held_out, capsys, monkeypatch, step
):
    """In the last step too; there, the export is the next start's as well."""
    out = tmp_path / "run"
    settings = {"max_steps": 4, "validation_file": held_out, "eval_steps": 2, "export": True}
    asked = property(
        lambda _: (out / "metrics.jsonl").exists() and len(metrics(out)) >= step,
        lambda *_: None,
    )
    with monkeypatch.context() as patch:
        patch.setattr(StopAtSignal, "requested", asked, raising=False)
        assert main(inputs.command(out, **settings)) == 130
    assert f"stopped at step {step}; the same command" in capsys.readouterr().out
    assert checkpoints(out) == [step] and not (out / "export").exists()
    assert [record["step"] for record in evaluations(out)] == [2] * (step == 4)
    inputs.train(out, **settings)
    assert [record["step"] for record in evaluations(out)] == [2, 4] and (out / "export").exists()
    assert len(losses(out)) == 4


# Logs.


def test_logs_are_json_that_every_parser_takes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
    file.write({"step": 1, "loss": math.nan, "grad_norm": -math.inf, "epoch": 0.5})
    file.write({"step": 1, "eval_loss": 2.0})
    file.close()
    first, second = (
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    )
    assert first["loss"] is None and first["grad_norm"] is None and first["epoch"] == 0.5
    assert first["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"} and "nonfinite" not in second
    times = [datetime.datetime.fromisoformat(record["time"]) for record in (first, second)]
    assert before < times[0] <= times[1]
    assert as_json({"a": 1}) == {"a": 1}
    measure = Measure(rows={"": "any"}, terms={})
    assert has_evaluation(path, 1, measure) and not has_evaluation(path, 2, measure)
    assert not has_evaluation(tmp_path / "none", 1, measure)
    inode = path.stat().st_ino
    drop_after(path, 1)
    assert path.stat().st_ino == inode  # nothing to drop, nothing written
    drop_after(path, 0)
    assert path.read_text() == ""
    assert path.stat().st_ino != inode  # replaced whole, never cut in place


def test_a_skipped_step_is_logged_as_json(inputs, tmp_path, monkeypatch):
    step = Trainer.step

    class NotFinite:
        loss, skipped, figures, stop = math.nan, 1, (), False

        def __init__(self, metrics):
            self.grad_norm = metrics.grad_norm

    monkeypatch.setattr(
        Trainer, "step", lambda self, batch, **more: NotFinite(step(self, batch, **more))
    )
    out = tmp_path / "run"
    inputs.train(out, max_steps=1, save_at_end=False)
    (line,) = (out / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["loss"] is None and record["nonfinite"] == {"loss": "nan"}
    assert record["learning_rate"] == 0.01


# Settings.


@pytest.mark.parametrize(("words", "steps"), [("", 3), ("0", 0), ("null", 3), ("7", 7)])
def test_no_warm_up_steps_are_none(words, steps):
    given = ["--model_name_or_path", "m", "--train_file", "f", "--output_dir", "o"]
    given += ["--warmup_steps", words] if words else []
    assert num_warmup_steps(parse_arguments(given), 100) == steps


def test_help_says_what_a_setting_can_be():
    lines = {
        line.split()[0]: line for line in help_text(200).splitlines() if line.startswith("  --")
    }
    for name, values in {
        "dtype": ("bfloat16", "float32"),
        "export_dtype": ("bfloat16", "float16", "float32"),
        "lr_scheduler_type": ("cosine", "linear", "constant", "constant_with_warmup"),
        "on_nonfinite": ("stop", "skip"),
        "platform": ("auto", "cpu", "cuda"),
        "optim": ("adamw", "muon"),
    }.items():
        assert all(value in lines[f"--{name}"] for value in values), lines[f"--{name}"]
    assert lines["--optim"].count("adamw") == 2  # not listed twice beside its help


def test_a_limit_of_the_loss_is_a_number():
    with pytest.raises(UserError, match="max_loss is inf; it must be positive and finite"):
        TrainArguments(model_name_or_path="m", train_file=["f"], output_dir="o", max_loss=math.inf)
