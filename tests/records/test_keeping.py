"""Runs get other names and other places, and nothing of them is lost."""

from __future__ import annotations

import pathlib

import pytest

from driftlens.base.errors import RunError, RunLockedError
from driftlens.runs.keeping import LONGEST_NAME, rename, set_aside
from driftlens.runs.run import open_run
from driftlens.runs.status import RunLock
from driftlens.runs.verify import verify
from tests.records.full_run import write_run


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


def test_a_renamed_run_keeps_its_id_and_its_files(folder: pathlib.Path) -> None:
    before = open_run(folder)
    rename(folder, "  another\tname ")
    after = open_run(folder)
    assert (after.name, after.id) == ("another name", before.id) != (before.name, before.id)
    assert after.manifest.files == before.manifest.files and verify(folder).ok


@pytest.mark.parametrize("name", ["", " \n", "a" * (LONGEST_NAME + 1), "red\x1b[31m"])
def test_a_name_that_is_none_is_refused(folder: pathlib.Path, name: str) -> None:
    before = open_run(folder).name
    with pytest.raises(RunError, match="can't be called"):
        rename(folder, name)
    assert open_run(folder).name == before


def test_a_run_put_away_keeps_all_of_itself_beside_one_of_its_name(folder: pathlib.Path) -> None:
    aside, run = folder.parent / "archived", open_run(folder)
    assert set_aside(folder, aside) == aside / "run"
    write_run(folder)
    assert set_aside(folder, aside) == aside / "run-1"
    assert not folder.exists() and open_run(aside / "run").id == run.id
    assert verify(aside / "run").ok and verify(aside / "run-1").ok


def test_a_run_that_somebody_works_on_stays_as_it_is(folder: pathlib.Path) -> None:
    lock = RunLock(folder)
    lock.acquire()
    try:
        for change in (lambda: rename(folder, "other"), lambda: set_aside(folder, folder.parent / "deleted")):
            with pytest.raises(RunLockedError):
                change()
    finally:
        lock.release()
    assert open_run(folder).name != "other" and not (folder.parent / "deleted").exists()


def test_a_place_that_is_no_folder_leaves_the_run_where_it_is(folder: pathlib.Path) -> None:
    (folder.parent / "deleted").write_text("")
    with pytest.raises(RunError, match="can't be moved") as refused:
        set_aside(folder, folder.parent / "deleted")
    assert "still where it was" in refused.value.hint and verify(folder).ok
