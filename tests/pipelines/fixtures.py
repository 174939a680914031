"""What tests of the pipeline and of the command line share: one world, and one finished run of it per form."""

from __future__ import annotations

from pathlib import Path

import pytest

import driftlens as dl
from driftlens.runs.run import DriftRun
from tests.pipelines.calibrating import copied, roomy_run
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


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """Where a test may write its spec."""
    return tmp_path / "run.yaml"
