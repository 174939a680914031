"""Runs that an earlier version wrote: what was taken out since does not keep them from going on."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

import driftlens as dl
from driftlens.base.errors import SpecError
from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.study.reopening import reopened
from driftlens.runs.run import DriftRun
from driftlens.runs.writer import RunWriter
from driftlens.spec.yaml_text import from_yaml, to_yaml
from tests.pipeline.calibrating import copied
from tests.zoo.world import TASKS


@pytest.fixture
def older(light: DriftRun, tmp_path: pathlib.Path) -> pathlib.Path:
    """A run whose spec has keys that nothing reads any more; its digest counts them."""
    folder = copied(light, tmp_path / "run")
    values = from_yaml((folder / "spec.yaml").read_text(), "spec")
    values["projection"] = {"methods": ["pca"], "layer": "final", "max_points": 2000, "seed": 0}
    values["compute"]["solve_dtype"] = "float64"
    (folder / "spec.yaml").write_text(to_yaml(values))
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    with RunWriter.resume(folder) as writer:
        writer.describe(spec_digest=hashlib.sha256(canonical.encode()).hexdigest())
    return folder


def test_it_can_be_added_to_and_gone_on_with(older: pathlib.Path) -> None:
    study, _ = reopened(older)
    assert tuple(study.tasks) == TASKS
    run = dl.analyze(older / "spec.yaml", out=older, resume=True, progress="none")
    assert run.tasks == TASKS
    with pytest.raises(SpecError, match="was begun with another spec"):
        analyze(older / "spec.yaml", out=older, overrides=["data.defaults.seed=1"], resume=True)
