"""How settings were chosen: what the manifest keeps of it, and what is said where it does not tell."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from driftlens.base.errors import DataError
from driftlens.findings.before_after import selection_sentences
from driftlens.runs.manifest import CalibrationInfo, Manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from tests.records.full_run import Size, write_full_run

NAME = "featcal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    size = Size(blocks=1, samples=4, width=3, tests=8)
    return write_full_run(tmp_path_factory.mktemp("runs") / "run", tasks=("a",), size=size)


def with_info(folder: pathlib.Path, **changes: Any) -> DriftRun:
    with RunWriter.resume(folder) as writer:
        info = CalibrationInfo("featcal", {}, "", 1.0, {"a": 8}, **changes)
        writer.describe(calibrations={NAME: info})
    return open_run(folder)


@pytest.mark.parametrize("selection", [{}, {"tried": 3}], ids=["older run", "own chooser"])
def test_a_record_that_does_not_compare_is_referred_to(
    folder: pathlib.Path, selection: dict[str, Any]
) -> None:
    (sentence,) = selection_sentences(with_info(folder, automatic=True, selection=selection), NAME)
    assert "calibrations/featcal/config.yaml says how" in sentence


def test_given_settings_say_nothing_and_an_unknown_name_is_refused(folder: pathlib.Path) -> None:
    run = with_info(folder)
    assert selection_sentences(run, NAME) == []
    with pytest.raises(DataError, match="no calibration 'other'; it has featcal"):
        selection_sentences(run, "other")


def test_the_manifest_keeps_the_choice_and_older_ones_still_open(folder: pathlib.Path) -> None:
    run = with_info(
        folder, automatic=True, selection={"kept": "merged"}, preset="paper-clip", sites=("*.mlp.*",), seed=3
    )
    info = run.manifest.calibrations[NAME]
    assert info.selection == {"kept": "merged"} and (info.preset, list(info.sites), info.seed) == (
        "paper-clip",
        ["*.mlp.*"],
        3,
    )
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    for entry in ("selection", "preset", "sites", "seed"):
        del document["calibrations"][NAME][entry]
    path.write_text(json.dumps(document))
    older: Manifest = open_run(folder).manifest
    assert older.calibrations[NAME].selection == {} and older.calibrations[NAME].seed is None
