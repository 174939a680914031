"""The arena: several repairs of one run, kept as calibrations, in one table and one picture."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

import driftlens as dl
from driftlens.base.access import Context
from driftlens.base.errors import Cancelled, DataError, SpecError
from driftlens.base.progress import CancelToken, ProgressEvent
from driftlens.cli import app
from driftlens.findings.before_after import arena_rows, arena_sheet
from driftlens.jobs.calibrate.job import open_calibration
from driftlens.jobs.contest.arena import compete, entrants
from driftlens.jobs.contest.contest import Candidate
from driftlens.jobs.preflight.job import preflight
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify
from driftlens.spec import load_spec
from driftlens.spec.requests import CalibrationRequest
from driftlens_reports.charts.chart import ChartOptions, charts
from tests.pipeline.calibrating import copied
from tests.refusing import refusing
from tests.zoo.world import TASKS, World

pytestmark = pytest.mark.slow

METHODS = "prob_surgery,surgery:steps=5,norms,featcal:update=[norm]"
NAMES = ["prob_surgery", "surgery-steps-5", "norms", "featcal-update-norm"]


@pytest.fixture(scope="module")
def met(light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with four repairs, made by the command line."""
    folder = copied(light, tmp_path_factory.mktemp("arena") / "run")
    shown = CliRunner().invoke(app, ["arena", str(folder), "--methods", METHODS, "--no-attribution"])
    assert shown.exit_code == 0, shown.output
    assert all(name in shown.output for name in (*NAMES, "against merged", "needs task"))
    return folder


def test_every_repair_is_a_calibration_measured_like_any_other(met: Path) -> None:
    run = open_run(met)
    assert set(NAMES) <= set(run.manifest.calibrations) and verify(met).ok
    rows = run.layers(variant="calibrated:surgery-steps-5")
    assert rows["closure_error"].max() < 1e-5 and set(rows["task"]) == set(TASKS)
    merged = run.layers(variant="merged")
    moved = (
        run.layers(variant="calibrated:norms")["drift_l2_mean"].to_numpy()
        - merged["drift_l2_mean"].to_numpy()
    )
    assert (abs(moved) > 0).any()


def test_rows_say_what_each_gains_and_costs(met: Path) -> None:
    run = open_run(met)
    rows = {row["model"]: row for row in arena_rows(run, NAMES)}
    assert [*rows][:2] == ["base", "merged"] and [*rows][-1] == "experts" and {*NAMES} < {*rows}
    width = run.manifest.layers[-1]
    assert width.role == "head"
    added = {name: rows[name]["added"] for name in NAMES}
    assert added["norms"] == added["featcal-update-norm"] == 0
    # 2 * rank * width a task.
    assert added["surgery-steps-5"] / 16 == added["prob_surgery"] / 128 > 0
    assert [rows[name]["task_id"] for name in NAMES] == [True, True, False, False]
    scores = [row["score"] for row in list(rows.values())[2:-1]]
    assert scores == sorted(scores, reverse=True)
    for name in NAMES:
        row = rows[name]
        assert row["change"] == pytest.approx(row["score"] - rows["merged"]["score"], abs=1e-9)
        assert row["change_low"] <= row["change"] <= row["change_high"] and row["seconds"] > 0
    with pytest.raises(DataError, match="no calibration 'nobody'"):
        arena_rows(run, ["nobody"])


def test_two_repairs_are_compared_sample_by_sample(met: Path) -> None:
    """Against the stored results of the same test samples, task by task."""
    run = open_run(met)
    rows = [row for row in arena_rows(run, NAMES) if row["model"] in NAMES]
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
    chosen = {row["model"]: row for row in arena_rows(run, NAMES, against="norms")}
    assert "behind" not in chosen["norms"]
    back, there = chosen["prob_surgery"]["behind"], {row["model"]: row["score"] for row in rows}
    assert back == pytest.approx(there["prob_surgery"] - there["norms"], abs=1e-9)
    assert "against the first" in arena_sheet(run, NAMES).kinds
    with pytest.raises(DataError, match="no calibration 'nobody'"):
        arena_rows(run, NAMES, against="nobody")


@pytest.mark.slow
def test_a_second_call_changes_nothing_and_adds_what_is_missing(met: Path) -> None:
    before = dict(open_run(met).manifest.calibrations)
    shown = CliRunner().invoke(
        app, ["arena", str(met), "--methods", "prob_surgery,norms", "--no-attribution", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert {row["model"] for row in found["rows"]} >= {"prob_surgery", "norms"} and found["failed"] == {}
    assert dict(open_run(met).manifest.calibrations) == before


@pytest.mark.slow
def test_a_stopped_arena_goes_on_with_what_is_missing(light: DriftRun, tmp_path: Path) -> None:
    folder, token = copied(light, tmp_path / "run"), CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "calibrate" and "prob_surgery" in open_run(folder).manifest.calibrations:
            token.cancel()

    wanted = entrants([("prob_surgery", {}), ("norms", {})])
    with pytest.raises(Cancelled) as caught:
        compete(folder, wanted, Context(on_progress=stop, cancel=token), attribution=False)
    assert caught.value.hint == "What was finished is kept; the same command goes on where it stopped."
    before = open_run(folder).manifest.calibrations
    assert [*before] == ["prob_surgery"]
    compete(folder, wanted, attribution=False)
    after = open_run(folder).manifest.calibrations
    assert [*after] == ["prob_surgery", "norms"] and after["prob_surgery"] == before["prob_surgery"]


def test_a_repair_to_compare_with_that_will_not_be_there_is_refused_first(
    met: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("driftlens.jobs.contest.arena.contest")
    with refusing(SpecError, "no repair is called 'prob_surgeri'", hint="'prob_surgery'", code=2):
        compete(met, entrants([("prob_surgery", {})]), attribution=False, against="prob_surgeri")


def test_what_cannot_be_made_is_said_beside_the_others(met: Path) -> None:
    assert entrants([("residual", {"cv": False})])[0].name == "residual-cv-off", "as YAML reads cv=off"
    wanted = entrants([("residual", {"folds": 1000}), ("prob_surgery", {})])
    failed = compete(met, wanted, attribution=False)
    assert [*failed] == ["residual-folds-1000"] and "folds can't share" in failed["residual-folds-1000"]
    sheet = arena_sheet(open_run(met), ["prob_surgery"], failed)
    assert "residual-folds-1000: not made, as" in sheet.note
    with pytest.raises(DataError, match="folds can't share"):
        compete(met, wanted[:1], attribution=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("surgeri", {})], "Did you mean 'surgery'"),
        ([("surgery", {"rank": 0})], "rank is 0"),
        ([("norms", {"steps": 1})], "no parameter 'steps'"),
        ([("norms", {}), ("norms", {})], "norms is asked for twice"),
    ],
)
def test_bad_input_is_refused_before_anything_is_opened(
    given: list[tuple[str, dict[str, int]]], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        entrants(given)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_the_picture_has_a_point_per_repair_and_rings_where_the_task_must_be_known(met: Path) -> None:
    drawn = charts["arena"].draw(open_run(met))
    symbols = {trace.text[0]: trace.marker.symbol for trace in drawn.figure.data}
    assert symbols == {
        "prob_surgery": "circle-open",
        "surgery-steps-5": "circle-open",
        "norms": "circle",
        "featcal-update-norm": "circle",
    }
    assert set(drawn.data["model"]) == {*NAMES, "base", "merged", "experts"}
    assert all(name in drawn.alt for name in NAMES)


def test_a_map_per_task_is_refused_where_nobody_will_know_the_task(
    light: DriftRun, world: World, tmp_path: Path
) -> None:
    folder = copied(light, tmp_path / "run")
    spec = folder / "spec.yaml"
    spec.write_text(spec.read_text().replace("task_id: known", "task_id: unknown"))
    assert "task_id: unknown" in spec.read_text()
    with pytest.raises(SpecError, match="a map for every task"):
        open_calibration(folder, CalibrationRequest(name="other", method="surgery"))
    asked = load_spec(world.one_task(calibration={"method": "surgery"}, task_id="unknown"))
    assert any("task_id is unknown" in finding.text for finding in preflight(asked).problems)


def test_the_api_gives_the_same_table(met: Path) -> None:
    sheet = dl.arena(met, ["prob_surgery", "norms"], attribution=False, progress="none")
    pd.testing.assert_frame_equal(
        sheet.frame(), arena_sheet(open_run(met), ["prob_surgery", "norms"]).frame()
    )


def test_one_calibration_is_no_arena(light: DriftRun) -> None:
    assert "driftlens arena RUN" in (charts["arena"].missing(light, ChartOptions()) or "")


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
        "other": {"method": "norms", "alpha": 0.1},
    }.items():
        (folder / "spec.yaml").write_text(yaml.safe_dump({**spec, "calibration": section}))
        compete(folder, [Candidate(name, "featcal", {"lam": 0.7})], attribution=False)
        settings = open_run(folder).manifest.calibrations[name].settings
        found[name] = settings["lam"], settings["rho"], settings["alpha"]
    assert found == {"said": (0.7, 2.2, 0.1), "silent": (0.7, 2.0, 0.3), "other": (0.7, 2.0, 0.3)}
