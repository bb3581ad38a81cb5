import importlib.util
import sys
import types

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


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_fetched_where_they_are_needed(weights, monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns, "*.json" in allow_patterns))
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_folder("some-owner/some-model", weights=weights) == tmp_path
    assert asked == [("some-owner/some-model", weights, True)]
