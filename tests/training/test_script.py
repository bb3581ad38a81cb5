"""README's script as it stands, beside the same training by plain optax in memory."""

import itertools
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import numpy as np
import optax
import pytest
from plain_training import train

import slidedp_jax
from slidedp_jax import UserError

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def readme_scripts() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Train from a script", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def readme_script() -> str:
    """The first, which is short."""
    return readme_scripts()[0]


def run(script: str, folder: pathlib.Path) -> str:
    """What a script prints that is run as it stands beside the names that it has."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The names that the script has, with little behind them."""
    made = tmp_path_factory.mktemp("script")
    demo = runpy.run_path(str(ROOT / "scripts" / "make" / "make_demo_folder.py"))
    demo["make_demo_folder"](made)
    (made / "model").rename(made / "Qwen3-0.6B")
    rows = (made / "train.jsonl").read_text().splitlines()[:20]
    (made / "chats.jsonl").write_text("\n".join(rows) + "\n")
    return made


def test_it_has_at_most_fifteen_lines_beside_the_report():
    lines = [line for line in readme_script().splitlines() if line.strip()]
    assert len(lines) - 1 <= 15


def weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    read = {}
    base = slidedp_jax.from_pretrained(folder)
    base.load_parameters(lambda name, values: read.update({name: np.float32(values)}))
    return read


def test_it_trains_saves_and_exports(folder, tmp_path):
    there = tmp_path / "short"
    there.mkdir()
    (there / "Qwen3-0.6B").symlink_to(folder / "Qwen3-0.6B")
    rows = sorted((folder / "train.jsonl").read_text().splitlines(), key=len)[:20]
    (there / "chats.jsonl").write_text("\n".join(rows) + "\n")
    printed = run(readme_script(), there)
    assert "20 rows in, 20 kept" in printed
    losses = [float(text) for text in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert [path.name for path in (there / "out/checkpoints").iterdir()] == ["step_00000006"]
    before, after = weights(folder / "Qwen3-0.6B"), weights(there / "out/export")
    assert before.keys() == after.keys()
    same = [name for name in before if not np.any(before[name] != after[name])]
    assert all("norm" in name for name in same)  # around 1, bfloat16 is coarser than six steps


def longer_script() -> str:
    """README's second, with shorter rows and saved more often."""
    script = readme_scripts()[1].replace("step % 50", "step % 2").replace("1024", "128")
    assert script.count("=128") == 3
    return script


def beside_its_names(folder: pathlib.Path, there: pathlib.Path) -> pathlib.Path:
    there.mkdir()
    (there / "Qwen3-0.6B").symlink_to(folder / "Qwen3-0.6B")
    rows = (folder / "train.jsonl").read_text().splitlines()
    (there / "chats.jsonl").write_text("\n".join(rows[:20]) + "\n")
    (there / "held_out.jsonl").write_text("\n".join(rows[20:28]) + "\n")
    return there


def cut_and_run_again(folder: pathlib.Path, there: pathlib.Path) -> str:
    """Stopped after its third step, then run as it stands."""
    beside_its_names(folder, there)
    cut = longer_script().replace("num_steps + 1):", "4):").replace("    base.export", "    # ")
    assert "4):" in cut and "base.export" not in cut
    run(cut, there)
    assert [path.name for path in (there / "out/checkpoints").iterdir()] == ["step_00000002"]
    return run(longer_script(), there)


@pytest.mark.thorough
def test_the_longer_one_evaluates_saves_and_goes_on(folder, tmp_path):
    printed = cut_and_run_again(folder, tmp_path / "cut")
    assert "<Plan: qwen3" in printed
    steps = [int(step) for step in re.findall(r"step (\d+): loss", printed)]
    assert steps == list(range(3, steps[-1] + 1)) and len(steps) > 2
    held_out = [float(x) for x in re.findall(r"held-out loss ([\d.]+) over", printed)]
    assert len(held_out) >= 2 and held_out[-1] < held_out[0]
    before, after = weights(folder / "Qwen3-0.6B"), weights(tmp_path / "cut/out/export")
    assert any(np.any(before[name] != after[name]) for name in before)


@pytest.mark.thorough
def test_the_longer_one_ends_as_in_one_go(folder, tmp_path):
    there = beside_its_names(folder, tmp_path / "whole")
    whole, cut = run(longer_script(), there), cut_and_run_again(folder, tmp_path / "cut")
    taken = [re.findall(r"step \d+: .*", printed) for printed in (whole, cut)]
    assert taken[1] == taken[0][2:]
    run(longer_script(), there)  # all is done: it only exports again
    one, other = (weights(tmp_path / name / "out/export") for name in ("whole", "cut"))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def trees_equal(one: pathlib.Path, other: pathlib.Path) -> bool:
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert not list(one.parent.glob(".*")), "leftovers"
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


@pytest.mark.thorough
def test_its_pieces_train_as_plain_optax_does(folder):
    base = slidedp_jax.from_pretrained(folder / "Qwen3-0.6B")
    rows, _ = base.rows(folder / "chats.jsonl", rows_per_step=8, max_seq_length=256, packing=True)
    batches = list(itertools.islice(rows, rows.num_steps(num_epochs=2)))
    plan = slidedp_jax.plan_for(
        base.config,
        rows_per_step=8,
        tokens_per_row=256,
        documents_per_row=rows.documents_per_row,
        compute_dtype="float32",
    )
    optimizer = optax.adamw(1e-3)
    with slidedp_jax.Trainer(
        base.model(),
        optimizer,
        strategy=plan.strategy,
        parameters=base.load_parameters,
        ema_decay=0.5,
        documents_per_row=rows.documents_per_row,
    ) as trainer:
        losses = [trainer.step(batch.arrays).loss for batch in batches]
        base.export(trainer, folder / "trained", dtype="float32")
        base.export(trainer, folder / "averaged", dtype="float32", averaged=True)
        with pytest.raises(UserError, match="is not empty"):
            base.export(trainer, folder / "trained")
        shutil.copytree(folder / "averaged", folder / "again")
        (folder / "again" / "former.txt").touch()
        base.export(trainer, folder / "again", dtype="float32", overwrite=True)
        assert trees_equal(folder / "again", folder / "trained")
        (folder / "no_model").mkdir()
        (folder / "no_model" / "thesis.txt").touch()
        with pytest.raises(UserError, match="no_model holds no model, so it is not overwritten"):
            base.export(trainer, folder / "no_model", overwrite=True)
        assert (folder / "no_model" / "thesis.txt").is_file()
        averages = trainer.averaged_parameters()
    expected_losses, _, expected, _ = train(
        base.config,
        weights(folder / "Qwen3-0.6B"),
        optax.chain(optax.clip_by_global_norm(1.0), optimizer),
        [batch.arrays for batch in batches],
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    trained, averaged = weights(folder / "trained"), weights(folder / "averaged")
    for name, value in expected.items():
        np.testing.assert_allclose(trained[name], value, rtol=0, atol=3e-5, err_msg=name)
        assert averaged[name].tobytes() == averages[name].tobytes()
    files = {path.name for path in (folder / "trained").iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= files


def test_no_folder_and_no_tokenizer_are_said(folder, tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        slidedp_jax.from_pretrained(tmp_path / "Qwen3-0.7B")
    bare = shutil.copytree(folder / "Qwen3-0.6B", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"chat template file .* does not exist"):
        slidedp_jax.from_pretrained(bare, chat_template=tmp_path / "other.jinja")
    base = slidedp_jax.from_pretrained(bare)
    text = tmp_path / "text.txt"
    text.write_text("words")
    with pytest.raises(UserError, match=r"has no tokenizer.json.*Write one with transformers"):
        base.rows([text], rows_per_step=8, max_seq_length=256)
    with pytest.raises(UserError, match=r"bare has no tokenizer\.json"):
        base.rows(folder / "chats.jsonl", rows_per_step=8, max_seq_length=256)
