"""What tests of the pipeline and of the command line share: one world, and one finished run of it per form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import driftlens as dl
from driftlens.jobs.preflight import rehearsal
from driftlens.runs.run import DriftRun
from tests.pipeline.calibrating import copied, roomy_run
from tests.zoo.world import World, build


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Base and two experts; read-only."""
    return build(tmp_path_factory.mktemp("world") / "models")


@pytest.fixture(scope="session")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A finished run of the world in open_clip's form; read-only."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return dl.analyze(world.spec(metrics={"jacobian": {"samples": 2}, "cka": True}), out=out, progress="none")


@pytest.fixture(scope="session")
def light(world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A finished run of the same world without Jacobians, which take longest; read-only."""
    out = tmp_path_factory.mktemp("light") / "run"
    return dl.analyze(world.spec(metrics={"jacobian": False}), out=out, progress="none")


@pytest.fixture(scope="session")
def roomy(world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A finished run of the same models with more samples; read-only."""
    return roomy_run(world, tmp_path_factory.mktemp("roomy"))


@pytest.fixture
def folder(light: DriftRun, tmp_path: Path) -> Path:
    """The same run for a test to add to."""
    return copied(light, tmp_path / "run")


def rehearse_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let every estimate rest on the first short study alone, which otherwise only says how long the others take."""
    run, size = rehearsal.short_run, rehearsal.Size(1, (rehearsal._FEW,), 2)
    last: list[tuple[object, object, rehearsal.ShortRun]] = []

    def once(study: Any, models: Any, at: Any, job: Any, before: Any = None) -> rehearsal.ShortRun:
        if not (at == size and last and last[0][0] is study and last[0][1] is job):
            last[:] = [(study, job, run(study, models, at, job, before))]
        return last[0][2]

    patch.setattr(rehearsal, "short_run", once)
    patch.setattr(rehearsal, "_sizes", lambda *study, **kind: [size])
    patch.setattr(rehearsal, "_PATIENCE", 0.0)


@pytest.fixture(autouse=True)
def brief_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short study is enough where nobody asks how good an estimate is; who does has a fixture of this name."""
    rehearse_briefly(monkeypatch)


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """Where a test may write its spec."""
    return tmp_path / "run.yaml"
