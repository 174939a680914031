"""Files are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from driftlens.utils.errors import RunError
from driftlens.utils.files import (
    atomic_folder,
    atomic_path,
    free_bytes,
    write_json_atomic,
    write_text_atomic,
)


def contents(folder: Path) -> dict[str, str]:
    """Every file under a folder, hidden ones too."""
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_nothing_is_seen_until_the_file_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.npy"
    with atomic_path(target) as written:
        assert written.name == "a.npy" and not written.exists()
        written.write_text("half")
        assert not target.exists()
        written.write_text("whole")
    assert contents(tmp_path) == {"new/a.npy": "whole"}


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), OSError(errno.EACCES, "no")])
def test_a_failed_write_leaves_the_old_file_alone(error: BaseException, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(type(error)), atomic_path(tmp_path / "a") as written:
        written.write_text("half")
        raise error
    assert contents(tmp_path) == {"a": "old"}


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    """Temporary files are private to their owner; what comes of them must not be."""
    (tmp_path / "plain").write_text("")
    write_text_atomic(tmp_path / "atomic", "")
    (tmp_path / "folder").mkdir()
    with atomic_folder(tmp_path / "atomic_folder"):
        pass
    for atomic, plain in (("atomic", "plain"), ("atomic_folder", "folder")):
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in (atomic, plain)]
        assert modes[0] == modes[1]


def test_a_folder_appears_at_once(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "run") as folder:
        (folder / "tables").mkdir()
        (folder / "tables" / "a").write_text("1")
        assert not (tmp_path / "run").exists()
    assert contents(tmp_path) == {"run/tables/a": "1"}


def test_an_empty_folder_may_be_filled_and_a_full_one_only_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with atomic_folder(tmp_path / "run") as folder:
        (folder / "a").write_text("1")
    with pytest.raises(RunError, match="exists already"), atomic_folder(tmp_path / "run"):
        pass
    with atomic_folder(tmp_path / "run", replace=True) as folder:
        (folder / "b").write_text("2")
    assert contents(tmp_path) == {"run/b": "2"}


def test_a_failed_replacement_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "run", replace=True) as folder:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"run/a": "old"}

    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if path.name == "run" and target == tmp_path / "run" and path != target:
            monkeypatch.setattr(Path, "rename", rename)
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with (
        pytest.raises(OSError, match="input/output"),
        atomic_folder(tmp_path / "run", replace=True) as folder,
    ):
        (folder / "a").write_text("new")
    assert contents(tmp_path) == {"run/a": "old"}


def test_a_file_is_never_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match="exists already"), atomic_folder(tmp_path / "run", replace=True):
        pass
    assert contents(tmp_path) == {"run": "a file"}


def test_a_full_disk_says_what_is_free_and_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device") as refusal:
        write_text_atomic(tmp_path / "a", "x" * 2_000_000)
    assert "2.0 MB needed" in refusal.value.hint
    assert refusal.value.context["need"] == 2_000_000
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("driftlens.utils.files.free_bytes", lambda _path: 0)
    with pytest.raises(RunError) as refusal:
        write_text_atomic(tmp_path / "a", "x" * 1234)
    assert refusal.value.hint.startswith("0 bytes of the 1,234 bytes needed are free there.")


def test_json_is_readable_and_knows_no_nan(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a.json", {"b": [1, None], "a": "é"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, None], "a": "é"}
    assert (tmp_path / "a.json").read_text().splitlines()[1].strip().startswith('"b"')
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text())["a"] == "é"


def test_free_space_is_known_before_the_folder_is_made(tmp_path: Path) -> None:
    import shutil

    free = free_bytes(tmp_path / "not" / "yet" / "made")
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30
