"""The runs that the dashboard may show: those under its root, by folder, each summarised once until it changes."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import streamlit as st

from driftlens.results.formatting import strip_control_chars
from driftlens.results.listing import RunSummary, find_runs
from driftlens.runs.manifest import COMPARISON, LOCK, MANIFEST, MERGES, NOTES, STATUS, live_lock_owner, table_file
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from driftlens.utils.errors import RunError
from driftlens_app.settings import Settings, is_file_inside, is_inside, require_links_inside

_ID = re.compile(r"[A-Za-z0-9._-]+")
# Default output folder of `driftlens analyze`; its runs are listed too.
_SUBFOLDER = "runs"


def list_runs(settings: Settings) -> list[RunSummary]:
    """List the runs under the root, named by their folders, with the reason for those that can't be read."""
    summaries = []
    for folder in _run_folders(settings.root):
        now = run_fingerprint(folder)
        try:
            _require_links_inside_cached(folder, settings.root, now)
        except RunError as error:
            summaries.append(RunSummary(folder, name=folder.name, problem=error.message, hint=error.hint))
            continue
        is_alive = is_file_inside(folder / LOCK) and live_lock_owner(folder) is not None
        stamp = now + "".join(_file_fingerprint(folder / name) for name in (STATUS, NOTES))
        summaries.append(_cached_run_summary(str(folder), stamp, is_alive))
    return _name_by_folder(_mark_duplicate_runs(summaries), settings.root)


def _name_by_folder(runs: Sequence[RunSummary], root: Path) -> list[RunSummary]:
    """Name each run by its folder, or by its path in the root if another run's folder has the same name."""
    names = [strip_control_chars(run.path.name) for run in runs]
    counts = Counter(names)
    return [
        replace(run, name=name if counts[name] == 1 else f"./{run.path.relative_to(root).as_posix()}")
        for name, run in zip(names, runs, strict=True)
    ]


def readable_runs(settings: Settings) -> dict[str, RunSummary]:
    """Return the readable runs by name, newest first."""
    runs = sorted(list_runs(settings), key=lambda run: run.created, reverse=True)
    return {run.name: run for run in runs if not run.problem}


def open_cached_run(folder: Path) -> DriftRun:
    """Open the run in `folder`, from the cache if it is unchanged; refuse links that leave the root."""
    now = run_fingerprint(folder)
    _require_links_inside_cached(folder, Settings.from_environment().root, now)
    return _cached_run(str(folder), now)


def run_fingerprint(folder: Path) -> str:
    """Return a text that changes whenever the run's manifest, tables or comparison of merges change.

    It is one text because Streamlit hashes the numbers of a key one by one.
    """
    files = (MANIFEST, f"{MERGES}/{COMPARISON}", *map(table_file, TABLES))
    return "".join(_file_fingerprint(folder / name) for name in files)


def run_cache_key(run: DriftRun) -> tuple[str, str]:
    """Return the Streamlit cache key of a run in its current state: `hash_funcs={DriftRun: run_cache_key}`."""
    return run.id, run_fingerprint(run.path)


def _require_links_inside_cached(folder: Path, root: Path, now: str) -> None:
    # Adding a link changes the time of its folder. Links placed deeper while the dashboard is open are noticed at the
    # next change of the run.
    folders = (folder, folder / "tables", folder / "features", folder / "calibrations", folder / "thumbs")
    _cached_link_check(str(folder), str(root), now + "".join(map(_file_fingerprint, folders)))


# Not cached by Streamlit, whose hashing and copying takes longer than all else where a folder has many runs.
@functools.lru_cache(maxsize=500)
def _cached_link_check(folder: str, root: str, stamp: str) -> None:
    require_links_inside(Path(folder), Path(root))


# A shared resource and not cached data: runs are read-only objects that return copies, and pickling their tables on
# every rerun would cost more than reading them. `max_entries` bounds the memory.
@st.cache_resource(max_entries=4, show_spinner=False)
def _cached_run(folder: str, stamp: str) -> DriftRun:
    return open_run(folder)


@functools.lru_cache(maxsize=500)
def _cached_run_summary(folder: str, stamp: str, is_alive: bool) -> RunSummary:
    (summary,) = find_runs(folder)
    if not summary.problem and not _ID.fullmatch(summary.id):
        return RunSummary(summary.path, name=summary.name, problem="its id has invalid characters")
    return summary


def _run_folders(root: Path) -> list[Path]:
    """List the folders of runs under the root, each once even if symbolic links lead to it."""
    if _is_run_folder(root):
        return [root]
    parents = [parent for parent in (root, root / _SUBFOLDER) if parent.is_dir() and is_inside(parent, root)]
    children = [child for parent in parents for child in sorted(parent.iterdir())]
    runs = [child for child in children if _is_run_folder(child) and is_inside(child, root)]
    preferred: dict[str, Path] = {}
    # Folders come before links, so that a run is listed by its own name.
    for run in sorted(runs, key=Path.is_symlink):
        preferred.setdefault(os.path.realpath(run), run)
    return [run for run in runs if preferred[os.path.realpath(run)] is run]


def _is_run_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, STATUS, LOCK))


def _file_fingerprint(file: Path) -> str:
    """Return modification time, size and inode of a file as text."""
    try:
        status = file.stat()
    except OSError:
        return "-;"
    return f"{status.st_mtime_ns} {status.st_size} {status.st_ino};"


def _mark_duplicate_runs(summaries: list[RunSummary]) -> list[RunSummary]:
    """Mark copies of a run, which have the same id, as unreadable, except for the first."""
    originals: dict[str, Path] = {}
    listed = []
    for run in summaries:
        if run.id and originals.setdefault(run.id, run.path) != run.path:
            state = {"state": f"copy of {originals[run.id].name}", "problem": f"both have the id {run.id}"}
            run = RunSummary(run.path, name=run.name, created=run.created, **state)
        listed.append(run)
    return listed
