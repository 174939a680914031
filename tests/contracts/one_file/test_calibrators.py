"""One file adds a calibrator: one of each kind, written into a module of its own, is found wherever calibrators are."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.featcal import PRESETS
from driftlens.cli import build_app
from driftlens.config.requests import AnalysisRequest
from driftlens.config.spec import load_spec
from driftlens.diagnostics.attribution import BackwardSweep, JacobianSettings
from driftlens.engine.walk import decompose, walk
from driftlens.linalg.state import stack_states, state_norms, subtract_states
from driftlens.pipelines.analyze import analyze, reopen_study
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.validate import preflight
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.errors import ShapeError, SpecError
from tests.contracts.one_file.toys import CLOSED, TRAINED
from tests.pipelines.calibrating import copied, request, scored_again
from tests.pipelines.fixtures import finished, light, world
from tests.quick import temporary_entries
from tests.zoo.world import TASKS, World

__all__ = ["finished", "light", "world"]


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both toys registered, each from a module of its own."""
    (tmp_path / "toy_closed_form.py").write_text(CLOSED)
    (tmp_path / "toy_trained.py").write_text(TRAINED)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("toy_closed_form", "toy_trained")
    with temporary_entries(calibrators):
        for name in names:
            importlib.import_module(name)
        yield
    for name in names:
        del sys.modules[name]


@pytest.fixture
def folder(light: DriftRun, tmp_path: Path, toys: None) -> Path:
    return copied(light, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "setting"),
    [("toy-scale", "pull"), pytest.param("toy-map", "epochs", marks=pytest.mark.slow)],
)
def test_a_calibrator_is_found_on_the_command_line(folder: Path, method: str, setting: str) -> None:
    flags = ["--name", "toy", "--method", method, "--no-attribution", "--set", f"{setting}=3"]
    shown = CliRunner().invoke(build_app(), ["calibrate", str(folder), *flags])
    assert shown.exit_code == 0, shown.output
    assert open_run(folder).manifest.calibrations["toy"].settings == {setting: 3}
    with pytest.raises(SpecError, match=setting):
        calibrate(folder, request("other", method=method, parameters={setting: -1}))
    with pytest.raises(SpecError, match=f"Did you mean '{setting}'"):
        calibrate(folder, request("toy", method=method, parameters={f"{setting}x": 1}))


@pytest.mark.parametrize(
    ("section", "message", "hint"),
    [
        ({"pull": -1}, "toy-scale: pull is -1; expected a finite number at least 0", ""),
        ({"pul": 1}, "toy-scale has no parameter 'pul'; it takes pull", "Did you mean 'pull'?"),
        ({"preset": "mine"}, "no preset is called 'mine'; there are none", ""),
        ({"method": "toy-scales"}, "no calibrator called 'toy-scales'", "Did you mean 'toy-scale'?"),
    ],
    ids=["out of bounds", "misspelt", "preset", "method"],
)
def test_the_spec_takes_its_settings_and_refuses_others_before_anything_is_opened(
    world: World, tmp_path: Path, toys: None, section: dict[str, Any], message: str, hint: str
) -> None:
    spec = world.one_task(calibration={"method": "toy-scale", **section})
    said = next(finding for finding in preflight(load_spec(spec)).problems if finding.subject == "calibration")
    assert message in said.text and hint in said.hint
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        analyze(spec, AnalysisRequest(out=tmp_path / "run"))
    assert caught.value.hint == hint and not (tmp_path / "run").exists()


def test_a_solution_of_another_shape_is_refused(light: DriftRun, tmp_path: Path) -> None:
    with temporary_entries(calibrators):
        exec(CLOSED.replace("{name: new}", "{name: new[:1]}"), {"__name__": "broken_toy"})
        with pytest.raises(ShapeError, match=r"is \[1, \d+\], expected \[\d+, \d+\]"):
            calibrate(copied(light, tmp_path / "run"), request("toy", method="toy-scale"))


@pytest.mark.slow
def test_a_run_is_calibrated_as_its_spec_says(world: World, tmp_path: Path, toys: None) -> None:
    spec = world.one_task(calibration={"method": "toy-scale", "pull": 3}, metrics={"jacobian": False}, heads=None)
    findings = preflight(load_spec(spec)).findings
    ok = next(finding for finding in findings if finding.subject == "calibration")
    assert (ok.level, ok.text) == ("ok", "toy-scale: pull 3.0")
    analyze(spec, AnalysisRequest(out=tmp_path / "run"))
    info = calibrate(tmp_path / "run", request("toy")).manifest.calibrations["toy"]
    assert (info.method, info.settings) == ("toy-scale", {"pull": 3.0})
    other = calibrate(tmp_path / "run", request("other", method="featcal")).manifest.calibrations["other"]
    assert other.method == "featcal" and "pull" not in other.settings


def test_both_are_in_the_catalogue_with_their_settings(toys: None) -> None:
    shown = CliRunner().invoke(build_app(), ["doctor", "--methods", "--json"])
    found = json.loads(shown.output)["calibrators"]
    assert found["toy-scale"]["kind"] == "closed form" and found["toy-map"]["kind"] == "trained"
    ((name, pull),) = found["toy-scale"]["settings"].items()
    assert (name, pull["default"], pull["minimum"]) == ("pull", 0.5, 0)
    assert set(found["featcal"]["presets"]) == set(PRESETS)
    text = CliRunner().invoke(build_app(), ["doctor", "--methods"]).output
    assert "toy-map: Toy map" in text and "epochs  steps of descent (default 20)" in text


@pytest.mark.slow
def test_a_closed_form_of_ones_own_calibrates_a_run(folder: Path, light: DriftRun) -> None:
    run = calibrate(folder, request("toy", method="toy-scale", parameters={"pull": 0.01}))
    info = run.manifest.calibrations["toy"]
    assert info.method == "toy-scale" and dict(info.settings) == {"pull": 0.01} and not info.control
    assert len(run.calibration("toy")) == 3 * 6 and verify_files(folder).ok
    final = {
        variant: run.layers(variant=variant, layer="final")["drift_l2_mean"].mean()
        for variant in ("merged", "calibrated:toy")
    }
    assert final["calibrated:toy"] != final["merged"]


@pytest.mark.slow
def test_identities_hold_with_what_a_trained_calibrator_attaches(
    finished: DriftRun, tmp_path: Path, toys: None
) -> None:
    folder = copied(finished, tmp_path / "run")
    before = open_run(folder)
    run = calibrate(folder, request("toy", method="toy-map"))
    rows = run.layers(variant="calibrated:toy")
    assert set(rows["task"]) == set(TASKS)
    assert rows["closure_error"].max() < 1e-5, "the library's own forward, attachments hooked into it, says the same"
    shares = rows.groupby("task")["final_share"].sum() + rows.groupby("task")["remainder_share"].sum()
    np.testing.assert_allclose(shares, 1, atol=1e-6)
    np.testing.assert_allclose(rows.groupby("task")["prefix_share"].sum(), 1, atol=1e-5)
    assert rows["jacobian_error"].max() < 1e-2
    info = run.manifest.calibrations["toy"]
    assert info.seconds > 0 and list(info.layers) == [5]
    assert any("task of an input" in text for text in info.notices)
    assert run.manifest.models["calibrated:toy"].digest != run.manifest.models["merged"].digest
    for task in TASKS:
        final = rows[(rows["task"] == task) & (rows["role"] == "head")]["drift_l2_mean"].item()
        merged = before.layers(task=task, variant="merged", layer="final")["drift_l2_mean"].item()
        assert final != merged

    # Reopened from its files, everything is what it was: features, accuracy, identities in float64.
    accuracy = run.accuracy()
    again = scored_again(folder).accuracy()
    assert (
        accuracy.sort_values(["task", "variant"])["value"].tolist()
        == again.sort_values(["task", "variant"])["value"].tolist()
    )
    study, _ = reopen_study(folder)
    pool, task = study.pool, TASKS[0]
    assert {*pool.variant("calibrated:toy").attachments} == {*TASKS}
    pool.dtype = torch.float64
    samples = study.tasks[task].diagnosis
    settings = JacobianSettings(nodes=16, max_nodes=32, tolerance=1e-10)
    pull_back = BackwardSweep(pool, task, ["calibrated:toy"], settings)
    finals = None
    with torch.no_grad():
        for view in walk(pool, task, ["calibrated:toy"], samples.batches(0, 3)):
            split = decompose(view)
            rest = subtract_states(subtract_states(split.drift, split.local_mismatch), split.propagation)
            assert float(state_norms(rest).max()) <= 1e-12 * float(state_norms(split.drift).max())
            pull_back.add(view)
            finals = view.merged_out
        ((start, batch),) = pull_back.batches.items()
        drift = pull_back.final_drift(batch, "calibrated:toy")
        for _ in pull_back.steps({(start, "calibrated:toy"): stack_states([drift])}):
            pass
    for found in pull_back.sensitivities.values():
        assert float(found.error.sum() / found.size.sum()) < 1e-6, "p = A e with the attachment inside A"
    stored = np.asarray(run.features(task, "calibrated:toy", layer="final")[:3], dtype=np.float64)
    assert finals is not None
    np.testing.assert_allclose(finals["hidden"].numpy(), stored, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_what_is_attached_brings_features_nearer_to_the_experts(folder: Path) -> None:
    """TrainedCalibrator on the samples that the run diagnoses its drift on, long enough, it must."""
    run = calibrate(folder, request("toy", method="toy-map", parameters={"epochs": 300}))
    final = run.layers(layer="final").groupby("variant")["drift_l2_mean"].mean()
    assert final["calibrated:toy"] < final["merged"]
