"""What the documents name is there: tests, settings, commands, files."""

import ast
import re
from pathlib import Path

import pytest

from slidedp_jax.run.arguments import FIELDS
from slidedp_jax.run.other_tools import ANSWERS, CALLED_HERE, answer

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_field_case_has_tests_that_exist():
    text = (DOCS / "field_cases.md").read_text()
    rows = re.findall(r"^\| ([A-Z]\d\d) \| .* \| (.*) \|$", text, re.M)
    assert len(rows) == len({case for case, _ in rows}) == 61
    for case, held in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", held)
        assert tests, case
        for file, name in tests:
            assert name in functions(ROOT / "tests" / file), (case, file, name)


def test_tables_for_other_tools_name_settings_that_exist_and_are_answered():
    """Left: their names, each of which the command answers; right: ours."""
    text = (DOCS / "coming_from_other_tools.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`[^|]*) \| ([^|]*) \|", text, re.M)
    assert len(rows) > 60
    for theirs, ours in rows:
        for name in re.findall(r"`([\w.]+)`", theirs):
            key = name.rsplit(".", 1)[-1].lower()
            known = key in FIELDS or key in CALLED_HERE or key in ANSWERS or answer(key)
            assert known or "." in name, name
        for name in re.findall(r"`([a-z_0-9]+)`", ours):
            assert name in FIELDS or name in VALUES, (theirs, name)


VALUES = {
    *("adamw", "lion", "sgd", "adafactor", "muon", "auto", "null", "true", "false", "messages"),
    *("cosine", "linear", "constant", "constant_with_warmup", "assistant", "completion", "all"),
    *("inverse_sqrt", "warmup_stable_decay", "bfloat16", "float32", "skip", "stop", "truncate"),
    *("drop", "tensorboard", "wandb", "none", "conversations", "text", "prompt", "split"),
}
"""Words of the tables that are values, or fields of rows."""


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page):
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (DOCS / target).exists(), target
    for file in re.findall(r"`((?:scripts|examples|docs)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize(
    "page", ["from_zero_to_served.md", "troubleshooting.md", "coming_from_other_tools.md"]
)
def test_flags_exist(page):
    text = (DOCS / page).read_text()
    others = {
        "out",
        "help",
        "dtype",
        "rounding",
        "ema",
        "rows",
        "thorough",
        "prompt",
        "max_new_tokens",
    }
    others |= {"total_tokens", "preset", "max-model-len", "served-model-name", "version"}
    others |= {"tokens_per_step", "num_gpus", "config"}
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]+)", text):
        assert flag in FIELDS or flag in others, flag
