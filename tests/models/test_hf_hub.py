import importlib.util

import pytest

from slidedp_jax.models.hf_hub import resolve_model_folder


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model_folder(str(tmp_path)) == tmp_path


def test_a_path_that_is_not_there_is_no_hub_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        resolve_model_folder(str(tmp_path / "a" / "b"))


def test_the_hub_needs_its_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'slidedp_jax\[hub\]'"):
        resolve_model_folder("some-owner/some-model")
