"""Configuration files from the Hub: announced, cached, and never fetched when that is forbidden."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints.loading import read_config


class Hub:
    """Stands for the Hub: what is cached, what could be downloaded, and what was."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.cached: set[str] = set()
        self.remote: set[str] = set()
        self.asked: list[str] = []
        self.down = False

    def file(self, name: str) -> str:
        path = self.folder / name
        path.write_text(f'{{"file": "{name}"}}')
        return str(path)

    def look_up(self, repository: str, file: str, revision: str | None = None) -> str | None:
        return self.file(file) if file in self.cached else None

    def download(self, repository: str, file: str, revision: str | None = None) -> str:
        self.asked.append(f"{repository}/{file}")
        if self.down:
            raise ConnectionError("no route to host\nand more")
        if file not in self.remote:
            raise EntryNotFoundError(file)
        return self.file(file)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", hub.look_up)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def test_a_download_is_announced(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.remote = {"config.json"}
    with caplog.at_level(logging.WARNING, "driftlens"):
        assert read_config("org/model", "config.json") == {"file": "config.json"}
    assert "config.json of org/model" in caplog.text


def test_a_file_the_repository_lacks_is_none(hub: Hub) -> None:
    assert read_config("org/model", "preprocessor_config.json") is None
    assert hub.asked == ["org/model/preprocessor_config.json"]


@pytest.mark.parametrize("by_environment", [False, True], ids=["by_argument", "by_environment"])
def test_offline_only_the_cache_is_looked_at(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: Any, by_environment: bool
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", by_environment)
    hub.remote, hub.cached = {"config.json", "other.json"}, {"config.json"}
    assert read_config("org/model", "config.json", offline=not by_environment) == {"file": "config.json"}
    assert read_config("org/model", "other.json", offline=not by_environment) is None
    assert hub.asked == [] and caplog.text == ""


def test_trouble_on_the_way_is_said_in_one_line(hub: Hub) -> None:
    hub.down = True
    with pytest.raises(CheckpointError) as failure:
        read_config("org/model", "config.json")
    assert failure.value.message == "org/model: config.json can't be fetched from the Hub: no route to host"
    assert "folder" in failure.value.hint


def test_a_folder_is_read_without_the_hub(hub: Hub, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"here": 1}')
    assert read_config(str(tmp_path), "config.json") == {"here": 1}
    assert read_config(str(tmp_path), "other.json") is None
    assert hub.asked == []
