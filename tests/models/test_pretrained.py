"""open_clip's pretrained tags: the file its own helper gives, announced, from the cache, or refused with the way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import open_clip
import pytest
from safetensors.torch import save_file

from driftlens.config.run import load_spec
from driftlens.experiment.loading import open_models
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.architectures.clip import resolve_pretrained
from driftlens.utils.distributed import Access
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError, SpecError
from tests.refusing import refusing
from tests.specs import minimal
from tests.zoo.small import scrambled
from tests.zoo.towers import OPEN_CLIP_CONFIG

MODEL = "tiny-quickgelu"
TAG = {"hf_hub": "somebody/tiny/", "quick_gelu": True, "mean": open_clip.OPENAI_DATASET_MEAN}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tiny model that open_clip knows by name, with two tags and an empty cache; a place for its file."""
    configs = {MODEL: OPEN_CLIP_CONFIG, "tiny": {**OPEN_CLIP_CONFIG, "quick_gelu": False}}
    other = TAG | {"mean": (0.0, 0.0, 0.0)}
    for name, config in configs.items():
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"openai": TAG, "other": other})
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repository, file: None)
    return tmp_path / "open_clip_model.safetensors"


def tiny(name: str = MODEL) -> Architecture:
    return load_architecture("open-clip", name)


def test_a_tag_is_fetched_by_open_clips_helper_and_announced(
    published: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def download(config: dict[str, Any]) -> str:
        assert config == TAG
        return str(published)

    monkeypatch.setattr(open_clip, "download_pretrained", download)
    with caplog.at_level(logging.WARNING, "driftlens"):
        assert resolve_pretrained("pretrained:openai", tiny()) == str(published)
    assert "downloading pretrained:openai" in caplog.text and "somebody/tiny" in caplog.text
    assert resolve_pretrained("base.safetensors", tiny()) == "base.safetensors"


def test_what_is_in_the_cache_is_used_offline_as_the_base_of_a_spec(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = scrambled(lambda: open_clip.CLIP(**OPEN_CLIP_CONFIG))
    save_file(module.state_dict(), published)
    cached = {("somebody/tiny", published.name): str(published)}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *place: cached.get(place))
    monkeypatch.setattr(open_clip, "download_pretrained", None)
    spec = load_spec(
        minimal(
            architecture={"loader": "open-clip", "source": MODEL},
            base={"weights": "pretrained:openai"},
            merged={"weights": str(published)},
            experts={"cars": {"weights": str(published)}},
        )
    )
    models = open_models(spec, Access(offline=True))
    assert models.base is not None and set(models.base.headers) == set(module.state_dict())
    assert models.origins["base"] == "pretrained:openai"


def test_what_is_not_in_the_cache_is_refused_offline(published: Path) -> None:
    with refusing(CheckpointError, "somebody/tiny", "downloads are off", hint="--offline"):
        resolve_pretrained("pretrained:openai", tiny(), offline=True)


@pytest.mark.parametrize(
    ("model", "place", "error", "words"),
    [
        (MODEL, "pretrained:openia", SpecError, ["available: openai, other", "'openai'"]),
        ("tiny", "pretrained:openai", IncompatibleModelsError, ["with QuickGELU", "source: tiny-quickgelu"]),
        (MODEL, "pretrained:other", IncompatibleModelsError, ["other preprocessing: mean (0.0, 0.0, 0.0)"]),
    ],
    ids=["no such tag", "another activation", "other pixels"],
)
def test_a_tag_that_does_not_fit_is_refused(
    published: Path, model: str, place: str, error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as refusal:
        resolve_pretrained(place, tiny(model))
    assert all(word in str(refusal.value) for word in words)
