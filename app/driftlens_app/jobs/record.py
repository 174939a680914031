"""What is written down about a job: enough to find its process again, and to fill in its form again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from driftlens.files import write_json_atomic
from driftlens.records.lock import Owner

Kind = Literal["demo", "analyze", "calibrate", "project"]

_SIDE = ".driftlens"
"""Folder beside the runs for jobs that make one: a folder that is to become a run must be empty before."""


@dataclass(frozen=True)
class Request:
    """A job to start.

    Attributes:
        kind: which command it is.
        name: what it makes, in the user's words.
        run: the run directory that it writes to.
        arguments: of the command line, without the program.
        settings: values of the form behind it, as JSON knows them.
    """

    kind: Kind
    name: str
    run: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its record and log go."""
        return _beside(self.run) if self.kind in ("demo", "analyze") else _within(self.run)


@dataclass(frozen=True)
class Job:
    """A job that was started.

    Attributes:
        kind: which command it is.
        name: what it makes, in the user's words.
        run: the run directory that it writes to.
        log: the file with what it printed.
        pid: its process.
        process_started: when that process began, in seconds since 1970; tells it from a later one of that id.
        host: name of the machine that it runs on.
        started: when it was started, UTC.
        settings: values of the form behind it.
        cancelled: when it was asked to stop, UTC; empty if it was not.
        code: its exit code, once a server has seen it end; negative is the signal that ended it.
    """

    kind: Kind
    name: str
    run: Path
    log: Path
    pid: int
    process_started: float | None
    host: str
    started: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cancelled: str = ""
    code: int | None = None

    @property
    def owner(self) -> Owner:
        """Its process, as locks know processes."""
        return Owner(self.pid, self.process_started, self.host, self.started)


def write_job(job: Job) -> None:
    """Replace the record of the run's newest job of this kind, whole or not at all."""
    record = dataclasses.asdict(job)
    # Relative, so that a folder of runs may be moved.
    record |= {"run": job.run.name, "log": job.log.name, "settings": dict(job.settings)}
    write_json_atomic(job.log.parent / _record(job.kind), record)


def job_of(run: Path, kind: Kind | None = None) -> Job | None:
    """The newest job that wrote to the run directory `run`, which need not exist yet; None without one.

    Args:
        run: the run directory.
        kind: only jobs of this kind; None is any.
    """
    found = [*_jobs(_within(run), run), *_jobs(_beside(run), run)]
    wanted = [job for job in found if kind in (None, job.kind)]
    return max(wanted, key=lambda job: job.started, default=None)


def jobs_beside(root: Path) -> list[Job]:
    """The jobs that make runs inside `root`, the newest first."""
    folders = sorted((root / _SIDE).iterdir()) if (root / _SIDE).is_dir() else []
    found = [job for folder in folders for job in _jobs(folder, root / folder.name)]
    return sorted(found, key=lambda job: job.started, reverse=True)


def _within(run: Path) -> Path:
    return run / "logs"


def _beside(run: Path) -> Path:
    return run.parent / _SIDE / run.name


def _record(kind: Kind) -> str:
    return f"{kind}-job.json"


def _jobs(folder: Path, run: Path) -> list[Job]:
    """The newest job of each kind in `folder`."""
    return [job for kind in get_args(Kind) if (job := _read(folder / _record(kind), run)) is not None]


def _read(file: Path, run: Path) -> Job | None:
    """The job on record in `file`; one whose record is damaged counts as none, its log stays."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        known = {entry.name: record[entry.name] for entry in dataclasses.fields(Job)}
        log = file.parent / Path(known["log"]).name
        return Job(**{**known, "run": run, "log": log, "pid": int(known["pid"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
