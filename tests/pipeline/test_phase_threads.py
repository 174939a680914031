"""Phases settle their threads, one by one, and what they settled on is recorded."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

import driftlens as dl
from driftlens.base import threads
from tests.zoo.world import TASKS, World


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "what torch was given did not come back"
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_phase_that_runs_models_settles_its_own_threads(
    world: World, tmp_path: pathlib.Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def measured(rows: int, width: int) -> object:
        sizes.append((rows, width))
        return lambda: None

    answers = iter([1, 2, 1, 2, 2])
    monkeypatch.setattr(threads, "some_layer", measured)
    monkeypatch.setattr(threads, "fewest_threads", lambda work, candidates: next(answers))
    run = dl.analyze(world.spec(metrics={"jacobian": False}), out=tmp_path / "run", progress="none")
    first = TASKS[0]
    assert run.manifest.threads == {"torch": 2, f"analyze:{first}": 1, f"evaluate:{first}": 1}
    assert len(sizes) == 5, "two analyses, two evaluations, the parameters"
    width = world.state("base")["visual.proj"].shape[0]
    assert {found for _, found in sizes} == {width}


def test_a_number_that_was_asked_for_is_taken_without_measuring(
    world: World, tmp_path: pathlib.Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "fewest_threads", lambda *_: pytest.fail("measured"))
    monkeypatch.setenv(threads.VARIABLE, "1")
    run = dl.analyze(world.spec(metrics={"jacobian": False}), out=tmp_path / "run", progress="none")
    assert {run.manifest.threads[f"analyze:{task}"] for task in TASKS} == {1}
