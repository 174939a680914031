"""Nothing outside the folder that the dashboard was opened on is read or written, whatever a run links to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from driftlens.config.requests import CalibrationRequest
from driftlens.runs.run import open_run
from driftlens.utils.errors import RunError
from driftlens_app import processes, run_cache, sample_explorer, settings
from driftlens_app.job_requests import analyze_request, calibrate_request
from driftlens_app.processes import log_tail, new_run_jobs, newest_job, poll_job, start_job
from driftlens_app.run_cache import list_runs, open_cached_run
from driftlens_app.settings import Settings, is_inside, require_links_inside
from tests.app.conftest import Open, opened_drawers
from tests.app.pages import errors, record_job, said
from tests.runs.full_run import write_full_run

SECRET = "root:x:0:0:not to be shown"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the root, with a secret in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.log").write_text(f"{SECRET}\n")
    return folder


def replaced_by_link(path: Path, outside: Path) -> None:
    """Move `path` out of the root and leave a link."""
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("read_only", [False, True], ids=["open", "read-only"])
def test_a_log_that_is_a_link_is_not_printed(
    open_app: Open, root: Path, run: Path, outside: Path, read_only: bool
) -> None:
    job = record_job(run / "logs", run)
    job.log.symlink_to(outside / "secret.log")
    app = open_app(root, "repair", read_only=read_only)
    assert SECRET not in said(app) + errors(app)
    assert not app.get("download_button")
    assert log_tail(job.log) == ""


def test_a_mark_of_cancelling_that_is_a_link_out_of_the_folder_says_nothing(run: Path, outside: Path) -> None:
    job = record_job(run / "logs", run)
    job.log.with_suffix(".cancelled").symlink_to(outside / "secret.log")
    found = newest_job(run)
    assert found is not None and found.cancelled == ""


@pytest.mark.slow
def test_a_log_that_becomes_a_link_while_the_page_is_open_is_not_printed(
    open_app: Open, root: Path, run: Path, outside: Path
) -> None:
    job = record_job(run / "logs", run)
    job.log.write_text("its own words\n")
    app = open_app(root, "repair")
    (log,) = opened_drawers(app, "Log")
    assert "its own words" in log.code[0].value
    job.log.unlink()
    job.log.symlink_to(outside / "secret.log")
    (log,) = opened_drawers(app, "Log")
    assert not log.code and "The log is empty." in log.caption[0].value


@pytest.mark.parametrize(
    "entry",
    ["manifest.json", "tables", "tables/layers.parquet", "features", "status.json", "thumbs", "calibrations"],
)
def test_a_run_with_a_link_out_of_the_folder_is_listed_with_the_reason_and_not_opened(
    open_app: Open, root: Path, run: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    if not (run / entry).exists():
        (run / entry).mkdir()
    replaced_by_link(run / entry, outside)

    def refuse(folder: object) -> None:
        raise AssertionError(f"{folder} was opened")

    monkeypatch.setattr(run_cache, "open_run", refuse)
    monkeypatch.setattr(run_cache, "find_runs", refuse)
    app = open_app(root)
    (row,) = app.dataframe[0].value.to_dict("records")
    assert (row["name"], row["state"]) == ("full", "unreadable")
    (warning,) = (element.value.replace("\\", "") for element in app.warning)
    assert f"its {entry} is a link that leaves the folder {root}" in warning and "Remove the link" in warning


@pytest.mark.slow
def test_a_link_that_appears_while_the_run_is_open_is_noticed(
    open_app: Open, root: Path, run: Path, outside: Path
) -> None:
    app = open_app(root, "overview")
    assert not app.error
    replaced_by_link(run / "tables", outside)
    app.run()
    assert "its tables is a link" in errors(app) and not app.get("plotly_chart")
    with pytest.raises(RunError, match="its tables is a link"):
        open_cached_run(run)


@pytest.mark.slow
def test_links_that_stay_inside_are_followed(open_app: Open, root: Path, run: Path) -> None:
    (root / "store").mkdir()
    for entry, name in (("tables", "tables"), ("manifest.json", "full.json")):
        shutil.move(run / entry, root / "store" / name)
        (run / entry).symlink_to(Path("..") / "store" / name)
    (root / "store" / "words.log").write_text("its own words\n")
    job = record_job(run / "logs", run)
    job.log.symlink_to(root / "store" / "words.log")
    (run / "again").symlink_to(run)  # in a circle
    assert [(listed.name, listed.problem) for listed in list_runs(Settings(root))] == [("full", "")]
    (log,) = opened_drawers(open_app(root, "repair"), "Log")
    assert log.code[0].value == "its own words"


def test_a_link_behind_a_link_that_stays_inside_is_found(root: Path, run: Path, outside: Path) -> None:
    (root / "store").mkdir()
    (root / "store" / "secret.npy").symlink_to(outside / "secret.log")
    (run / "projections").symlink_to(root / "store")
    with pytest.raises(RunError, match=r"projections/secret\.npy is a link"):
        require_links_inside(run, root.resolve())


def test_a_run_is_searched_for_links_once_until_it_changes(
    root: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Path] = []
    monkeypatch.setattr(run_cache, "require_links_inside", lambda run, root: searched.append(run))
    run_cache._cached_link_check.cache_clear()
    for _ in range(3):
        list_runs(Settings(root))
        open_cached_run(run)
    assert searched == [run]
    (run / "new").symlink_to(root)
    open_cached_run(run)
    assert searched == [run, run]


def test_a_path_that_no_file_can_have_is_not_inside(root: Path) -> None:
    assert not is_inside(root / "a\0b", root)
    (root / "circle").symlink_to(root / "circle")
    assert is_inside(root / "circle", root)  # it leads nowhere, and not out


def test_a_folder_that_cannot_be_searched_is_not_taken_for_one_without_links(
    root: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("features"):
            raise PermissionError(13, "Permission denied", path)
        return look(path)

    (run / "features").mkdir(exist_ok=True)
    monkeypatch.setattr(settings.os, "scandir", scandir)
    with pytest.raises(RunError, match="features can't be searched for links: Permission denied"):
        require_links_inside(run, root)


@pytest.mark.parametrize("entry", ["logs", "logs/calibrate-job.json"])
def test_a_job_record_behind_a_link_counts_as_none(run: Path, outside: Path, entry: str) -> None:
    record_job(run / "logs", run)
    assert newest_job(run) is not None
    replaced_by_link(run / entry, outside)
    assert newest_job(run) is None and poll_job(run) is None


def test_records_beside_the_runs_are_not_read_through_a_link(root: Path, outside: Path) -> None:
    record_job(root / ".driftlens" / "new", root / "new", "analyze")
    assert len(new_run_jobs(root)) == 1
    replaced_by_link(root / ".driftlens", outside)
    assert new_run_jobs(root) == []


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("entry", ["logs", "logs/start.lock", "calibrations", "tables"])
def test_no_job_is_started_that_would_write_through_a_link(run: Path, outside: Path, entry: str) -> None:
    request = calibrate_request(open_run(run), CalibrationRequest(name="refused"))
    target = outside / "target"
    if entry.endswith(".lock"):
        (run / "logs").mkdir(exist_ok=True)
        target.write_text("as it was")
    else:
        shutil.rmtree(run / entry, ignore_errors=True)
        target.mkdir()
    (run / entry).symlink_to(target)
    with pytest.raises(RunError, match="a link"):
        start_job(request)
    assert not processes._CHILDREN
    assert target.read_text() == "as it was" if target.is_file() else not [*target.iterdir()]


@pytest.mark.usefixtures("worker")
def test_a_new_run_is_not_written_through_a_link(root: Path, outside: Path) -> None:
    (root / "my.yaml").write_text("version: 1\n")
    (root / ".driftlens").symlink_to(outside)
    with pytest.raises(RunError, match="a link"):
        start_job(analyze_request(Settings(root), "my.yaml", "new"))
    assert [path.name for path in outside.iterdir()] == ["secret.log"] and not processes._CHILDREN


def test_pictures_are_not_read_through_a_link(root: Path, run: Path, outside: Path) -> None:
    found = open_run(run)
    (run / "thumbs").mkdir(exist_ok=True)
    replaced_by_link(run / "thumbs", outside)
    with pytest.raises(RunError, match="leads outside this folder"):
        sample_explorer.show_explorer(found)


def test_only_a_name_that_jobs_give_their_logs_is_taken_from_a_record(run: Path) -> None:
    record_job(run / "logs", run)
    (run / "logs" / "private.txt").write_text(SECRET)
    file = run / "logs" / "calibrate-job.json"
    for name in ("private.txt", "../../spec.yaml", "..", "", "a\0b.log"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "log": name}))
        assert newest_job(run) is None


def test_a_pipe_in_place_of_a_record_is_not_waited_for(run: Path) -> None:
    (run / "logs").mkdir(exist_ok=True)
    os.mkfifo(run / "logs" / "calibrate-job.json")
    assert newest_job(run) is None


def test_a_single_run_is_all_that_may_be_looked_at(open_app: Open, root: Path, run: Path) -> None:
    other = write_full_run(root / "other")
    replaced = run / "tables"
    shutil.rmtree(replaced)
    replaced.symlink_to(other / "tables")
    app = open_app(run)
    assert "its tables is a link" in said(app)
