"""How settings were chosen, in words: every number of the record, and which way it went."""

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
START, OTHER = {"lam": 0.05, "rho": 2.0, "alpha": 0.3}, {"lam": 0.01, "rho": 3.0, "alpha": 0.3}


def record(**changes: Any) -> dict[str, Any]:
    trials = [START | {"fold": 0}, OTHER | {"fold": 0}, START | {"fold": 1}, OTHER | {"fold": 1}]
    return {
        "score": "KL(expert || calibrated) of class probabilities, nat",
        "start": START,
        "chosen": OTHER,
        "is_start_kept": False,
        "found": OTHER,
        "advantage": 0.0612,
        "standard_error": 0.0141,
        "candidates": trials,
        "num_calibrations": len(trials),
        "seconds": 44.2,
        "preset": "paper-clip",
    } | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    size = Size(blocks=1, samples=4, width=3, tests=8)
    return write_full_run(tmp_path_factory.mktemp("runs") / "run", tasks=("a",), size=size)


def with_info(folder: pathlib.Path, **changes: Any) -> DriftRun:
    with RunWriter.resume(folder) as writer:
        info = CalibrationInfo("featcal", {}, "", 1.0, {"a": 8}, **changes)
        writer.describe(calibrations={NAME: info})
    return open_run(folder)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (
            record(),
            "Settings were chosen on held-out calibration samples: lambda 0.01, rho 3, alpha 0.3 instead of "
            "paper-clip's 0.05, 2, 0.3; held-out KL lower by 0.061 nat (standard error 0.014); 2 settings "
            "tried in 44 s.",
        ),
        (
            record(chosen=START, is_start_kept=True, advantage=0.0087, standard_error=0.0262),
            "Settings were compared on held-out calibration samples and paper-clip was kept, as the best other "
            "candidate, lambda 0.01, rho 3, alpha 0.3, was not clearly better: held-out KL lower by 0.009 nat "
            "(standard error 0.026); 2 settings tried in 44 s.",
        ),
        (
            record(
                chosen=START, is_start_kept=True, advantage=-0.2, standard_error=0.13, score="relative drift"
            ),
            "relative drift higher by 0.20 (standard error 0.13)",
        ),
        (
            record(chosen=START, found=START, is_start_kept=True, preset=""),
            "the given lambda 0.05, rho 2, alpha 0.3 were kept, as no other candidate did better; 2 settings",
        ),
        (
            record(
                chosen=None,
                is_merged_kept=True,
                over_merged={"advantage": -0.031, "standard_error": 0.02},
            ),
            "the merged model was kept as it is, as no calibration was clearly better: with lambda 0.01, rho 3, "
            "alpha 0.3, held-out KL higher by 0.031 nat (standard error 0.020); 2 settings",
        ),
        (
            record(chosen=START, is_start_kept=True, advantage=None, standard_error=None),
            "could not be solved for",
        ),
        (record(preset=""), "instead of the given 0.05, 2, 0.3;"),
        ({}, "calibrations/featcal/config.yaml says how"),
        ({"tried": 3}, "calibrations/featcal/config.yaml says how"),
    ],
    ids=[
        "chosen",
        "kept",
        "worse",
        "start is best",
        "merged is best",
        "unsolvable",
        "no preset",
        "older run",
        "own chooser",
    ],
)
def test_the_sentence_says_what_was_chosen_and_why(
    folder: pathlib.Path, selection: dict[str, Any], expected: str
) -> None:
    (sentence,) = selection_sentences(with_info(folder, automatic=True, selection=selection), NAME)
    assert expected in sentence


def test_given_settings_say_nothing_and_an_unknown_name_is_refused(folder: pathlib.Path) -> None:
    run = with_info(folder)
    assert selection_sentences(run, NAME) == []
    with pytest.raises(DataError, match="no calibration 'other'; it has featcal"):
        selection_sentences(run, "other")


def test_the_manifest_keeps_the_choice_and_older_ones_still_open(folder: pathlib.Path) -> None:
    run = with_info(
        folder, automatic=True, selection=record(), preset="paper-clip", sites=("*.mlp.*",), seed=3
    )
    info = run.manifest.calibrations[NAME]
    assert info.selection == record() and (info.preset, list(info.sites), info.seed) == (
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
