"""`sweep --methods`: several repairs of one run, kept as calibrations, in one table and one picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from driftlens.cli import build_app
from driftlens.config.requests import CalibrationRequest
from driftlens.config.spec import load_spec
from driftlens.pipelines.calibrate import prepare_calibration
from driftlens.pipelines.model_selection import NamedMethod
from driftlens.pipelines.sweep import compare_methods, resolve_calibrators
from driftlens.pipelines.validate import preflight
from driftlens.results.calibration_summary import leaderboard_rows, leaderboard_table
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import Cancelled, DataError, SpecError
from driftlens.utils.progress import CancelToken, ProgressEvent
from tests.pipelines.calibrating import copied
from tests.zoo.world import TASKS, World

pytestmark = pytest.mark.slow

METHODS = "prob_surgery:steps=5,surgery:steps=5,residual,featcal:update=[norm]"
NAMES = ["prob_surgery-steps-5", "surgery-steps-5", "residual", "featcal-update-norm"]


@pytest.fixture(scope="module")
def met(light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with four repairs, made by the command line."""
    folder = copied(light, tmp_path_factory.mktemp("methods") / "run")
    shown = CliRunner().invoke(build_app(), ["sweep", str(folder), "--methods", METHODS])
    assert shown.exit_code == 0, shown.output
    assert all(name in shown.output for name in (*NAMES, "against merged", "needs task"))
    return folder


def test_every_repair_is_a_calibration_measured_like_any_other(met: Path) -> None:
    run = open_run(met)
    assert set(NAMES) <= set(run.manifest.calibrations) and verify_files(met).ok
    rows = run.layers(variant="calibrated:surgery-steps-5")
    assert rows["closure_error"].max() < 1e-5 and set(rows["task"]) == set(TASKS)
    merged = run.layers(variant="merged")
    moved = run.layers(variant="calibrated:residual")["drift_l2_mean"].to_numpy() - merged["drift_l2_mean"].to_numpy()
    assert (abs(moved) > 0).any()


def test_rows_say_what_each_gains_and_costs(met: Path) -> None:
    run = open_run(met)
    rows = {row["model"]: row for row in leaderboard_rows(run, NAMES)}
    assert [*rows][:2] == ["base", "merged"] and [*rows][-1] == "experts" and {*NAMES} < {*rows}
    added = {name: rows[name]["added"] for name in NAMES}
    assert added["residual"] == added["featcal-update-norm"] == 0
    assert added["surgery-steps-5"] > 0
    assert [rows[name]["task_id"] for name in NAMES] == [True, True, False, False]
    scores = [row["score"] for row in list(rows.values())[2:-1]]
    assert scores == sorted(scores, reverse=True)
    for name in NAMES:
        row = rows[name]
        assert row["change"] == pytest.approx(row["score"] - rows["merged"]["score"], abs=1e-9)
        assert row["change_low"] <= row["change"] <= row["change_high"] and row["seconds"] > 0
    with pytest.raises(DataError, match="no calibration 'nobody'"):
        leaderboard_rows(run, ["nobody"])


def test_two_repairs_are_compared_sample_by_sample(met: Path) -> None:
    """Against the stored results of the same test samples, task by task."""
    run = open_run(met)
    rows = [row for row in leaderboard_rows(run, NAMES) if row["model"] in NAMES]
    first, others = rows[0], rows[1:]
    assert "behind" not in first
    for row in others:
        gaps = []
        for task in TASKS:
            right = {}
            for model in (first["model"], row["model"]):
                found = run.scores(task, f"calibrated:{model}").sort_values("sample_id")
                right[model] = found["value"].to_numpy()
            gaps.append((right[row["model"]] - right[first["model"]]).mean())
        assert row["behind"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-9)
        assert row["behind_low"] <= row["behind"] <= row["behind_high"] and row["behind"] <= 0
    assert "against the best" in leaderboard_table(run, NAMES).column_formats


@pytest.mark.slow
def test_a_second_call_changes_nothing_and_adds_what_is_missing(met: Path) -> None:
    before = dict(open_run(met).manifest.calibrations)
    shown = CliRunner().invoke(build_app(), ["sweep", str(met), "--methods", "surgery:steps=5,residual", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert {row["model"] for row in found["rows"]} >= {"surgery-steps-5", "residual"} and found["failed"] == {}
    assert dict(open_run(met).manifest.calibrations) == before


@pytest.mark.slow
def test_a_stopped_comparison_resumes_with_what_is_missing(light: DriftRun, tmp_path: Path) -> None:
    folder, token = copied(light, tmp_path / "run"), CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "calibrate" and "featcal" in open_run(folder).manifest.calibrations:
            token.cancel()

    wanted = resolve_calibrators([("featcal", {}), ("residual", {})])
    with pytest.raises(Cancelled) as caught:
        compare_methods(folder, wanted, JobContext(on_progress=stop, cancel=token))
    assert caught.value.hint == "Finished calibrations are kept; the same command resumes."
    before = open_run(folder).manifest.calibrations
    assert [*before] == ["featcal"]
    compare_methods(folder, wanted)
    after = open_run(folder).manifest.calibrations
    assert [*after] == ["featcal", "residual"] and after["featcal"] == before["featcal"]


def test_what_cannot_be_made_is_said_beside_the_others(met: Path) -> None:
    assert resolve_calibrators([("residual", {"cv": False})])[0].name == "residual-cv-off", "as YAML reads cv=off"
    wanted = resolve_calibrators([("residual", {"folds": 1000}), ("surgery", {"steps": 5})])
    failed = compare_methods(met, wanted)
    assert [*failed] == ["residual-folds-1000"] and "folds can't share" in failed["residual-folds-1000"]
    sheet = leaderboard_table(open_run(met), ["residual"], failed)
    assert "residual-folds-1000: not made, as" in sheet.note
    with pytest.raises(DataError, match="folds can't share"):
        compare_methods(met, wanted[:1])


def test_a_map_per_task_is_refused_where_nobody_will_know_the_task(
    light: DriftRun, world: World, tmp_path: Path
) -> None:
    folder = copied(light, tmp_path / "run")
    spec = folder / "spec.yaml"
    spec.write_text(spec.read_text().replace("task_id: known", "task_id: unknown"))
    assert "task_id: unknown" in spec.read_text()
    with pytest.raises(SpecError, match="surgery has one map per task, but task_id is unknown"):
        prepare_calibration(folder, CalibrationRequest(name="other", method="surgery"))
    asked = load_spec(world.one_task(calibration={"method": "surgery"}, task_id="unknown"))
    assert any("task_id is unknown" in finding.text for finding in preflight(asked).problems)


@pytest.mark.slow
def test_what_the_spec_says_of_a_method_takes_the_place_of_the_preset_of_its_kind(
    light: DriftRun, tmp_path: Path
) -> None:
    """As for `calibrate`, the entrant's own over it; not of another method, nor where it says nothing."""
    folder = copied(light, tmp_path / "run")
    spec = yaml.safe_load((folder / "spec.yaml").read_text())
    found = {}
    for name, section in {
        "said": {"method": "featcal", "preset": "demo-clip", "alpha": 0.1},
        "silent": {"method": "featcal"},
        "other": {"method": "residual", "folds": 2},
    }.items():
        (folder / "spec.yaml").write_text(yaml.safe_dump({**spec, "calibration": section}))
        compare_methods(folder, [NamedMethod(name, "featcal", {"lam": 0.7})])
        settings = open_run(folder).manifest.calibrations[name].settings
        found[name] = settings["lam"], settings["rho"], settings["alpha"]
    assert found == {"said": (0.7, 2.2, 0.1), "silent": (0.7, 2.0, 0.3), "other": (0.7, 2.0, 0.3)}
