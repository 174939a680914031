from __future__ import annotations

import pathlib
import re
import urllib.parse

import pytest
from hypothesis import example, given, strategies as st

from driftlens.runs.manifest import feature_file, read_manifest
from driftlens.runs.verify import verify_files
from driftlens.runs.writer import RunWriter, attach_file
from driftlens.utils.errors import RunError, RunLockedError
from driftlens.utils.variants import safe_file_name


def flip_a_bit(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_any_listed_file_is_found(own: pathlib.Path) -> None:
    names = sorted(read_manifest(own).files)
    for name in names:
        before = (own / name).read_bytes()
        flip_a_bit(own / name)
        result = verify_files(own)
        assert (result.changed, result.missing, result.ok) == ((name,), (), False)
        (own / name).write_bytes(before)
    assert verify_files(own).checked == len(names) + 1


def test_a_number_changed_in_the_manifest_is_found(own: pathlib.Path) -> None:
    text = (own / "manifest.json").read_text(encoding="utf-8")
    (own / "manifest.json").write_text(text.replace('"data": 0', '"data": 1'), encoding="utf-8")
    assert verify_files(own).changed == ("manifest.json",)


def test_missing_and_unlisted_files_are_told_apart(own: pathlib.Path) -> None:
    (own / "features/cars/merged/001.npy").unlink()
    (own / "tables/extra.csv").write_text("1")
    result = verify_files(own)
    assert (result.missing, result.unlisted) == (("features/cars/merged/001.npy",), ("tables/extra.csv",))
    assert not result.ok


def test_status_events_lock_and_logs_may_change(own: pathlib.Path) -> None:
    (own / "logs").mkdir()
    for name in ("status.json", "events.jsonl", "run.lock", "logs/worker.log"):
        (own / name).write_text("anything")
    result = verify_files(own)
    assert result.ok and result.unlisted == ()


def test_a_folder_without_a_manifest_can_not_be_verified(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        verify_files(tmp_path)


def test_attaching_that_fails_leaves_the_old_file_and_no_lock(own: pathlib.Path) -> None:
    with attach_file(own, "reports/report.html") as path:
        path.write_text("whole")
    with pytest.raises(ZeroDivisionError), attach_file(own, "reports/report.html") as path:
        path.write_text("ha")
        raise ZeroDivisionError
    assert (own / "reports/report.html").read_text() == "whole"
    assert verify_files(own).ok
    with RunWriter.resume(own), pytest.raises(RunLockedError), attach_file(own, "reports/report.html"):
        pass


# Names in which escapes, colons and underscores meet, besides any unicode.
NAMES = st.text(min_size=1) | st.text(alphabet="ab:_%.-/3AF", min_size=1, max_size=8)


@given(NAMES)
@example("a__b")
@example("_:_")
@example("%3A")
@example("..")
def test_a_name_survives_being_a_file_name(name: str) -> None:
    assert urllib.parse.unquote(safe_file_name(name).replace("__", ":")) == name


@given(NAMES)
def test_a_file_name_is_safe_everywhere(name: str) -> None:
    file_name = safe_file_name(name)
    assert re.fullmatch(r"[A-Za-z0-9._%-]+", file_name)
    assert not file_name.startswith(".")


@pytest.mark.parametrize(
    ("name", "file_name"),
    [("calibrated:featcal", "calibrated__featcal"), ("sun397", "sun397"), ("a/b", "a%2Fb"), ("é", "%C3%A9")],
    ids=["colon", "plain", "slash", "accent"],
)
def test_the_escape_is_the_documented_one(name: str, file_name: str) -> None:
    assert safe_file_name(name) == file_name


def test_no_task_name_leaves_the_run() -> None:
    path = pathlib.PurePosixPath(feature_file("../..", "..", 3))
    assert ".." not in path.parts
    assert path.parts[0] == "features" and path.name == "003.npy"


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        safe_file_name("")
