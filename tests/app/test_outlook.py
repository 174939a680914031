"""Beside the button of Calibrate: what the last work took, and what would stop a calibration, without asking."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driftlens.base.errors import RunError
from driftlens.base.progress import ProgressEvent
from driftlens.runs.manifest import PhaseInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import ANALYZE
from driftlens.runs.standing import command_to_resume
from driftlens.runs.status import RunLock
from driftlens.runs.writer import RunWriter
from driftlens_app import calibration
from driftlens_app.jobs import processes
from driftlens_app.outlook import ahead, choosing_cost, obstacle, past_cost
from driftlens_app.show import of_folder
from tests.app.conftest import Open
from tests.app.pages import is_disabled, said

pytestmark = pytest.mark.usefixtures("worker")
BEST = "Repair with the best method"
START = "A calibration can't begin: "


@pytest.fixture
def run(root: Path) -> Path:
    """A run whose analysis has its phases on record."""
    run = root / "full"
    with RunWriter.resume(run) as writer:
        for kind, task in itertools.product(("analyze", "evaluate"), writer.manifest.tasks):
            with writer.phase(f"{kind}:{task}"):
                pass
    return run


def edit(run: Path, entry: str, **values: Any) -> DriftRun:
    """The run after values of one entry of its manifest were replaced or added."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest[entry] |= values
    (run / "manifest.json").write_text(json.dumps(manifest))
    return open_run(run)


def phases(**seconds: float | None) -> dict[str, Any]:
    """Finished phases of calibrations, `featcal_params` for "calibrate:featcal:params"."""
    return {
        f"calibrate:{name.replace('_', ':')}": {"state": "done", "seconds": value, "started": ""}
        for name, value in seconds.items()
    }


@pytest.mark.slow
def test_the_page_says_how_long_a_calibration_takes_and_asks_nobody(
    open_app: Open, root: Path, run: Path
) -> None:
    """From the analysis, as a sweep is no part of it; then from the calibration that was finished last."""
    app = open_app(root, "repair")
    assert "One calibration takes about" in said(app) and START not in said(app) and not processes._CHILDREN
    before = past_cost(open_run(run))
    swept = edit(run, "phases", **{"sweep:0": {"state": "done", "seconds": 9000, "started": ""}})
    assert past_cost(swept) == before
    own = {name: {"state": "done", "seconds": 0.0, "started": ""} for name in open_run(run).manifest.phases}
    edit(run, "phases", **own)
    known = edit(run, "phases", **phases(featcal=60, featcal_explain_cars=5, other=900))
    assert past_cost(known).startswith("One calibration takes about 1 min 05 s.")
    other = dict(known.manifest.calibrations["featcal"].__dict__)
    assert past_cost(edit(run, "calibrations", other=other)).startswith(
        "One calibration takes about 15 min 05 s"
    )


@pytest.mark.slow
def test_the_choice_of_the_best_has_an_estimate_of_its_own(open_app: Open, root: Path, run: Path) -> None:
    app = open_app(root, "repair")
    most = calibration.methods()["featcal"].choosing
    assert most > 3 and f"That is {most:.0f} calibrations by FeatCal" in said(app)
    own = {name: {"state": "done", "seconds": 1.0, "started": ""} for name in open_run(run).manifest.phases}
    opened = edit(run, "phases", **own)
    (info,) = opened.manifest.calibrations.values()
    other = replace(info, method="other", seconds=9000.0, automatic=False)
    made = DriftRun(run, replace(opened.manifest, calibrations={"other": other}))
    found = choosing_cost(made, 10, {"other": 3.0})
    assert found.startswith("Takes about 8 h 20 min. That is 10 calibrations by FeatCal")
    assert choosing_cost(made, 0, {}) == ""


def test_a_calibration_that_took_anothers_place_is_told_with_its_solving(run: Path) -> None:
    """Its phase began after that; its entry says 12.5 s."""
    own = {name: {"state": "done", "seconds": 0.0, "started": ""} for name in open_run(run).manifest.phases}
    edit(run, "phases", **own)
    opened = edit(run, "phases", **phases(featcal=0.1, featcal_explain_cars=5))
    assert "about 18 s." in past_cost(opened)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [float("nan"), float("inf")], ids=str)
def test_a_run_whose_seconds_are_no_number_is_called_damaged(
    open_app: Open, root: Path, run: Path, seconds: Any
) -> None:
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        edit(run, "phases", **phases(featcal=60, featcal_explain=seconds))
    app = open_app(root, "repair")
    assert "manifest.json is damaged" in said(app) + "".join(error.value for error in app.error)


@pytest.mark.parametrize("state", ["failed", "running", None])
def test_of_an_unfinished_run_no_time_is_told_but_what_is_still_to_be_done(
    run: Path, state: str | None
) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    if state is None:
        del manifest["phases"]["analyze:mnist"]
    else:
        manifest["phases"]["analyze:mnist"]["state"] = state
    (run / "manifest.json").write_text(json.dumps(manifest | {"finished": ""}))
    unfinished = open_run(run)
    assert past_cost(unfinished) == "Estimate, under Advanced, checks weights and data first."
    text = "the run is unfinished; still to be done: analyze:mnist. Its analysis has to go on first"
    assert obstacle(unfinished) == text


def test_what_a_chart_lacks_is_told_with_the_folder_of_its_run(run: Path) -> None:
    lacking, at = f"needs drift; `{ANALYZE}` adds it.", shlex.quote(str(run))
    assert (
        of_folder(open_run(run), lacking)
        == f"needs drift; `driftlens analyze {at}/spec.yaml --out NEW` adds it."
    )
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"finished": ""}))
    assert of_folder(open_run(run), lacking) == f"needs drift; `{command_to_resume(run)}` adds it."


@pytest.mark.slow
def test_obstacles_are_named(open_app: Open, root: Path, run: Path) -> None:
    opened = open_run(run)
    assert obstacle(opened) == ""
    lock = RunLock(run)
    lock.acquire()
    text = obstacle(opened)
    assert "is being written to by" in text and str(os.getpid()) in text
    app = open_app(root, "repair")
    assert f"{START}{run} is being written to" in said(app) and is_disabled(app, BEST)
    lock.release()
    assert not is_disabled(open_app(root, "repair"), BEST)
    live = "the run's live modules are not here; `run.calibrate(...)` in Python takes them"
    assert obstacle(edit(run, "architecture", loader="live")) == live


STAGED = {"calibrate": 4.0, "analyze": 8.0, "evaluate": 6.0, "explain": 24.0}
"""Seconds of a calibration's stages with two tasks, as the manifest below expects them."""


def staged_manifest(factor: float, until: str, *, choosing: float, is_done_before: bool) -> Any:
    """A manifest in the middle of a calibration `mine` that takes `factor` times as long as expected."""
    usual = {"": 4.0, ":analyze:a": 4.0, ":analyze:b": 4.0, ":evaluate:a": 3.0, ":evaluate:b": 3.0}
    usual |= {":explain:a": 12.0, ":explain:b": 12.0}
    phases = {
        f"analyze:{task}": PhaseInfo("done", 5.0 + 90 * (task == "c"), "2026-01-01")
        for task in ("a", "b", "c")
    }
    names = []
    if is_done_before:
        phases |= {
            f"calibrate:other{name}": PhaseInfo("done", at, "2026-01-02") for name, at in usual.items()
        }
        names = ["other"]
    own = [":choose", *usual] if choosing else [*usual]
    stages = [name.strip(":").partition(":")[0] or "calibrate" for name in own]
    for name in own[: stages.index(until)]:
        phases[f"calibrate:mine{name}"] = PhaseInfo(
            "done", factor * usual.get(name, choosing), "2026-02-01T10:00"
        )
    return SimpleNamespace(phases=phases, calibrations=dict.fromkeys(names, SimpleNamespace(seconds=0.0)))


@pytest.mark.parametrize(
    ("factor", "choosing"), [(0.4, 0.0), (1.0, 0.0), (2.5, 0.0), (0.6, 80.0), (1.0, 80.0), (1.8, 80.0)]
)
def test_the_time_left_is_right_to_a_factor_of_two_after_a_tenth_of_the_whole(
    factor: float, choosing: float
) -> None:
    """On a machine as fast as before or not, with or without a choice of 30 calibrations that walk together.

    How fast the machine is can't be told from a choice alone, which takes less time than so many calibrations.
    """
    job, before = SimpleNamespace(name="mine", started="2026-02-01"), 0.0
    stages = ({"choose": choosing} if choosing else {}) | STAGED
    whole, shares = factor * sum(stages.values()), []
    for stage, usual in stages.items():
        total = 3000 if stage == "choose" else 20
        for part in range(20):
            seconds = factor * usual * part / 20
            at = ProgressEvent(stage, total * part // 20, total, seconds=seconds)
            manifest = staged_manifest(factor, stage, choosing=choosing, is_done_before=True)
            found = ahead(manifest, job, at)  # type: ignore[arg-type]
            left = whole - before - seconds
            assert found.stage == stage and found.spent == pytest.approx(before + seconds)
            if before + seconds > 0.1 * whole:
                assert left / 2 < found.left < 2 * left, (stage, part)
                shares.append(found.spent / (found.spent + found.left))
            explaining = factor * STAGED["explain"]
            if stage != "explain" and before + seconds > 0.1 * whole:
                assert found.until_measured < 2 * (left - explaining) + 1e-9
        before += factor * usual
    assert shares[-1] > 0.9 and found.until_measured == 0


def test_without_a_calibration_before_the_analysis_says_what_to_expect(run: Path) -> None:
    """One task that hung counts no more than the others, and what the run's manifest holds is enough."""
    job = SimpleNamespace(name="mine", started="2026-02-01")
    manifest = staged_manifest(1.0, "analyze", choosing=0.0, is_done_before=False)
    found = ahead(manifest, job, ProgressEvent("look", 1, 1))  # type: ignore[arg-type]
    assert found.stage == "analyze" and 0 < found.until_measured < 30
