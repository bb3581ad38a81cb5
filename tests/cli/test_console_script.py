"""`slidedp`: its commands, and what it says of others."""

import pytest

import slidedp_jax
from slidedp_jax.cli import _COMMANDS, main


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
    assert captured.err.startswith("error: there is no command 'foo'\nusage: slidedp {train,")
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
    assert f"slidedp {name}" in usage or f"-m slidedp_jax.{name}" in usage
