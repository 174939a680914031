"""Drift and accuracy come first, where the drift comes from afterwards: at once, later, or after an interruption."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import driftlens as dl
from driftlens.base.access import Context
from driftlens.base.diagnostic import diagnostics
from driftlens.base.errors import Cancelled
from driftlens.base.progress import CancelToken, ProgressEvent
from driftlens.findings.listing import find_runs
from driftlens.jobs.analyze.job import explain
from driftlens.jobs.calibrate.job import calibrate
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify
from tests.pipeline.calibrating import CONTROL, NAME, TABLES, VARIANT, copied, request
from tests.zoo.world import TASKS, World

METRICS = {"jacobian": {"samples": 2}, "cka": True}
BY_ATTRIBUTION = [
    column.name
    for entry in diagnostics.values()
    if (entry.needs, entry.table) == ("jacobian", "layers")
    for column in entry.columns
]


@pytest.fixture(scope="module")
def at_once(finished: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run and a calibration of it in one go; read-only."""
    return calibrate(copied(finished, tmp_path_factory.mktemp("at-once") / "run"), request())


def finished_phases(run: DriftRun) -> list[str]:
    """Names of phases in the order in which they were done, by the events."""
    events = map(json.loads, (run.path / "events.jsonl").read_text().splitlines())
    return [event["name"] for event in events if event["event"] == "phase" and event["state"] == "done"]


def same(found: DriftRun, expected: DriftRun) -> None:
    """Every row of every table, in the same order, bit for bit."""
    assert found.variants == expected.variants
    for table in TABLES:
        frames = [getattr(run, table)() for run in (found, expected)]
        keys = [name for name in ("variant", "task", "layer", "scope", "path") if name in frames[0]]
        rows = [frame.sort_values(keys, kind="stable").reset_index(drop=True) for frame in frames]
        pd.testing.assert_frame_equal(*rows, check_exact=True, obj=table)


def unexplained(run: DriftRun, variant: str) -> bool:
    rows = run.layers(variant=variant)
    assert len(rows) and rows["drift_l2_mean"].notna().all()
    return bool(rows[BY_ATTRIBUTION].isna().all(axis=None))


def test_an_analysis_measures_all_tasks_before_it_explains_one(finished: DriftRun) -> None:
    phases = finished_phases(finished)
    firsts = [phases.index(f"{kind}:{task}") for task in TASKS for kind in ("analyze", "evaluate")]
    assert max(firsts) < min(phases.index(f"explain:{task}") for task in TASKS)


def test_a_calibration_is_there_with_drift_and_accuracy_before_it_is_explained(
    finished: DriftRun, at_once: DriftRun, tmp_path: pathlib.Path
) -> None:
    seen: list[tuple[list[str], DriftRun, pd.DataFrame, pd.DataFrame]] = []

    def look(run: DriftRun) -> None:
        assert {VARIANT, CONTROL} <= set(run.variants) and NAME in run.manifest.calibrations
        assert unexplained(run, VARIANT) and unexplained(run, CONTROL)
        seen.append((finished_phases(run), run, run.layers(), run.accuracy()))

    def hear(text: str) -> None:
        assert not seen
        said.append(text)

    said: list[str] = []
    run = calibrate(copied(finished, tmp_path / "run"), request(), on_first=hear, on_measured=look)
    (sentence,) = said
    assert_told_of(run, sentence)
    ((phases, early, layers, accuracy),) = seen
    own = [name for name in phases if name.startswith("calibrate:")]
    steps = [f"calibrate:{NAME}:{kind}:{task}" for kind in ("analyze", "evaluate") for task in TASKS]
    assert own == [f"calibrate:{NAME}", f"calibrate:{NAME}:look", *steps]
    later = [name for name in finished_phases(run) if name.startswith("calibrate:")][len(own) :]
    explained = [f"calibrate:{NAME}:explain:{task}" for task in TASKS]
    assert later == [f"calibrate:{NAME}:digests", f"calibrate:{NAME}:params", *explained]
    columns = [name for name in layers if name not in BY_ATTRIBUTION]
    pd.testing.assert_frame_equal(layers[columns], run.layers()[columns], check_exact=True)
    pd.testing.assert_frame_equal(accuracy, run.accuracy(), check_exact=True)
    assert early.path == run.path and not unexplained(run, VARIANT)
    same(run, at_once)


def assert_told_of(run: DriftRun, sentence: str) -> None:
    """The first look's numbers are those that the tables hold of the same samples."""
    drift, right, size, n = {"merged": 0.0, VARIANT: 0.0}, {"merged": 0, VARIANT: 0, "expert": 0}, 0.0, 0
    for task in run.tasks:
        few = list(run.sample_ids(task))[: run.manifest.calibrations[NAME].samples[task]]
        features = run.features(task, "expert", "final")[: len(few)].astype(np.float64)
        size, n = size + float(np.linalg.norm(features, axis=1).sum()), n + len(few)
        for variant in drift:
            rows = run.samples(task, variant, layer="final").set_index("sample_id").loc[few]
            drift[variant] += rows["drift_l2"].sum()
            outputs = run.outputs(task, variant).set_index("sample_id").loc[few]
            right[variant] += int((outputs["pred"] == outputs["label"]).sum())
        right["expert"] += int((outputs["expert_pred"] == outputs["label"]).sum())
    told = re.fullmatch(
        rf"first look, {n} samples of {len(run.tasks)} tasks: relative drift merged ([\d.]+), {NAME} ([\d.]+); "
        rf"accuracy with 95 % interval \(n = {n}\) merged ([\d.]+) % .*, {NAME} ([\d.]+) % .*, expert ([\d.]+) % .*",
        sentence,
    )
    assert told is not None, sentence
    wanted = [value / size for value in drift.values()]
    assert [float(value) for value in told.groups()[:2]] == pytest.approx(wanted, abs=2e-3)
    assert list(told.groups()[2:]) == [f"{count / n:.1%}".rstrip("%") for count in right.values()]


def test_an_attribution_that_comes_later_is_the_one_that_comes_at_once(
    world: World, at_once: DriftRun, tmp_path: pathlib.Path
) -> None:
    run = dl.analyze(world.spec(metrics=METRICS), out=tmp_path / "run", progress="none", attribution=False)
    calibrate(run.path, request(attribution=False))
    left = open_run(run.path)
    assert unexplained(left, "merged") and unexplained(left, VARIANT)
    assert find_runs(run.path)[0].state == "done" and not any(
        "explain" in name for name in left.manifest.phases
    )
    same(dl.open_run(run.path).explain(), at_once)
    before = open_run(run.path).manifest
    explain(run.path)  # nothing is missing any more
    assert open_run(run.path).manifest.phases == before.phases and verify(run.path).ok


def test_a_run_that_was_explained_as_it_was_measured_is_left_as_it_is(
    finished: DriftRun, tmp_path: pathlib.Path
) -> None:
    """Older runs have the attribution in their rows and no phase of their own for it."""
    folder = copied(finished, tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["phases"] = {name: at for name, at in manifest["phases"].items() if "explain" not in name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    same(explain(folder), finished)
    assert not any("explain" in name for name in open_run(folder).manifest.phases)


def test_a_run_without_jacobians_is_explained_with_their_defaults(
    light: DriftRun, tmp_path: pathlib.Path
) -> None:
    run = explain(copied(light, tmp_path / "run"))
    rows = run.layers(variant="merged")
    assert rows["jacobian_samples"].tolist() == [5] * len(rows)  # all diagnosis samples there are
    assert rows.groupby("task")["final_share"].sum().between(0.99, 1.01).all()


@pytest.mark.slow
def test_an_attribution_that_was_cancelled_goes_on(
    finished: DriftRun, at_once: DriftRun, tmp_path: pathlib.Path
) -> None:
    folder, token = copied(finished, tmp_path / "run"), CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "explain" and TASKS[1] in event.label:
            token.cancel()

    with pytest.raises(Cancelled) as caught:
        calibrate(folder, request(), Context(on_progress=stop, cancel=token))
    assert f"`driftlens explain {folder}`" in caught.value.hint
    stopped = open_run(folder)
    assert VARIANT in stopped.variants and unexplained(dl.open_run(folder), VARIANT) is False
    (summary,) = find_runs(folder)
    assert summary.state == "done" and "driftlens explain" in summary.left[0]
    again = copied(stopped, tmp_path / "again")
    same(explain(folder), at_once)
    same(calibrate(again, request(resume=True)), at_once)
    assert verify(folder).ok and not verify(folder).unlisted and find_runs(folder)[0].left == ()


KILLED = """
import os, sys
from driftlens.jobs.calibrate.job import calibrate
from driftlens.spec.requests import CalibrationRequest
calibrate(sys.argv[1], CalibrationRequest(name=sys.argv[2]), on_measured=lambda run: os._exit(9))
"""


@pytest.mark.slow
def test_a_calibration_that_is_killed_behind_its_first_numbers_goes_on(
    finished: DriftRun, at_once: DriftRun, tmp_path: pathlib.Path
) -> None:
    folder = copied(finished, tmp_path / "run")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder), NAME], env=os.environ, check=False)
    assert ended.returncode == 9
    killed = open_run(folder)
    assert VARIANT in killed.variants and unexplained(killed, VARIANT)
    resumed = calibrate(folder, request(resume=True))
    same(resumed, at_once)
    assert resumed.manifest.models[VARIANT].digest == at_once.manifest.models[VARIANT].digest
    assert verify(folder).ok and not verify(folder).unlisted
    assert (folder / "calibrations" / NAME / "README.md").is_file()
    assert not any((folder / "scratch").iterdir())


def test_no_attribution_leaves_out_what_the_spec_asks_for(world: World, tmp_path: pathlib.Path) -> None:
    run = dl.analyze(
        world.one_task(metrics={"jacobian": {"samples": 2}, "adjoint": True, "groups": True}),
        out=tmp_path / "run",
        progress="none",
        attribution=False,
    )
    assert unexplained(run, "merged") and run.adjoint().empty and not run.accuracy().empty
    told = run.explain()
    assert len(told.adjoint()) > 0 and len(told.group_contributions()) > 0
