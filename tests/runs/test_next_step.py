"""The next step: another merge where a comparison says that it is nearer, and no claim beyond its interval."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driftlens.merging.method import merge_methods
from driftlens.results.verdict import _CONTENDERS, verdict
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.runs.writer import RunWriter
from tests.quick import few
from tests.runs.full_run import Size, write_full_run

TASKS = ("cars", "dtd")
OWN = {"method": "task_arithmetic", "parameters": {"scaling": 0.3}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_full_run(tmp_path / "run", tasks=TASKS, size=Size(blocks=1, samples=8))
    with RunWriter.resume(folder) as writer:
        writer.update_manifest(merge=OWN)
    return folder


def row(merge: str, place: int, low: float | None = None, **settings: Any) -> dict[str, Any]:
    name = " ".join([merge, *(f"{key}={value}" for key, value in settings.items())])
    ends = {} if low is None else {"nearer": low + 0.1, "nearer_low": low, "nearer_high": low + 0.2}
    return {
        "merge": name,
        "method": "" if merge == "base" else merge,
        "settings": settings,
        "place": place,
    } | ends


def compared(place: Path, *rows: dict[str, Any], **other: Any) -> None:
    present = row("task_arithmetic", len(rows) + 1, scaling=0.3)
    run = place.parent if place.name == "merges" else place.parent / "run"
    found = {"name": read_manifest(run).name, "score": "hellinger", "present": present["merge"]}
    found |= {"samples": dict.fromkeys(TASKS, 8), "merges": [*rows, present]} | other
    place.mkdir()
    (place / "merges.json").write_text(json.dumps(found))


def of_merges(run: DriftRun) -> list[str]:
    return [text for text in verdict(run).sentences if "nearer" in text]


def test_where_nothing_was_compared_a_comparison_is_next(folder: Path) -> None:
    command = shlex.split(verdict(open_run(folder)).command)
    assert command[:3] == ["driftlens", "merge", f"{folder}/spec.yaml"] and not of_merges(open_run(folder))
    assert command[command.index("--out") + 1] == f"{folder}/merges"
    assert all(not merge_methods[name].needs_samples for name in _CONTENDERS[True])
    assert not any(merge_methods[name].needs_base for name in _CONTENDERS[False])


@pytest.mark.parametrize("own", ["tsv_m", "average", "task_arithmetic"])
def test_the_runs_own_merge_is_not_suggested_once_more(folder: Path, own: str) -> None:
    with RunWriter.resume(folder) as writer:
        writer.update_manifest(merge=OWN | {"method": own})
    command = shlex.split(verdict(open_run(folder)).command)
    suggested = command[command.index("--compare") + 1].split(",")
    assert suggested == [method for method in ("average", "ties", "iso_c", "tsv_m") if method != own]


def test_the_best_of_the_merges_that_are_clearly_nearer_is_named(folder: Path) -> None:
    rows = row("base", 1, 0.4), row("ties", 2, 0.25, scaling=0.4), row("average", 3, 0.2)
    compared(folder / "merges", *rows)
    run = open_run(folder)
    assert of_merges(run) == [
        "ties scaling=0.4 is nearer to the experts than this merge: Hellinger distance 0.35 lower (0.25 to 0.45)."
    ]
    command = shlex.split(verdict(run).command)
    assert command[:3] == ["driftlens", "analyze", f"{folder}/spec.yaml"]
    sets = dict(text.split("=", 1) for flag, text in itertools.pairwise(command) if flag == "--set")
    assert json.loads(sets["merge"]) == {"method": "ties", "scaling": 0.4} and sets["merged"] == "null"
    assert command[-2:] == ["--out", f"{folder}-ties"]
    assert verify_files(folder).ok


def test_ties_are_named_and_a_ranking_on_training_samples_is_not_followed(folder: Path) -> None:
    ties = (row(method, place, 0.3) | {"is_tied": True} for place, method in ((2, "ties"), (3, "tsv_m"), (4, "base")))
    rows = row("average", 1, 0.4), *ties, row("iso_c", 5, 0.2)
    compared(folder / "merges", *rows)
    run = open_run(folder)
    assert "Not clearly farther: ties, tsv_m, base." in verdict(run).sentences
    assert verdict(run).command.endswith("-average")
    shutil.rmtree(folder / "merges")
    overlap = "experts were probably trained on the calibration samples: mean confidence 99.0 %, 90.0 %"
    compared(folder / "merges", *rows, trained_on=overlap)
    run = open_run(folder)
    assert of_merges(run) == [] and f"The ranking of merges is unreliable: {overlap}." in verdict(run).sentences
    assert verdict(run).command == f"driftlens calibrate {folder} --auto"


@pytest.mark.parametrize(("distance", "is_advised"), [(0.3, False), (0.5, True)])
def test_no_merge_is_advised_that_is_farther_than_the_repaired_model(
    folder: Path, distance: float, is_advised: bool
) -> None:
    """Both held-out distances: 0.4 of the merge."""
    compared(folder / "merges", row("average", 1, 0.4) | {"hellinger": 0.4})
    choice = {"choice": "residual", "judged_by": "hellinger", "compared": [{"name": "residual", "score": distance}]}
    with RunWriter.resume(folder) as writer:
        (info,) = writer.manifest.calibrations.values()
        writer.update_manifest(calibrations={"featcal": replace(info, automatic=True, selection=choice)})
    assert ("-average" in verdict(open_run(folder)).command) == is_advised


@pytest.mark.parametrize("low", few([-0.01, 0.0, None], [0.0]))
def test_what_an_interval_does_not_say_is_not_claimed_and_repairs_are_next(folder: Path, low: float | None) -> None:
    compared(folder / "merges", row("average", 1, low), row("base", 2, 0.3))
    run = open_run(folder)
    assert not of_merges(run) and verdict(run).command == f"driftlens calibrate {folder} --auto"


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"score": "hellinger", "merges": [{"method": "a", "merge": "a", "settings": {}, "place": 1, '
        '"nearer_low": 1}]}',
        '{"merges": [{"method": "a", "nearer_low": "x"}]}',
    ],
)
def test_a_file_that_is_no_comparison_is_none(folder: Path, content: str) -> None:
    (folder / "merges").mkdir()
    (folder / "merges" / "merges.json").write_text(content)
    assert verdict(open_run(folder)).command.startswith("driftlens merge")
