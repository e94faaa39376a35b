from pathlib import Path

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from topr_trl.settings import checks


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    (tmp_path / "my-run" / "iteration-1" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("my-rum", "my-run"),
        ("my-rum/iteration-1/model", "my-run/iteration-1/model"),
        ("my-run/iteration-1/modle", "my-run/iteration-1/model"),
        ("./my-rum", "my-run"),
        ("my-run/other", None),  # Its parent is a folder here.
        ("a/b/c", None),  # An id on the Hub has at most one slash.
        ("name-", None),
        ("~/model", None),
        ("/nowhere/model", None),
    ],
)
def test_a_misspelled_folder_is_not_searched_on_the_hub(name, similar):
    with pytest.raises(FileNotFoundError, match=f"no folder {name}") as caught:
        checks.check_model_folder(name)
    assert ("Did you mean" in str(caught.value)) == (similar is not None)
    assert similar is None or f"Did you mean {similar}?" in str(caught.value)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "gpt2", "my-run", "my-run/iteration-1/model"])
def test_folders_and_ids_on_the_hub_pass(name):
    checks.check_model_folder(name)


def test_a_file_is_no_folder_of_a_model(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(NotADirectoryError, match=r"is a file\. Use the folder"):
        checks.check_model_folder(str(tmp_path / "model.gguf"))


def test_a_model_in_the_cache_of_the_hub_passes_beside_similar_folders(monkeypatch, tmp_path):
    (tmp_path / "org" / "model-2").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="hf download org/model-1"):
        checks.check_model_folder("org/model-1")
    (tmp_path / "cache" / "models--org--model-1").mkdir(parents=True)
    assert Path(HF_HUB_CACHE) == Path(checks.HF_HUB_CACHE)
    monkeypatch.setattr(checks, "HF_HUB_CACHE", str(tmp_path / "cache"))
    checks.check_model_folder("org/model-1")
