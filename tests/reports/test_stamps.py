"""What a reader must know before any number, where a run does not say what became of the last work on it."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from driftlens.base.errors import Cancelled
from driftlens.runs.manifest import read_manifest, write_manifest
from driftlens.runs.run import open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.build import Report
from driftlens_reports.facts import stamps
from tests.records.factory import write_run

DAMAGE = "status.json can't be read: expected an object, got []. Remove it; the results do not depend on it."
UNFINISHED = "This run is unfinished; what is missing may still come."


def test_of_a_finished_run_only_the_damage_is_told(tmp_path: pathlib.Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    (run.path / "status.json").write_text("[]")
    assert stamps(run) == [DAMAGE]
    (run.path / "status.json").unlink()
    assert stamps(run) == []


def test_an_unfinished_run_is_told_to_be_unfinished(tmp_path: pathlib.Path) -> None:
    with (
        pytest.raises(Cancelled),
        RunWriter.create(tmp_path / "run", spec_yaml="", spec_digest="", name="run"),
    ):
        raise Cancelled("cancelled")
    run = open_run(tmp_path / "run")
    assert stamps(run) == ["This run is cancelled; what is missing may still come."]
    (run.path / "status.json").write_text("[]")
    assert stamps(run) == [DAMAGE, UNFINISHED]
    (run.path / "status.json").unlink()
    assert stamps(run) == [UNFINISHED]


def test_a_page_folds_all_warnings_but_the_first_few(tmp_path: pathlib.Path) -> None:
    folder = write_run(tmp_path / "run")
    write_manifest(folder, replace(read_manifest(folder), warnings=[f"trouble {at}" for at in range(5)]))
    page = Report(open_run(folder), sections=["verdict"]).files(["html"])["report.html"].decode()
    shown, folded = page.split('<details class="stamp"><summary>2 more</summary>')
    assert "trouble 2" in shown and "trouble 3" not in shown and "trouble 4" in folded
