from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.file_download import repo_folder_name

from octavo.config import ModelSettings
from octavo.errors import ConfigError
from octavo.weights import default_model
from octavo.weights.hub import by_hub_name, resolve_model


def test_what_exists_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    assert resolve_model(ModelSettings(model=str(tmp_path))) == tmp_path / "model.gguf", "its only file"
    (tmp_path / "config.json").touch()
    assert resolve_model(ModelSettings(model=str(tmp_path))) == tmp_path
    assert resolve_model(ModelSettings(model=str(tmp_path / "model.gguf"))) == tmp_path / "model.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(ModelSettings(model="~/model.gguf")) == tmp_path / "model.gguf"


def test_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []
    monkeypatch.setattr(default_model, "fetch_default_model", lambda folder: asked.append(folder) or tmp_path)
    assert resolve_model(ModelSettings()) == tmp_path
    resolve_model(ModelSettings(download_dir=str(tmp_path)))
    assert asked == [None, tmp_path]


def test_an_id_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    settings = ModelSettings(model="owner/name", revision="main", download_dir="/models")
    assert resolve_model(settings) == tmp_path
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("owner/name", "main", "/models")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked["allow_patterns"])
    resolve_model(ModelSettings(model="owner/name", load_format="pt"))
    assert "*.bin" in asked["allow_patterns"]
    assert "*.safetensors" not in asked["allow_patterns"]


@pytest.mark.parametrize("name", ["owner/name", "a.b/model-1_x", "gpt2"])
def test_a_folder_of_another_machines_cache(name: str, tmp_path: Path) -> None:
    folder = tmp_path / repo_folder_name(repo_id=name, repo_type="model") / "snapshots" / "0123abc"
    found = by_hub_name(ModelSettings(model=str(folder), offline=True))
    assert found == ModelSettings(model=name, revision="0123abc", offline=True)
    folder.mkdir(parents=True)
    for model in (folder, tmp_path / "missing", folder / "missing", tmp_path / "snapshots" / "missing"):
        assert by_hub_name(ModelSettings(model=str(model))).model == str(model)


def test_the_hub_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"'owner/name' does not exist here, .* \(no network\). Give the path"):
        resolve_model(ModelSettings(model="owner/name"))


@pytest.mark.parametrize(
    "name", ["/missing/folder", "./missing", "missing.gguf", "a/b/c", "owner/../name", "", "a b", "-x/y", "x" * 200]
)
def test_what_is_neither(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist, and is not 'smollm2-135m' or an id on the hub"):
        resolve_model(ModelSettings(model=name))


@pytest.mark.parametrize("way", ["setting", "variable"])
def test_nothing_is_fetched_offline(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "find_url", lambda requirement: pytest.fail("it asks the package index"))
    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or "here")
    if way == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    is_set = way == "setting"
    with pytest.raises(ConfigError, match="'smollm2-135m' is not on this machine, and offline it is not fetched"):
        resolve_model(ModelSettings(download_dir=str(tmp_path), offline=is_set))
    assert resolve_model(ModelSettings(model="owner/name", offline=is_set)) == Path("here")
    assert asked["local_files_only"]
