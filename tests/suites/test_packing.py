"""The package holds the usual suites' weights, small and without loss; what is unpacked is what was trained."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from driftlens.base.errors import RunError
from driftlens.base.files import sha256_of
from driftlens.suites import cache as caches
from driftlens.suites.cache import RECORD, Suite
from driftlens.suites.embedded import ImageSuite
from driftlens.suites.packing import pack
from driftlens.suites.text import TextSuite, text_suite
from tests.suites.conftest import TINY

KINDS = (ImageSuite, TextSuite)
MOST = 30 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_holds_what_the_usual_recipe_makes_of_seed_0(kind: type[Suite]):
    packed, folder = kind.packed(), caches.PACKED / kind.prefix
    assert packed["digest"] == kind.usual.digest(0)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {RECORD, *packed["files"]}
    for name, stated in packed["files"].items():
        assert sha256_of(folder / name) == stated["sha256"]
        if name.endswith(".safetensors"):
            assert {tensor.dtype for tensor in load_file(folder / name).values()} == {torch.half}


def test_all_that_is_packed_is_small():
    assert sum(path.stat().st_size for path in caches.PACKED.rglob("*") if path.is_file()) < MOST


@pytest.fixture
def packed(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A place for a suite that isn't there yet, and that the package holds."""
    monkeypatch.setattr(caches, "PACKED", tmp_path / "weights")
    monkeypatch.setattr(ImageSuite, "build", lambda *_, **__: pytest.fail("trained again"))
    pack(suite, tmp_path / "weights" / suite.prefix)
    return replace(suite, folder=tmp_path / "cache" / suite.folder.name)


def test_what_is_unpacked_is_what_was_trained_to_the_last_bit(suite: Suite, packed: Suite):
    assert not packed.is_whole()
    again = ImageSuite.made(cache=packed.folder.parent, recipe=TINY)
    assert again == packed and again.record() == suite.record()


def test_a_damaged_package_is_refused_and_nothing_is_left(packed: Suite):
    file = caches.PACKED / packed.prefix / "base.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match=r"base\.safetensors is not the file") as refused:
        ImageSuite.made(cache=packed.folder.parent, recipe=TINY)
    assert "Install driftlens again" in str(refused.value.hint) and not packed.folder.exists()


def test_another_seed_is_trained(packed: Suite, monkeypatch: pytest.MonkeyPatch):
    trained: list[int] = []
    monkeypatch.setattr(
        ImageSuite, "build", lambda folder, _recipe, seed, _reporter: trained.append(seed) or folder.touch()
    )
    ImageSuite.made(cache=packed.folder.parent, recipe=TINY, seed=1)
    ImageSuite.made(cache=packed.folder.parent, recipe=TINY, rebuild=True)
    shutil.rmtree(caches.PACKED)
    ImageSuite.made(cache=packed.folder.parent, recipe=TINY)
    assert trained == [1, 0, 0]


@pytest.mark.slow
def test_training_anew_gives_models_of_the_same_scores(tmp_path: Path):
    """Of the texts, which are trained sooner: 400 test samples a task, and another processor's rounding."""
    anew = text_suite(cache=tmp_path, rebuild=True).record()["test_accuracy"]
    for task, scores in TextSuite.packed()["test_accuracy"].items():
        assert anew[task] == pytest.approx(scores, abs=0.05), task
