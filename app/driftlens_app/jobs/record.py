"""What is written down about a job: enough to find its process again, and to fill in its form again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter

from driftlens.base.errors import RunError
from driftlens.base.files import from_json, write_json_atomic
from driftlens.runs.status import Owner, utc_now
from driftlens_app.settings import is_file_inside, is_inside

Kind = Literal["demo", "analyze", "calibrate", "sweep", "explain"]
MAKING: tuple[Kind, ...] = ("demo", "analyze")
"""Kinds of jobs that make the folder that they write to."""

_SIDE = ".driftlens"
"""Folder beside the runs for jobs that make one: a folder that is to become a run must be empty before."""

_LOG = re.compile(r"[a-z]+-[0-9]+\.log")


@dataclass(frozen=True)
class Request:
    """A job to start, which writes to `run`; `name`: what it makes, in words; `settings`: its form's values."""

    kind: Kind
    name: str
    run: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its record and log go."""
        return _beside(self.run) if self.kind in MAKING else self.run / "logs"


@dataclass(frozen=True)
class Job:
    """A job that was started, and what became of it: when it was `cancelled`, its exit `code` (negative: a signal)."""

    kind: Kind
    name: str
    run: Path
    log: Path
    pid: Annotated[int, Field(gt=1, lt=2**31)]
    process_started: float | None
    host: str
    started: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cancelled: str = ""
    code: int | None = None
    dismissed: bool = False

    @property
    def owner(self) -> Owner:
        """Its process, as locks know processes."""
        return Owner(self.pid, self.process_started, self.host, self.started)


_RECORDS = TypeAdapter(Job)


def write_job(job: Job) -> None:
    """Replace the record of the run's newest job of this kind, whole or not at all."""
    record = dataclasses.asdict(job)
    # Relative, so that a folder of runs may be moved.
    record |= {"run": job.run.name, "log": job.log.name, "settings": dict(job.settings)}
    write_json_atomic(job.log.parent / f"{job.kind}-job.json", record)


def note_cancelled(job: Job) -> None:
    """Write down that the user asked the job to stop: on a full disk as an empty file, which needs no room."""
    try:
        write_job(dataclasses.replace(job, cancelled=utc_now()))
    except RunError as full:
        try:
            # Never through a link that somebody has laid there.
            with _mark(job.log).open("xb"):
                pass
        except FileExistsError:
            pass
        except OSError as error:
            raise full from error


def dismiss(job: Job) -> None:
    """Note that the job's end has been read; a newer job of its run keeps its own record."""
    newest = job_of(job.run, job.kind)
    if newest is not None and newest.log == job.log:
        write_job(dataclasses.replace(newest, dismissed=True))


def job_of(run: Path, kind: Kind | None = None) -> Job | None:
    """The newest job, of this kind if one is given, that wrote to the run directory `run`, which need not exist yet."""
    jobs = [*_jobs(run / "logs", run), *_jobs(_beside(run), run)]
    wanted = [job for job in jobs if kind in (None, job.kind)]
    return max(wanted, key=lambda job: job.started, default=None)


def jobs_beside(root: Path) -> list[Job]:
    """The jobs that make runs inside `root`, the newest first."""
    side = root / _SIDE
    folders = sorted(side.iterdir()) if side.is_dir() and is_inside(side) else []
    jobs = [job for folder in folders for job in _jobs(folder, root / folder.name)]
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def _beside(run: Path) -> Path:
    return run.parent / _SIDE / run.name


def _jobs(folder: Path, run: Path) -> list[Job]:
    """The newest job of each kind in `folder`."""
    return [job for kind in get_args(Kind) if (job := _read(folder, kind, run)) is not None]


def _read(folder: Path, kind: Kind, run: Path) -> Job | None:
    """The newest job of that kind on record in `folder`; one whose record makes no sense counts as none."""
    file = folder / f"{kind}-job.json"
    if not is_file_inside(file):
        return None
    try:
        record = from_json(file.read_text(encoding="utf-8"))
        # As JSON, which pydantic takes an object from however strict it is about types: True is no process id.
        job = _RECORDS.validate_json(json.dumps({**record, "run": ""}), strict=True)
        times = [job.started, *([job.cancelled] if job.cancelled else [])]
        is_sane = job.kind == kind and _LOG.fullmatch(str(job.log)) is not None
        if not is_sane or any(datetime.fromisoformat(moment).tzinfo is None for moment in times):
            return None
        # The run is where the record was found, whatever that says.
        log = folder / job.log
        return dataclasses.replace(job, run=run, log=log, cancelled=job.cancelled or _marked(log))
    except (OSError, ValueError, TypeError):
        return None


def _mark(log: Path) -> Path:
    """The empty file that says that the job with this log was asked to stop."""
    return log.with_suffix(".cancelled")


def _marked(log: Path) -> str:
    """When that file was made, UTC; empty without it."""
    mark = _mark(log)
    return datetime.fromtimestamp(mark.stat().st_mtime, UTC).isoformat() if is_file_inside(mark) else ""
