"""The manifest's file: every field in it, and as JSON what the record itself is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from driftlens.results.calibration_summary import auto_choice_sentences
from driftlens.runs.manifest import (
    CalibrationInfo,
    Manifest,
    manifest_is_intact,
    read_manifest,
    write_manifest,
)
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import RunError
from tests.reads.spoiling import spoiled_tree, tree_spoils
from tests.runs.full_run import Size, write_full_run


def filled(full: DriftRun) -> Manifest:
    """A manifest none of whose fields is empty."""
    found = dataclasses.replace(
        full.manifest,
        synthetic=True,
        live={"settings": {"n": 4}},
        drawn_by="the names of split and task",
        deterministic=True,
        environment={"OMP_NUM_THREADS": "1"},
        threads={"torch": 1},
        precision={"cars": 1e-6},
        merge={"method": "task_arithmetic", "parameters": {"scaling": 0.3}},
        changes={"expert:cars": {"dtype": "bfloat16", "entries": 4, "changed": 2, "lost": 1}},
        attached={"merged results.json": {"variant": "merged", "tasks": ["mmlu"]}},
        pinned="featcal",
        unfinished=("merged",),
        rewriting={"tables/layers.parquet": full.manifest.files["tables/layers.parquet"]},
        warnings=("cars: a warning",),
        notices=("a notice",),
    )
    assert [e.name for e in dataclasses.fields(found) if not getattr(found, e.name)] == []
    return found


def written(folder: Path, manifest: Manifest) -> dict[str, Any]:
    write_manifest(folder, manifest)
    record: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    del record["digest"]
    return record


def test_the_file_is_the_plain_copy_of_all_nested_records(full: DriftRun, tmp_path: Path) -> None:
    manifest = filled(full)
    assert written(tmp_path, manifest) == json.loads(json.dumps(dataclasses.asdict(manifest)))


def test_writing_what_was_read_gives_the_same_bytes(full: DriftRun, tmp_path: Path) -> None:
    write_manifest(tmp_path, filled(full))
    first = (tmp_path / "manifest.json").read_bytes()
    write_manifest(tmp_path, read_manifest(tmp_path))
    assert (tmp_path / "manifest.json").read_bytes() == first
    assert manifest_is_intact(tmp_path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(spoils=tree_spoils)
@example([("value", [0.0], 0.0)])
@example([("value", [0.84375, 0.0, 0.5], 0.3125)])  # not a number, where anything may stand
def test_what_is_of_another_kind_is_refused_and_all_else_can_be_written_again(
    full: DriftRun, tmp_path: Path, spoils: Any
) -> None:
    record = {**spoiled_tree(dataclasses.asdict(filled(full)), spoils), "schema_version": "1.0"}
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    try:
        manifest = read_manifest(tmp_path)
    except RunError as error:
        assert "manifest.json is damaged" in error.message
        return
    there = written(tmp_path, manifest)
    assert written(tmp_path, read_manifest(tmp_path)) == there


def test_a_number_that_is_none_is_refused_where_anything_may_stand(full: DriftRun, tmp_path: Path) -> None:
    record = {**dataclasses.asdict(filled(full)), "attached": {"results": {"value": float("nan")}}}
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"manifest\.json is damaged: .*line 1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tasks", "cars"),
        ("created", 5),
        ("synthetic", 1),
        ("seeds", {"samples": True}),
        ("phases", {"analyze": {"state": "begun", "seconds": 1.0, "started": ""}}),
        ("files", {"x": {"sha256": "", "bytes": 1.5}}),
        ("layers", [{"index": "1", "role": "stem", "path": ""}]),
        ("calibrations", {"featcal": {}}),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(full: DriftRun, tmp_path: Path, name: str, value: Any) -> None:
    record = {**dataclasses.asdict(filled(full)), name: value}
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=rf"manifest\.json is damaged: {name}.*, got "):
        read_manifest(tmp_path)


NAME = "featcal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = Size(blocks=1, samples=4, width=3, tests=8)
    return write_full_run(tmp_path_factory.mktemp("runs") / "run", tasks=("a",), size=size)


def with_info(folder: Path, **changes: Any) -> DriftRun:
    with RunWriter.resume(folder) as writer:
        info = CalibrationInfo("featcal", {}, "", 1.0, {"a": 8}, **changes)
        writer.update_manifest(calibrations={NAME: info})
    return open_run(folder)


@pytest.mark.parametrize("selection", [{}, {"tried": 3}], ids=["older run", "own chooser"])
def test_a_record_that_does_not_compare_is_referred_to(folder: Path, selection: dict[str, Any]) -> None:
    (sentence,) = auto_choice_sentences(with_info(folder, automatic=True, selection=selection), NAME)
    assert "see calibrations/featcal/config.yaml" in sentence


def test_a_gap_lies_in_the_interval_behind_it_also_where_all_are_worse(folder: Path) -> None:
    tie = {
        "name": "base",
        "title": "the base",
        "score": 0.2,
        "advantage": -0.0,
        "low": -0.0,
        "high": -0.0,
        "n": 8,
    }
    worse = {
        **tie,
        "name": "lower",
        "title": "lower",
        "score": 0.25,
        "advantage": -0.05,
        "low": -0.12,
        "high": 0.02,
    }
    merged = {"name": "merged", "title": "the merged model", "score": 0.2, "n": 8}
    selection = {
        **{"compared": [merged, tie, worse], "choice": "merged", "best": "lower", "score": "relative drift"},
        **{
            "correction": "Bonferroni",
            "num_calibrations": 1,
            "seconds": 1.0,
            "base_stands": False,
            "kept": "merged",
        },
    }
    first, numbers = auto_choice_sentences(with_info(folder, automatic=True, selection=selection), NAME)
    assert "higher than the merged model's by 0.05 (95 % interval, Bonferroni: -0.02 to 0.12)" in first
    assert "the base 0.2 (+0, +0 to +0); lower 0.25 (+0.05, -0.02 to +0.12)" in numbers


def test_the_manifest_keeps_the_choice_and_older_ones_still_open(folder: Path) -> None:
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
    document["calibrations"][NAME]["shrink"] = document["calibrations"][NAME].pop("interpolation") | {"share": 0.5}
    path.write_text(json.dumps(document))
    older: Manifest = open_run(folder).manifest
    assert older.calibrations[NAME].interpolation == {"share": 0.5}
    assert older.calibrations[NAME].selection == {} and older.calibrations[NAME].seed is None
