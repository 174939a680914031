"""Writing a run: one process at a time, from the first file to the list of all of them."""

from __future__ import annotations

import dataclasses
import pathlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import pandas as pd

from driftlens.base import stopping
from driftlens.base.errors import Cancelled, RunError, SpecError
from driftlens.base.files import PathLike, write_text_atomic
from driftlens.base.progress import ProgressEvent
from driftlens.runs import layout
from driftlens.runs.contents import RunContents, remove_tree
from driftlens.runs.lock import Owner, RunLock, utc_now
from driftlens.runs.manifest import Manifest, PhaseInfo, new_manifest, read_manifest, versions
from driftlens.runs.schema import SCHEMA_VERSION, refuse_newer
from driftlens.runs.status import Failure, State, Status, append_event, final_state, write_status
from driftlens.runs.verify import describe_file, run_files, settled

_STATUS_SECONDS = 0.5


class RunWriter(RunContents):
    """The one process that writes to a run directory; use it as a context manager.

    Leaving the block finishes the run: every file is listed with its digest, and the state becomes "done".
    After an exception the state is "failed" or "cancelled", and what was written stays. Either way the lock
    is released.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, lock: RunLock) -> None:
        """Use `create` or `resume`."""
        super().__init__(folder, manifest, lock)
        self._status = Status("running")
        self._clock: Callable[[], float] = time.monotonic
        self._posted = float("-inf")

    @classmethod
    def create(
        cls,
        path: PathLike,
        *,
        spec_yaml: str,
        spec_digest: str,
        name: str,
        live: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> RunWriter:
        """A writer for a new run in a folder that is new or empty.

        Args:
            path: the run directory; missing parents are made.
            spec_yaml: the resolved spec, every default spelled out.
            spec_digest: its digest.
            name: what the user calls the run.
            live: of a run of live modules, its settings and what tells its data from other data.
            force: whether a run that is there may be replaced. Files that are not the run's stay.

        Raises:
            SpecError: the folder holds something, and not just a run to be replaced with `force`.
            RunLockedError: another process is writing there.
            RunError: the folder can't be written to.
        """
        folder = pathlib.Path(path)
        if not (folder / layout.GUARD).exists():
            refuse_occupied(folder, force=force)  # before the lock, which leaves a file behind
        lock = RunLock(folder)
        previous = lock.acquire()
        try:
            refuse_occupied(folder, force=force)
            for entry in layout.ENTRIES:
                if entry not in (layout.LOCK, layout.GUARD):
                    remove_tree(folder / entry)
            writer = cls(folder, new_manifest(name, spec_digest, live), lock)
            with writer._beginning("created", previous):
                write_text_atomic(folder / layout.SPEC, spec_yaml)
        except BaseException:
            lock.release()
            raise
        return writer

    @classmethod
    def resume(cls, path: PathLike) -> RunWriter:
        """A writer for a run that exists: one that was interrupted, or one that something is added to.

        Raises:
            RunError: there is no run, or it is damaged.
            SchemaTooNewError: a newer DriftLens wrote it.
            RunLockedError: another process is writing to it.
        """
        folder = pathlib.Path(path)
        read_manifest(folder)  # before the lock, which would leave a file in a folder that is no run
        lock = RunLock(folder)
        previous = lock.acquire()
        try:
            manifest = read_manifest(folder)
            refuse_newer(manifest.schema_version, folder / layout.MANIFEST, minor=True)
            writer = cls(
                folder, dataclasses.replace(settled(folder, manifest), schema_version=SCHEMA_VERSION), lock
            )
            with writer._beginning("resumed", previous):
                now, before = versions(), manifest.versions
                changed = [name for name in before if name in now and now[name] != before[name]]
                if changed:
                    listed = ", ".join(f"{name} {now[name]} (before: {before[name]})" for name in changed)
                    writer.notice(f"resumed with {listed}")
        except BaseException:
            lock.release()
            raise
        return writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._end(error)
                if isinstance(error, Exception) and not isinstance(error, Cancelled):
                    self._lock.require_own()  # what a missing folder made fail says less than that it is missing
            else:
                self.finish()
        except BaseException as late:
            self._end(late)
            raise
        finally:
            self._release()

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """A block that does one phase; its state, time and memory are recorded. Ask `done` before.

        Yields:
            What else it used, to be filled in: other columns of the table `resources`.
        """
        used: dict[str, Any] = {}
        started, clock, energy = utc_now(), self._clock(), energy_wh()
        self._set_phase(name, PhaseInfo("running", 0.0, started))
        self.status("running", phase=name)
        try:
            yield used
        except BaseException as error:
            with suppress(OSError):  # the disk may be what failed; the error at hand is the one to report
                self._set_phase(name, PhaseInfo(final_state(error), self._clock() - clock, started))
            raise
        seconds = self._clock() - clock
        row = {"phase": name, "seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), **used}
        if energy is not None and (spent := (energy_wh() or 0.0) - energy) >= 0:  # a counter may start again
            row["energy_wh"] = spent
        self.append("resources", pd.DataFrame([row]), replace=True)
        self._set_phase(name, PhaseInfo("done", seconds, started))

    def done(self, phase: str) -> bool:
        """Whether the phase was finished, now or before the run was interrupted."""
        return phase in self.manifest.phases and self.manifest.phases[phase].state == "done"

    def status(self, state: State, **fields: Any) -> None:
        """Say where the run stands, in status.json, and renew the heartbeat; see `Status` for the other fields."""
        owner = Owner.this_process()
        about = {"heartbeat": owner.heartbeat, "pid": owner.pid, "process_started": owner.process_started}
        self._status = Status(state, **fields, **about)  # type: ignore[arg-type]
        self._lock.beat()
        write_status(self.folder, self._status)
        self._posted = self._clock()

    def progress(self, event: ProgressEvent) -> None:
        """Show an event in status.json, at most twice a second within a phase; this is a progress sink.

        Raises:
            RunError: the folder is gone, or can't be written to.
        """
        self._lock.require_own()
        is_news = event.phase != self._status.phase or event.done == event.total
        if is_news or self._clock() - self._posted >= _STATUS_SECONDS:
            self.status(self._status.state, **vars(event))

    def finish(self) -> None:
        """List every file with its digest, size and rows, and say that the run is done.

        A file that is listed already keeps its entry: nothing was written to it since.

        Raises:
            RunError: the folder can't be written to.
        """
        listed = dict(self.manifest.files)
        new = [relative for relative in run_files(self.folder) if relative not in listed]
        listed.update({relative: describe_file(self.folder / relative) for relative in new})
        self._save(files=dict(sorted(listed.items())), finished=utc_now())
        append_event(self.folder, "finished")
        self.status("done")

    @contextmanager
    def _beginning(self, how: str, previous: Owner | None) -> Iterator[None]:
        """A block that begins the run; what ends it ends the run."""
        stopping.begin(self, lambda: self._abandon(KeyboardInterrupt()))
        try:
            self._save()
            self.status("running")
            append_event(self.folder, how)
            if previous is not None:
                self.notice(f"took over from {previous}, which ended without releasing the run")
            yield
        except BaseException as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """End the run as `error` does, wherever it was."""
        self._end(error)
        self._release()

    def _release(self) -> None:
        self._lock.release()
        stopping.end(self)

    def _end(self, error: BaseException) -> None:
        """Record how the run ended; a disk that takes no more must not hide the error that is on its way."""
        with suppress(OSError):
            failure, at = Failure.of(error), self._status
            self.status(final_state(error), phase=at.phase, done=at.done, total=at.total, error=failure)
            append_event(self.folder, final_state(error), **dataclasses.asdict(failure))
            self._save()

    def _set_phase(self, name: str, phase: PhaseInfo) -> None:
        self.describe(phases={name: phase})
        append_event(self.folder, "phase", name=name, state=phase.state, seconds=phase.seconds)


def peak_rss_bytes() -> int | None:
    """Largest resident memory that this process has had; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def energy_wh(counters: pathlib.Path = pathlib.Path("/sys/class/powercap")) -> float | None:
    """What the processors' own counters say they have used, all programs together, in Wh; None where nobody may ask."""
    try:
        found = [
            int(file.read_text())
            for file in counters.glob("intel-rapl:[0-9]*/energy_uj")
            if ":" not in file.parent.name[11:]
        ]
    except (OSError, ValueError):
        return None
    return sum(found) / 3.6e9 if found else None


def refuse_occupied(folder: pathlib.Path, *, force: bool) -> None:
    """Raise unless a new run may begin in `folder`; nothing is changed.

    Args:
        folder: where the run is to go; it need not exist.
        force: whether a run that is there may be replaced, and other files may stay beside the new one.

    Raises:
        SpecError: the folder is not empty and `force` is not given, or what is in the way is not a run.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SpecError(f"{folder} is a file", hint="Give a folder that is new or empty.")
    there = {child.name for child in folder.iterdir()} - {layout.LOCK, layout.GUARD}
    if not there:
        return
    if not force:
        raise SpecError(
            f"{folder} is not empty", hint="Give another one, or --force to replace the run in it."
        )
    in_the_way = sorted(there.intersection(layout.ENTRIES))
    # Where a run was ever written, one without a manifest is one whose removal or beginning was cut short.
    if not in_the_way or ((folder / layout.GUARD).exists() and layout.MANIFEST not in there):
        return
    try:
        read_manifest(folder)
    except RunError as error:
        raise SpecError(
            f"{folder} holds {in_the_way[0]}, but no run that could be replaced",
            hint="Give another folder, or remove what is in this one yourself.",
        ) from error
