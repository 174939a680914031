"""Configuration files from the Hub: announced, cached, and never fetched when that is forbidden."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import huggingface_hub
import pytest

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints.loading import read_config


class Hub:
    """Stands for the Hub: what is cached, what could be downloaded, and how often it was asked."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.cached: set[str] = set()
        self.remote: set[str] = set()
        self.asked = 0
        self.down = False

    def download(
        self, repository: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert repository == "org/model" and "*.safetensors" not in allow_patterns
        if local_files_only and not self.cached:
            raise FileNotFoundError("it is not in the cache")
        if not local_files_only:
            self.asked += 1
            if self.down:
                raise ConnectionError("no route to host\nand more")
        for name in self.cached if local_files_only else self.remote:
            (self.folder / name).write_text(f'{{"file": "{name}"}}')
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def test_a_download_is_announced_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.remote = {"config.json"}
    with caplog.at_level(logging.WARNING, "driftlens"):
        assert read_config("org/model", "config.json") == {"file": "config.json"}
        hub.cached = hub.remote
        assert read_config("org/model", "preprocessor_config.json") is None
    assert caplog.text.count("configuration of org/model") == 1


@pytest.mark.parametrize("by_environment", [False, True], ids=["by_argument", "by_environment"])
def test_offline_only_the_cache_is_looked_at(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: Any, by_environment: bool
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", by_environment)
    hub.remote = {"config.json", "other.json"}
    assert read_config("org/model", "config.json", offline=not by_environment) is None
    hub.cached = {"config.json"}
    assert read_config("org/model", "config.json", offline=not by_environment) == {"file": "config.json"}
    assert read_config("org/model", "other.json", offline=not by_environment) is None
    assert hub.asked == 0 and caplog.text == ""


def test_trouble_on_the_way_is_said_in_one_line(hub: Hub) -> None:
    hub.down = True
    with pytest.raises(CheckpointError, match="org/model on the Hub can't be had") as failure:
        read_config("org/model", "config.json")
    assert "no route to host" in failure.value.message and "\n" not in failure.value.message


def test_a_folder_is_read_without_the_hub(hub: Hub, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"here": 1}')
    assert read_config(str(tmp_path), "config.json") == {"here": 1}
    assert read_config(str(tmp_path), "other.json") is None
    assert hub.asked == 0
