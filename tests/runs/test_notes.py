"""Tags and notes are kept next to the manifest, change nothing in it, and a damaged file is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlens.results.listing import find_runs
from driftlens.runs.manifest import NOTES
from driftlens.runs.notes import LONGEST_TAG, RunNotes, read_notes, write_notes
from driftlens.utils.errors import RunError
from tests.runs.full_run import write_full_run


def test_they_come_back_and_the_manifest_stays(tmp_path: Path) -> None:
    run = write_full_run(tmp_path / "run")
    manifest = (run / "manifest.json").read_bytes()
    assert read_notes(run) == RunNotes()
    write_notes(run, [" a  tag ", "", "b", "b", "x" * 99], " said \n")
    assert read_notes(run) == RunNotes(("a tag", "b", "x" * LONGEST_TAG), "said")
    assert (run / "manifest.json").read_bytes() == manifest
    (summary,) = find_runs(run)
    assert (summary.tags[:2], summary.note) == (("a tag", "b"), "said")
    with pytest.raises(RunError, match="there is no run"):
        write_notes(tmp_path / "none", [], "")


@pytest.mark.parametrize("text", ["{", "[]", '{"tags": "abc"}', '{"tags": {"a": 1}, "note": ""}', "x" * 200_000])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / NOTES).write_text(text)
    assert read_notes(tmp_path) == RunNotes()
