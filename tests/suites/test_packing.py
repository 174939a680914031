"""The package holds the usual suites' weights, small and without loss; what is unpacked is what was trained."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from driftlens.base.errors import RunError
from driftlens.base.files import sha256_of
from driftlens.suites import cache as caches
from driftlens.suites.cache import RECORD, Suite
from driftlens.suites.embedded import ImageSuite
from driftlens.suites.packing import pack
from driftlens.suites.text import TextSuite
from driftlens.suites.training import Worker
from driftlens.suites.writing import texts
from tests.suites.conftest import TINY, alone

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


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_unpacked_is_what_was_trained_to_the_last_bit(suite: Suite, packed: Suite, apart: bool):
    assert not packed.is_whole()
    again = ImageSuite.made(cache=packed.folder.parent, recipe=TINY, apart=apart)
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


class OfOne(Worker):
    """Draws all and trains the base, but of the experts only that of adapters, which is made soonest."""

    def jobs(self, jobs: Sequence[Any]) -> Sequence[Any]:
        return [job for job in jobs if job == TextSuite.usual.adapted or job not in texts]


@pytest.mark.slow
@pytest.mark.every
def test_training_anew_gives_models_of_the_same_scores(tmp_path: Path):
    """Of the texts, which are trained sooner: 400 test samples a task, and another processor's rounding."""
    anew = dict[str, Any]()

    def heard(phase: str, name: str, _step: int, value: Any = None) -> None:
        anew.update({} if phase else {name: value})

    for name in (caches.DRAWN, "data", "experts"):
        (tmp_path / name).mkdir()
    with alone(OfOne):
        num_values = sum(value.numel() for value in TextSuite.untrained(TextSuite.usual).parameters())
        caches.work_together(TextSuite.work, (tmp_path, TextSuite.usual, 0), heard, num_values)
    [(task, scores)] = anew.items()
    assert scores == pytest.approx(TextSuite.packed()["test_accuracy"][task], abs=0.05)
