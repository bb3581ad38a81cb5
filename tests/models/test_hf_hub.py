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


@pytest.mark.parametrize("path", ["./nothere", "../nothere", "~/nothere", "/nothere", "file"])
def test_a_mistyped_path_is_not_looked_for_on_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", None)  # it would be asked about the hub's
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="a folder") as caught:
        resolve_model_folder(path)
    assert str(caught.value).startswith(f"{path} is ")


def test_the_hub_needs_its_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[hub\]'"):
        resolve_model_folder("some-owner/some-model")


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_fetched_where_they_are_needed(weights, monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        assert revision is None
        asked.append((name, "*.safetensors" in allow_patterns, "*.json" in allow_patterns))
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_folder("some-owner/some-model", weights=weights) == tmp_path
    assert asked == [("some-owner/some-model", weights, True)]


class RepositoryNotFoundError(Exception):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class LocalEntryNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RepositoryNotFoundError("404 Client Error"), "the hub has none, or it is private"),
        (GatedRepoError("403"), "gated; accept its terms"),
        (LocalEntryNotFoundError("An error happened"), "the hub cannot be reached"),
        (OSError("connection lost\nmore"), "OSError: connection lost. What has been fetched"),
    ],
)
def test_what_is_neither_a_folder_nor_on_the_hub_is_called_so(error, said, monkeypatch, tmp_path):
    """The hub's package stands in by name: there is no network in tests."""

    def snapshot_download(*_, **__):
        raise error

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=said) as caught:
        resolve_model_folder("nosuch/dir")
    assert str(caught.value).startswith("There is no folder nosuch/dir here, and from the Hugging")
