from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from driftlens.runs import tables
from driftlens.runs.manifest import read_manifest, read_status
from driftlens.runs.run import open_run
from driftlens.runs.schema import RESOURCES
from driftlens.runs.tables import read_table
from driftlens.runs.verify import verify_files
from driftlens.runs.writer import RunWriter, cpu_energy_wh
from driftlens.utils.errors import (
    Cancelled,
    DataError,
    NumericsError,
    RunError,
    SchemaTooNewError,
    SpecError,
)
from driftlens.utils.progress import ProgressEvent
from tests.runs.stopping import accuracy_of, contents


def new(path: Path, **options: Any) -> RunWriter:
    return RunWriter.create(path, spec_yaml="name: x\n", spec_digest="d", name="My run", **options)


def test_a_finished_run_lists_every_file_as_it_is(saved: Path) -> None:
    files = read_manifest(saved).files
    assert set(files) == set(contents(saved)) - {
        "manifest.json",
        "status.json",
        "events.jsonl",
        "run.lock.guard",
    }
    assert verify_files(saved).ok


def test_ids_of_two_runs_differ_and_name_them(tmp_path: Path) -> None:
    with new(tmp_path / "a") as first, new(tmp_path / "b") as second:
        assert first.manifest.id != second.manifest.id
        assert first.manifest.id.startswith("my-run-")


def test_an_exception_leaves_the_run_failed_readable_and_unlocked(tmp_path: Path) -> None:
    with pytest.raises(DataError), new(tmp_path / "r") as writer, writer.phase("load"):
        writer.append("accuracy", accuracy_of("cars", 0.5))
        raise DataError("no images in cars", hint="Check the folder.")
    status = read_status(tmp_path / "r")
    assert status is not None and status.error is not None
    assert (status.state, status.phase) == ("failed", "load")
    assert (status.error.type, status.error.message, status.error.hint) == (
        *("DataError", "no images in cars", "Check the folder."),
    )
    assert read_manifest(tmp_path / "r").phases["load"].state == "failed"
    assert open_run(tmp_path / "r").accuracy()["value"].tolist() == [0.5]
    RunWriter.resume(tmp_path / "r").__exit__(None, None, None)


@pytest.mark.parametrize("stop", [Cancelled("cancelled"), KeyboardInterrupt()], ids=["token", "ctrl-c"])
def test_a_cancelled_run_says_so(tmp_path: Path, stop: BaseException) -> None:
    with pytest.raises(type(stop)), new(tmp_path / "r") as writer, writer.phase("walk"):
        raise stop
    status = read_status(tmp_path / "r")
    assert status is not None and status.state == "cancelled"
    assert read_manifest(tmp_path / "r").phases["walk"].state == "cancelled"


def test_a_failure_while_writing_leaves_the_old_table(tmp_path: Path, monkeypatch: Any) -> None:
    def half_a_table(rows: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"PAR1 half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match="No space left") as caught, new(tmp_path / "r") as writer:
        writer.append("accuracy", accuracy_of("cars", 0.5))
        before = contents(tmp_path / "r")
        monkeypatch.setattr(tables.pq, "write_table", half_a_table)
        writer.append("accuracy", accuracy_of("mnist", 0.9))
    assert "MB" in caught.value.hint
    after = contents(tmp_path / "r")
    assert after["tables/accuracy.parquet"] == before["tables/accuracy.parquet"]
    assert set(after) - set(before) == set()


def test_a_disk_that_takes_nothing_more_does_not_hide_the_first_error(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise RunError("disk full")

    with pytest.raises(NumericsError), new(tmp_path / "r") as writer, writer.phase("walk"):
        monkeypatch.setattr("driftlens.runs.writer.write_status", full)
        monkeypatch.setattr("driftlens.runs.writer.write_manifest", full)
        raise NumericsError("NaN in layer 3")
    monkeypatch.undo()
    RunWriter.resume(tmp_path / "r").__exit__(None, None, None)


def test_energy_is_the_sum_of_the_processors_counters_where_they_may_be_read(tmp_path: Path) -> None:
    """In a folder like Linux's: a package's own parts are counted in it, and other counters are no processor's."""
    assert cpu_energy_wh(tmp_path) is None
    microjoules = {"intel-rapl:0": 3.6e9, "intel-rapl:0:1": 7e9, "intel-rapl:1": 7.2e9, "dtpm": 9e9}
    for name, value in microjoules.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value:.0f}\n")
    assert cpu_energy_wh(tmp_path) == pytest.approx(3.0)
    (tmp_path / "intel-rapl:1/energy_uj").write_text("")
    assert cpu_energy_wh(tmp_path) is None


def test_a_phase_has_the_energy_that_was_used_in_it(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing where a counter has started again in between, as less than nothing is no energy."""
    readings = iter([10.0, 10.5, 12.0, 1.0])
    monkeypatch.setattr("driftlens.runs.writer.cpu_energy_wh", lambda: next(readings))
    with new(tmp_path / "r") as writer:
        for name in ("load", "walk"):
            with writer.phase(name):
                pass
    rows = read_table(tmp_path / "r/tables/resources.parquet", RESOURCES).set_index("phase")
    assert rows.loc["load", "energy_wh"] == 0.5 and pd.isna(rows.loc["walk", "energy_wh"])


def test_a_finished_phase_is_not_done_again(tmp_path: Path) -> None:
    with pytest.raises(DataError), new(tmp_path / "r") as writer:
        with writer.phase("load") as usage:
            usage["energy_wh"] = 0.25
        with writer.phase("walk"):
            raise DataError("no images")
    with RunWriter.resume(tmp_path / "r") as writer:
        assert writer.done("load") and not writer.done("walk") and not writer.done("report")
        with writer.phase("walk"):
            pass
    rows = read_table(tmp_path / "r/tables/resources.parquet", RESOURCES).set_index("phase")
    assert list(rows.index) == ["load", "walk"]
    assert rows.loc["load", "energy_wh"] == 0.25 and pd.isna(rows.loc["walk", "energy_wh"])
    # A Python process with pandas in it holds tens of megabytes: kilobytes taken for bytes would show.
    assert (rows["peak_rss_bytes"] > 30e6).all()
    assert open_run(tmp_path / "r").status.state == "done"  # type: ignore[union-attr]


def test_adding_to_a_run_leaves_its_other_files_as_they_are(own: Path) -> None:
    before = contents(own)
    with RunWriter.resume(own) as writer:
        writer.update_manifest(variants=["calibrated:featcal"])
        writer.write_features("cars", "calibrated:featcal", 4, np.ones((6, 5)))
        writer.append("accuracy", accuracy_of("cars", 0.5).assign(variant="calibrated:featcal"))
    after = contents(own)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"manifest.json", "status.json", "events.jsonl", "tables/accuracy.parquet"}
    assert set(after) - set(before) == {"features/cars/calibrated__featcal/004.npy"}
    assert open_run(own).variants == ("base", "merged", "calibrated:featcal")
    assert verify_files(own).ok


def test_a_damaged_file_is_not_blessed_by_a_later_run_of_the_writer(own: Path) -> None:
    path = own / "features/cars/merged/001.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with RunWriter.resume(own) as writer:
        writer.append("accuracy", accuracy_of("cars", 0.5).assign(metric="top5"))
    assert verify_files(own).changed == ("features/cars/merged/001.npy",)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([65504.0, -3.25], np.float16), ([70000.0, 1.0], np.float32), ([-1e6, 1.0], np.float32)],
    ids=["largest float16", "beyond it", "far below it"],
)
def test_features_are_never_stored_as_infinity(own: Path, values: list[float], dtype: type[np.floating[Any]]) -> None:
    with RunWriter.resume(own) as writer:
        writer.write_features("cars", "merged", 4, np.array([values]))
    stored = open_run(own).features("cars", "merged", "final")
    assert stored.dtype == dtype and stored.tolist() == [values]
    notices = open_run(own).manifest.notices
    assert len(notices) == (dtype == np.float32)
    assert all("task cars, variant merged, layer 4" in notice for notice in notices)


def test_sample_ids_name_the_rows_of_the_features(saved: Path) -> None:
    manifest = read_manifest(saved)
    stored = json.loads((saved / "features/cars/sample_ids.json").read_text(encoding="utf-8"))
    assert stored == manifest.sample_ids["diagnosis"]["cars"]
    digests = manifest.sample_id_digests
    assert digests["diagnosis"]["cars"] == digests["diagnosis"]["mnist"] != digests["test"]["cars"]


def test_warnings_and_notices_are_kept_once_each(tmp_path: Path) -> None:
    with new(tmp_path / "r") as writer:
        writer.warn("calibration and diagnosis share samples")
        writer.warn("calibration and diagnosis share samples")
        writer.notice("float dtypes differ")
    manifest = read_manifest(tmp_path / "r")
    assert list(manifest.warnings) == ["calibration and diagnosis share samples"]
    assert list(manifest.notices) == ["float dtypes differ"]


def test_progress_reaches_the_status_file_without_flooding_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    with new(tmp_path / "r") as writer, monkeypatch.context() as patch:
        patch.setattr("driftlens.runs.writer.time.monotonic", lambda: now[0])
        seen = []
        for done in range(101):
            now[0] = done * 0.01
            writer.progress(ProgressEvent("walk", done, 100, f"layer {done}", now[0], {"drift": float("nan")}))
            status = read_status(tmp_path / "r")
            assert status is not None and dict(status.metrics) == {"drift": None}
            seen.append(status.done)
    assert sorted(set(seen)) == [0, 50, 100]


def test_a_line_torn_by_a_crash_spoils_no_later_event(own: Path) -> None:
    with (own / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": "2025')
    RunWriter.resume(own).__exit__(None, None, None)
    lines = (own / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[-3] == '{"time": "2025'
    assert [json.loads(line)["event"] for line in lines[-2:]] == ["resumed", "finished"]


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(SpecError, match="not empty") as caught:
        new(tmp_path)
    assert caught.value.exit_code == 2 and "replace" not in caught.value.hint
    assert contents(tmp_path) == {"thesis.tex": b"ten years of work"}


def test_force_replaces_a_run_and_nothing_else(own: Path) -> None:
    (own / "notes.txt").write_text("mine")
    new(own, force=True).__exit__(None, None, None)
    assert set(contents(own)) == {
        *("manifest.json", "spec.yaml", "status.json", "events.jsonl", "run.lock.guard", "notes.txt"),
    }


def test_force_does_not_remove_folders_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/2024.pdf").write_text("mine")
    with pytest.raises(SpecError, match="holds reports, but no run"):
        new(tmp_path, force=True)
    assert contents(tmp_path) == {"reports/2024.pdf": b"mine"}


def test_a_run_of_a_newer_minor_version_is_not_written_to(own: Path) -> None:
    record = json.loads((own / "manifest.json").read_text(encoding="utf-8"))
    (own / "manifest.json").write_text(json.dumps(record | {"schema_version": "1.10"}), encoding="utf-8")
    assert open_run(own).tasks == ("cars", "mnist")
    with pytest.raises(SchemaTooNewError):
        RunWriter.resume(own)


def test_resuming_with_other_versions_is_noticed(own: Path) -> None:
    record = json.loads((own / "manifest.json").read_text(encoding="utf-8"))
    record["versions"]["numpy"] = "1.0"
    (own / "manifest.json").write_text(json.dumps(record), encoding="utf-8")
    RunWriter.resume(own).__exit__(None, None, None)
    assert list(read_manifest(own).notices) == [f"resumed with numpy {np.__version__} (before: 1.0)"]


def test_resuming_what_is_no_run_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        RunWriter.resume(tmp_path)
    assert contents(tmp_path) == {}
