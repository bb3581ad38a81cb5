"""`slidedp`: its commands, and what it says of others."""

import pytest

import slidedp_jax
from slidedp_jax.cli import _COMMANDS, main
from slidedp_jax.wording import wrapped


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out == f"slidedp_jax {slidedp_jax.__version__}\n"


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help(word, capsys):
    assert main([word]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in _COMMANDS)


def test_unknown_commands(capsys):
    assert main(["foo"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: there is no command 'foo'; there are train, preview, plan, compare, measure, "
        "export, checkpoints, report, schema, generate (`slidedp --help`)\n"
    )
    assert main(["trian"]) == 2
    assert "'trian'; did you mean train?" in capsys.readouterr().err
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_a_help(name, capsys):
    try:
        assert main([name, "--help"]) == 0
    except SystemExit as stopped:
        assert stopped.code == 0
    usage = capsys.readouterr().out
    assert usage.startswith("usage: ")
    assert usage.startswith(f"usage: slidedp {name}")


@pytest.mark.parametrize("name", ["plan", "export", "generate", "preview"])
def test_wrong_flags_are_said_in_a_line_without_the_usage(name, capsys):
    words = {"plan": ["--preset"], "export": ["a"], "generate": [], "preview": ["--rows"]}[name]
    with pytest.raises(SystemExit) as stopped:
        main([name, *words])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"`slidedp {name} --help` lists all flags" in error


def test_lines_break_between_words_under_their_column():
    text = "a word " * 20 + "--optim lion"
    lines = wrapped(text, 40).splitlines()
    assert all(len(line) <= 40 for line in lines) and " ".join(text.split()) == " ".join(
        " ".join(lines).split()
    )
    assert all(line.startswith("  ") for line in lines[1:])
    table = "  name              12.00 GiB  " + "what it is " * 6
    first, second, *_ = wrapped(table, 60).splitlines()
    assert first.index("what") == len(second) - len(second.lstrip())
    assert wrapped(text, None) == text
