"""Runs that an earlier version wrote: what was taken out since does not keep them from going on."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftlens as dl
from driftlens.config.requests import AnalysisRequest
from driftlens.config.types import parse_yaml, to_yaml
from driftlens.pipelines.analyze import analyze, reopen_study
from driftlens.pipelines.calibrate import calibrate
from driftlens.results.calibration_summary import leaderboard_rows
from driftlens.runs.run import DriftRun
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import SpecError
from tests.pipelines.calibrating import copied, files_of, request
from tests.pipelines.older import listed, printed, told
from tests.quick import few
from tests.zoo.world import TASKS

WRITTEN = Path(__file__).with_name("older_runs.tar.xz")
"""Runs that commit df14fcd wrote, schema 1.8, and what `tests.pipelines.older` was told of them by that very commit."""
RUNS = {
    "images": "calibrated by FeatCal with its control, by Surgery, which attaches, and in an arena; swept, projected",
    "texts": "of a tiny Llama, calibrated stepwise; scores of another tool are attached",
    "live": "of modules that are in no file, calibrated",
    "stopped": "cancelled while its second task was measured",
    "begun": "measured, and cancelled while its layers were calibrated",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def noted(written: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the commit that wrote the runs told of them, which lie in the current folder."""
    monkeypatch.chdir(written / "runs")
    return json.loads((written / "noted.json").read_text())


def missing(told: Any, noted: Any) -> dict[str, Any]:
    """What was noted and is told no more, or differently; more may be told."""
    return {
        place: (value, told.get(place))
        for place, value in noted.items()
        if (missing(told.get(place, {}), value) if isinstance(value, dict) else told.get(place, "-") != value)
    }


@pytest.mark.parametrize("name", few(RUNS, ["images", "stopped"]))
def test_all_that_a_run_told_it_still_tells(name: str, noted: dict[str, Any]) -> None:
    before, says = files_of(Path(name)), told(name)
    changed = missing(says, noted["runs"][name])
    # Commands that are part of others now, tables that had rows of the control at rho 1, columns that repeated the
    # score, the extremes over tasks of a share that has an interval, and shares of module groups with
    # their self-check, the fourth of the list.
    gone = (
        "advise ",
        "code of advise",
        "verify ",
        "code of verify",
        "before and after ",
        "table group_contributions",
        "check executed",
        "check pass",
        "check skip",
        *(f"check results/{place}/" for place in range(3, 7)),
        "show verdict/source/",
    )
    changed = {place for place in changed if not place.startswith("compare tasks/") or "accuracy_" not in place}
    assert all(place.startswith(gone) for place in changed), changed
    assert files_of(Path(name)) == before  # nothing is written by looking


def test_they_are_listed_as_they_were(noted: dict[str, Any]) -> None:
    assert sorted(RUNS) == sorted(noted["runs"]) and not missing(listed(), noted["listing"])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "stopped"])
def test_they_are_whole(name: str, noted: dict[str, Any]) -> None:
    assert printed("check", name)[0] == 0
    run = dl.open_run(name)
    for task in run.tasks:
        pictures, texts = run.thumbs(task), run.texts(task)
        assert (pictures is not None) == (name in ("images", "begun")) and bool(texts) == (name == "texts")
        for variant in (*run.variants, "expert"):
            features = run.features(task, variant, "final")
            assert len(features) == len(run.sample_ids(task)) and np.isfinite(features).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "images", "texts", "live"])
def test_reports_are_made_of_them(name: str, noted: dict[str, Any], tmp_path: Path) -> None:
    code, _ = printed("report", name, "--format", "html-light,json,md", "--out", str(tmp_path))
    assert code == 0 and len(list(tmp_path.iterdir())) == 3
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["run"]["id"] == dl.open_run(name).id


@pytest.fixture
def older(light: DriftRun, tmp_path: Path) -> Path:
    """A run whose spec has keys that nothing reads any more; its digest counts them."""
    folder = copied(light, tmp_path / "run")
    values = parse_yaml((folder / "spec.yaml").read_text(), "spec")
    values["projection"] = {"methods": ["pca"], "layer": "final", "max_points": 2000, "seed": 0}
    values["compute"]["solve_dtype"] = "float64"
    (folder / "spec.yaml").write_text(to_yaml(values))
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    with RunWriter.resume(folder) as writer:
        writer.update_manifest(spec_digest=hashlib.sha256(canonical.encode()).hexdigest())
    return folder


def test_it_can_be_added_to_and_gone_on_with(older: Path) -> None:
    study, _ = reopen_study(older)
    assert tuple(study.tasks) == TASKS
    run = dl.analyze(older / "spec.yaml", out=older, resume=True, progress="none")
    assert run.tasks == TASKS
    with pytest.raises(SpecError, match=r"was begun with another data\.defaults\.seed: 0, now 1"):
        analyze(older / "spec.yaml", AnalysisRequest(out=older, overrides=["data.defaults.seed=1"], resume=True))


@pytest.mark.slow
def test_repairs_by_methods_that_are_gone_are_shown_as_stored(light: DriftRun, tmp_path: Path) -> None:
    """One attaches maps that nobody can rebuild, the other has a setting that its method lacks by now."""
    folder = copied(light, tmp_path / "run")
    calibrate(folder, request("maps", method="surgery", parameters={"steps": 2}))
    calibrate(folder, request("solved"))
    file = folder / "manifest.json"
    record = json.loads(file.read_text())
    record["calibrations"]["maps"]["method"] = "react"
    record["calibrations"]["solved"]["settings"]["routers"] = "off"
    file.write_text(json.dumps(record))
    run = dl.open_run(folder)
    assert set(run.layers(variant="calibrated:maps")["task"]) == set(TASKS)
    rows = {row["model"]: row for row in leaderboard_rows(run)}
    assert rows["maps"]["method"] == "react" and rows["maps"]["added"] > 0
    for command in ("show", "report"):
        assert printed(command, str(folder))[0] == 0
    study, _ = reopen_study(folder)
    assert "calibrated:maps" not in study.pool and "calibrated:solved" in study.pool
    again = calibrate(folder, request("more", method="featcal"))
    assert {*again.manifest.calibrations} == {"maps", "solved", "more"}
    assert again.manifest.calibrations["solved"].settings["routers"] == "off"
