"""`driftlens calibrate --auto`."""

from __future__ import annotations

import json
import pathlib

import pytest

from driftlens.findings.before_after import selection_sentences
from driftlens.jobs.study.card import escaped
from driftlens.runs.run import open_run
from driftlens_reports.build import Report
from driftlens_reports.terminal import before_after_text
from tests.cli.conftest import Cli
from tests.pipeline.calibrating import NAME
from tests.pipeline.roomy import roomy_run, spoil_merged
from tests.zoo.world import World

QUIET = ("--progress", "none")


@pytest.mark.slow
def test_the_settings_chosen_are_those_calibrated_with(
    world: World, tmp_path: pathlib.Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_merged(monkeypatch)
    folder = roomy_run(world, tmp_path).path
    flags = ("--name", NAME, "--method", "featcal", "--auto", "--lam", 50, "--rho", 4, "--layers", "2")
    rehearsed = run_cli("calibrate", folder, *flags, "--dry-run")
    assert rehearsed.code == 0 and "candidates" in rehearsed.out and "estimate: about" in rehearsed.out
    found = json.loads(run_cli("calibrate", folder, *flags, "--json", *QUIET).out)
    assert found["automatic"]
    assert set(open_run(folder).calibration(NAME)["lam"]) == {found["settings"]["lam"]}
    assert found["selection"]["chosen"] == found["settings"] and found["selection"]["candidates"]
    assert {"lam": 50.0, "rho": 4.0, "alpha": 0.3}.items() <= found["selection"]["start"].items()
    sentence, numbers = selection_sentences(open_run(folder), NAME)
    assert "featcal with lam 50.0, rho 4.0 " in numbers and "the base 1000 (" in numbers
    shown = before_after_text(open_run(folder), NAME)
    assert sentence in shown and numbers in shown
    card = (folder / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")
    assert escaped(sentence) in card
    sections = Report(open_run(folder), "calibration").content.sections
    assert f"{NAME}: {sentence}" in [text for section in sections for text in section.sentences]


@pytest.mark.slow
def test_a_merged_model_that_nothing_is_clearly_better_than_is_kept_and_said(
    world: World, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    folder = roomy_run(world, tmp_path).path
    result = run_cli("calibrate", folder, "--name", NAME, "--auto", "--layers", "2", *QUIET)
    assert result.code == 0 and "this is the merged model as it is" in result.out
    sentence, *_ = selection_sentences(open_run(folder), NAME)
    assert "the merged model was kept as it is" in sentence and sentence in result.out
    compared = open_run(folder).manifest.calibrations[NAME].selection["compared"]
    assert [entry["name"] for entry in compared if entry.get("method") == "residual"] == [
        "residual",
        "residual mu=0.9",
    ]
    assert Report(open_run(folder), "calibration").content.sections
    again = json.loads(run_cli("show", folder, "--json").out)
    assert again["variants"][-1] == f"calibrated:{NAME}"


@pytest.mark.slow
def test_the_terminal_names_the_preset_that_the_search_began_with(
    world: World, tmp_path: pathlib.Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_merged(monkeypatch)
    folder = roomy_run(world, tmp_path).path
    flags = ("--name", NAME, "--method", "featcal", "--auto", "--layers", "2")
    result = run_cli("calibrate", folder, *flags, *QUIET)
    sentence, _ = selection_sentences(open_run(folder), NAME)
    assert "paper-clip" in sentence and sentence in result.out
    assert open_run(folder).manifest.calibrations[NAME].selection["preset"] == "paper-clip"
