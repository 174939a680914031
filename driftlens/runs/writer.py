"""Run directories for writing, by one process at a time. Entry points: `RunWriter.create` and `RunWriter.resume`."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from driftlens.runs.manifest import (
    ENTRIES,
    EVENTS,
    GUARD,
    LOCK,
    MANIFEST,
    SPEC,
    STATUS,
    VOLATILE,
    FileInfo,
    LockOwner,
    Manifest,
    PhaseInfo,
    RunFailure,
    RunStatus,
    State,
    calibration_folder,
    feature_file,
    feature_folder,
    new_manifest,
    package_versions,
    read_lock_owner,
    read_manifest,
    run_locked_error,
    sample_ids_digest,
    sample_ids_file,
    table_file,
    to_json_dict,
    utc_now,
    write_manifest,
)
from driftlens.runs.schema import SCHEMA_VERSION, TABLES, refuse_newer_schema
from driftlens.runs.tables import appended_table, json_value, table_without_rows, updated_table
from driftlens.utils.errors import Cancelled, DataError, RunError, SpecError
from driftlens.utils.files import (
    PARTIAL,
    LockFile,
    PathLike,
    atomic_path,
    file_sha256,
    free_bytes,
    register_undo,
    remove_stale_scratch,
    unregister_undo,
    write_json_atomic,
    write_text_atomic,
)
from driftlens.utils.progress import ProgressEvent
from driftlens.utils.registry import ColumnSchema
from driftlens.utils.variants import calibrated_variant, control_variant


class RunLock:
    """The exclusive lock on a run directory; the operating system releases it when the process dies.

    On a disk without locks the note in `run.lock` decides.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._guard = LockFile(folder / GUARD)
        self._held: os.stat_result | None = None
        self._has_note = False

    def acquire(self) -> LockOwner | None:
        """Acquire the lock; return the dead process that held it, if any, and remove its scratch folders."""
        _refuse_links_out_of_run(self._folder)
        register_undo(self, self.release)
        try:
            self._guard.acquire()
            self._held = (self._folder / GUARD).stat()
            previous = read_lock_owner(self._folder)
            # The guard is reliable except after removal by hand, on a disk without locks, or in a network folder.
            # There the note decides.
            if previous is not None and previous.pid != os.getpid() and previous.is_alive:
                raise run_locked_error(self._folder, previous)
            remove_stale_scratch(self._folder.glob(PARTIAL), others=True)
            # Files of other programs may be large; they are not searched.
            for entry in ENTRIES:
                remove_stale_scratch((self._folder / entry).rglob(PARTIAL), others=True)
            self.write_heartbeat()
        except TimeoutError:
            unregister_undo(self)
            if not (self._folder / GUARD).exists():
                self.require_own_folder()
            raise run_locked_error(self._folder, read_lock_owner(self._folder)) from None
        except BaseException as error:
            is_guarded = self._guard.is_held
            self.release()
            denied = (errno.EACCES, errno.EPERM, errno.EROFS)
            if not is_guarded and isinstance(error, OSError) and error.errno in denied:
                raise RunError(
                    f"can't write to {self._folder}: {error.strerror}",
                    hint="Choose another folder with --out, or copy the run to a writable one.",
                ) from error
            raise
        return previous

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def write_heartbeat(self) -> LockOwner:
        """Write this process and a new heartbeat to the lock file; return what was written."""
        self.require_own_folder()
        self._has_note = True
        owner = LockOwner.this_process()
        # Only the guard must survive a power cut.
        write_json_atomic(self._folder / LOCK, asdict(owner), is_lasting=False)
        return owner

    @property
    def is_own_folder(self) -> bool:
        """True if the run directory is still the one that was locked, not removed or replaced since."""
        try:
            guard = (self._folder / GUARD).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        # The guard's file is open while the lock is held, so no new file can have its identity.
        return self._held is not None and os.path.samestat(guard, self._held)

    def require_own_folder(self) -> None:
        """Raise a `RunError` if the run directory was removed, moved or replaced since it was locked."""
        if not self.is_own_folder:
            raise RunError(
                f"{self._folder} was removed, moved or replaced while it was being written to",
                hint="Writing has stopped. Restore the folder, or start again.",
            )

    def release(self) -> None:
        """Release the lock and clear the lock file; do nothing if the lock is not held."""
        if self._guard.is_held:
            with suppress(OSError):
                if self._has_note and self.is_own_folder:
                    (self._folder / LOCK).unlink()
            self._guard.release()
        unregister_undo(self)


def _refuse_links_out_of_run(folder: pathlib.Path) -> None:
    """Raise an error if a run contains symbolic links that lead out of it."""
    home = os.path.realpath(folder)
    places = [folder / EVENTS, folder / GUARD]
    for entry in filter(pathlib.Path.is_dir, (folder / name for name in ENTRIES)):
        places += [entry, *entry.rglob("*")]
    for place in places:
        if place.is_symlink() and not pathlib.Path(os.path.realpath(place)).is_relative_to(home):
            raise RunError(
                f"{place} is a link that leads out of the run",
                hint="Replace the link with its target, or remove it.",
            )


def write_status(folder: pathlib.Path, status: RunStatus) -> None:
    """Write the status.json of a run atomically."""
    metrics = {name: json_value(value) for name, value in status.metrics.items()}
    # A running job writes hundreds of them; after a power cut it doesn't run any more, so none needs a disk flush.
    is_lasting = status.state != "running"
    write_json_atomic(folder / STATUS, to_json_dict(replace(status, metrics=metrics)), is_lasting=is_lasting)


def _state_after_error(error: BaseException) -> Literal["cancelled", "failed"]:
    return "cancelled" if isinstance(error, (Cancelled, KeyboardInterrupt)) else "failed"


def append_event(folder: pathlib.Path, event: str, **details: object) -> None:
    """Append one line to the events.jsonl of a run."""
    path = folder / EVENTS
    line = json.dumps({"time": utc_now(), "event": event, **details}, ensure_ascii=False).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            # A killed writer may have left half a line.
            is_torn = size > 0 and file.read(1) != b"\n"
            file.write(b"\n" + line if is_torn else line)
    except OSError as error:
        hint = f"{free_bytes(folder) / 1e6:,.1f} MB are free there."
        raise RunError(f"can't write {path}: {error.strerror}", hint=hint) from error


_STATUS_SECONDS = 0.5


class RunWriter:
    """Context manager that writes to a run directory; one process at a time, all files atomically.

    Leaving the block lists every file with its digest, sets the state to "done" and releases the lock. After an
    exception the state is "failed" or "cancelled", and finished files stay.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, lock: RunLock) -> None:
        self.folder = folder
        self.manifest = manifest
        self._lock = lock
        self._status = RunStatus("running")
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
        """Create a run directory and return its writer.

        Args:
            path: a folder that is new or empty; files that DriftLens did not write stay.
            spec_yaml: text of the run's spec.yaml.
            spec_digest: digest of the spec.
            name: the run's name.
            live: the manifest's entry of that name.
            force: replace a run that is in the folder.
        """
        folder = pathlib.Path(path)
        if not (folder / GUARD).exists():
            # Before the lock, which leaves a file behind.
            refuse_occupied_folder(folder, force=force)

        def _clear_and_make_manifest() -> Manifest:
            # Again under the lock: another process may have started a run in the folder meanwhile.
            refuse_occupied_folder(folder, force=force)
            for entry in ENTRIES:
                if entry not in (LOCK, GUARD):
                    remove_tree(folder / entry)
            write_text_atomic(folder / SPEC, spec_yaml)
            return new_manifest(name, spec_digest, live)

        return cls._lock_and_start(folder, "created", _clear_and_make_manifest)

    @classmethod
    def resume(cls, path: PathLike) -> RunWriter:
        """Return a writer for an existing run."""
        folder = pathlib.Path(path)
        # Before the lock, which would leave a file in a folder that is no run.
        read_manifest(folder)

        def _read_manifest_to_resume() -> Manifest:
            manifest = read_manifest(folder)
            refuse_newer_schema(manifest.schema_version, folder / MANIFEST, minor=True)
            return replace(recover_manifest(folder, manifest), schema_version=SCHEMA_VERSION)

        return cls._lock_and_start(folder, "resumed", _read_manifest_to_resume)

    @classmethod
    def _lock_and_start(cls, folder: pathlib.Path, event: str, manifest: Callable[[], Manifest]) -> RunWriter:
        """Acquire the lock, read or create the manifest, and record the start of the job."""
        lock = RunLock(folder)
        previous = lock.acquire()
        try:
            writer = cls(folder, manifest(), lock)
        except BaseException:
            lock.release()
            raise
        register_undo(writer, lambda: writer._record_error_and_release(KeyboardInterrupt()))
        try:
            writer._save()
            writer.status("running")
            append_event(folder, event)
            if previous is not None:
                writer.notice(f"took over from {previous}, which ended without releasing the run")
            now, before = package_versions(), writer.manifest.versions
            changed = [name for name in before if name in now and now[name] != before[name]]
            if changed:
                listed = ", ".join(f"{name} {now[name]} (before: {before[name]})" for name in changed)
                writer.notice(f"resumed with {listed}")
        except BaseException as error:
            writer._record_error_and_release(error)
            raise
        return writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._list_files_and_finish()
            else:
                self._record_final_error(error)
                if isinstance(error, Exception) and not isinstance(error, Cancelled):
                    # A missing folder explains the error that it caused.
                    self._lock.require_own_folder()
        except BaseException as late:
            self._record_final_error(late)
            raise
        finally:
            self._release_lock()

    def status(self, state: State, **fields: Any) -> None:
        """Write the state of the run to its status.json; `fields` are those of the status."""
        owner = self._lock.write_heartbeat()
        self._status = RunStatus(state, **fields, pid=owner.pid, heartbeat=owner.heartbeat)
        # The folder may have been removed while the heartbeat was written.
        self._lock.require_own_folder()
        write_status(self.folder, self._status)
        self._posted = time.monotonic()

    def progress(self, event: ProgressEvent) -> None:
        """Write a progress event to status.json, at most twice a second within a phase."""
        self._lock.require_own_folder()
        is_news = event.phase != self._status.phase or event.done == event.total
        if is_news or time.monotonic() - self._posted >= _STATUS_SECONDS:
            self.status(self._status.state, **vars(event))

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Record state, duration and memory of the block as a phase; yield a dict for more columns of `resources`."""
        used: dict[str, Any] = {}
        started, clock, energy = utc_now(), time.monotonic(), cpu_energy_wh()
        self._record_phase(name, PhaseInfo("running", 0.0, started))
        self.status("running", phase=name)
        try:
            yield used
        except BaseException as error:
            error.add_note(f"during phase {name} of {self.folder}")
            # The disk may have failed; report the first error.
            with suppress(OSError):
                self._record_phase(name, PhaseInfo(_state_after_error(error), time.monotonic() - clock, started))
            raise
        seconds = time.monotonic() - clock
        row = {"phase": name, "seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), **used}
        # A counter may start again.
        if energy is not None and (spent := (cpu_energy_wh() or 0.0) - energy) >= 0:
            row["energy_wh"] = spent
        self.append("resources", pd.DataFrame([row]), replace=True)
        self._record_phase(name, PhaseInfo("done", seconds, started))

    def done(self, phase: str) -> bool:
        """Return True if the phase is finished, now or in the run that is resumed."""
        return phase in self.manifest.phases and self.manifest.phases[phase].state == "done"

    def _list_files_and_finish(self) -> None:
        # These keep their entries: nothing was written to them since.
        listed = dict(self.manifest.files)
        new = [relative for relative in run_files(self.folder) if relative not in listed]
        listed.update({relative: _describe_file(self.folder / relative) for relative in new})
        self._save(files=dict(sorted(listed.items())), finished=utc_now())
        append_event(self.folder, "finished")
        self.status("done")

    def _record_error_and_release(self, error: BaseException) -> None:
        self._record_final_error(error)
        self._release_lock()

    def _release_lock(self) -> None:
        self._lock.release()
        unregister_undo(self)

    def _record_final_error(self, error: BaseException) -> None:
        """Record the error that ended the run, as failed or cancelled."""
        # A full disk must not hide the error.
        with suppress(OSError):
            failure, last = RunFailure.of(error), self._status
            self.status(_state_after_error(error), phase=last.phase, done=last.done, total=last.total, error=failure)
            append_event(self.folder, _state_after_error(error), **asdict(failure))
            self._save()

    def _record_phase(self, name: str, phase: PhaseInfo) -> None:
        self.update_manifest(phases={name: phase})
        self.event("phase", name=name, state=phase.state, seconds=phase.seconds)

    def update_manifest(self, **entries: Any) -> None:
        """Update manifest fields: mappings are merged, sequences extended, other values replaced.

        Mappings are merged, sequences extended by what is new, everything else is set.
        """
        self._save(**{name: _merge_entries(getattr(self.manifest, name), value) for name, value in entries.items()})

    def pin_calibration(self, name: str) -> None:
        """Let headline, exhibits and cards show this calibration; empty lets them show the best one."""
        if name and name not in self.manifest.calibrations:
            names = ", ".join(self.manifest.calibrations) or "none"
            raise DataError(f"the run has no calibration {name!r}; it has {names}")
        self.update_manifest(pinned=name)

    def warn(self, text: str) -> None:
        """Record a warning in the manifest: something that may invalidate the numbers."""
        self.update_manifest(warnings=[text])
        self.event("warning", text=text)

    def notice(self, text: str) -> None:
        """Record a notice in the manifest: something a reader of the run should know."""
        self.update_manifest(notices=[text])
        self.event("notice", text=text)

    def append(
        self,
        table: str,
        frame: pd.DataFrame,
        *,
        replace: bool = False,
        columns: Sequence[ColumnSchema] = (),
    ) -> None:
        """Append rows to a table; existing rows keep their exact values.

        Args:
            table: the table's name.
            frame: the new rows.
            replace: replace rows that have the same key.
            columns: columns that a diagnostic adds to the schema; the file keeps their declaration.
        """
        path = self.folder / table_file(table)
        self._write_table(path, appended_table(path, TABLES[table].with_columns(columns), frame, replace=replace))

    def fill(self, table: str, frame: pd.DataFrame, columns: Sequence[ColumnSchema] = ()) -> None:
        """Set columns of existing rows of a table, matched by key; other values stay exact.

        Args:
            table: the table's name.
            frame: key columns and the columns to set.
            columns: columns that a diagnostic adds to the schema.
        """
        path = self.folder / table_file(table)
        self._write_table(path, updated_table(path, TABLES[table].with_columns(columns), frame))

    def drop(self, table: str, column: str, values: Collection[str]) -> None:
        """Delete the rows of a table whose text `column` has one of `values`."""
        path = self.folder / table_file(table)
        rows = table_without_rows(path, TABLES[table], column, values)
        if rows is not None:
            self._write_table(path, rows)

    def write_features(self, task: str, variant: str, layer: int, array: NDArray[np.floating[Any]]) -> None:
        """Save features as float16, or as float32 with a notice if they exceed the range of float16.

        Args:
            task: the samples' task.
            variant: the model that made the features.
            layer: index of the layer, 1 the stem.
            array: features `[n, d]`, rows in the order of the task's diagnosis samples.
        """
        with np.errstate(over="ignore"):
            stored: NDArray[np.floating[Any]] = array.astype(np.float16)
        # Float16 ends at 65,504, which features of large language models exceed.
        if np.isinf(stored).any() and not np.isinf(array).any():
            stored = array.astype(np.float32)
            where = f"task {task}, variant {variant}, layer {layer}"
            self.notice(f"features of {where} exceed float16 and are stored as float32")
        with self.file(feature_file(task, variant, layer)) as path, path.open("wb") as file:
            np.save(file, stored, allow_pickle=False)

    def write_sample_ids(self, task: str, split: str, ids: Sequence[str], origin: str = "") -> None:
        """Record the ids of a task's samples in a split.

        Args:
            task: the samples' task.
            split: calibration, diagnosis or test; "diagnosis" names the rows of the features.
            ids: sample ids, in order.
            origin: digest of the data; without it the samples of two runs can't be matched.
        """
        entries: dict[str, Any] = {"sample_ids": list(ids), "sample_id_digests": sample_ids_digest(ids)}
        if origin:
            entries["sample_origins"] = origin
        before = {name: getattr(self.manifest, name).get(split, {}) for name in entries}
        self.update_manifest(**{name: {split: {**before[name], task: value}} for name, value in entries.items()})
        if split == "diagnosis":
            with self.file(sample_ids_file(task)) as path:
                write_json_atomic(path, list(ids))

    @contextmanager
    def file(self, relative: str) -> Iterator[pathlib.Path]:
        """Yield a temporary path to write to; it replaces the run's file `relative` on success.

        A listed file stays listed. File and manifest can't be replaced in one step, so in between the manifest
        describes both the old and the new file.
        """
        # Before a folder is made that may belong to another run.
        self._lock.require_own_folder()
        is_listed = relative in self.manifest.files
        with atomic_path(self.folder / relative) as written:
            yield written
            if is_listed:
                new = _describe_file(written)
                self._save(rewriting={relative: new})
        if is_listed:
            # Saved with the next entry; until then `rewriting` on disk describes the file.
            files = {**self.manifest.files, relative: new}
            self.manifest = replace(self.manifest, files=files, rewriting={})

    def begin_variants(self, variants: Sequence[str]) -> None:
        """Hide variants from readers of the run until `finish_variants`, while their rows are written."""
        self._save(
            variants=[name for name in self.manifest.variants if name not in variants],
            unfinished=_merge_entries(self.manifest.unfinished, variants),
        )

    def finish_variants(self, variants: Sequence[str], **entries: Any) -> None:
        """Make variants visible to readers of the run, and update other manifest fields in the same step."""
        self._save(
            variants=_merge_entries(self.manifest.variants, variants),
            unfinished=[name for name in self.manifest.unfinished if name not in variants],
            **{name: _merge_entries(getattr(self.manifest, name), value) for name, value in entries.items()},
        )

    def remove_calibration(self, name: str) -> None:
        """Remove a calibration and its control from the run: rows, files and manifest entries."""
        gone = (control_variant(name), calibrated_variant(name))
        phases = [phase for phase in self.manifest.phases if f"{phase}:".startswith(f"calibrate:{name}:")]
        self.begin_variants(gone)
        self._save(
            calibrations=_without_names(self.manifest.calibrations, [name]),
            models=_without_names(self.manifest.models, gone),
            warnings=[text for text in self.manifest.warnings if not _is_about_variants(text, gone)],
            notices=[text for text in self.manifest.notices if not _is_about_variants(text, gone)],
        )
        by_variant = [(name, "variant", gone) for name, table in TABLES.items() if "variant" in table.names]
        belonging = [("calibration", "name", [name]), ("resources", "phase", phases)]
        for table, column, values in (*by_variant, *belonging):
            self.drop(table, column, values)
        folders = [feature_folder(task, variant) for task in self.manifest.tasks for variant in gone]
        folders.append(calibration_folder(name))
        # Before the files go, so that an interruption leaves no entry without its file.
        starts = tuple(f"{folder}/" for folder in folders)
        kept = {path: file for path, file in self.manifest.files.items() if not path.startswith(starts)}
        self._save(files=kept)
        for folder in folders:
            remove_tree(self.folder / folder)
        # Last, because the phases also name the rows of the resources to remove.
        self._save(
            unfinished=[variant for variant in self.manifest.unfinished if variant not in gone],
            phases=_without_names(self.manifest.phases, phases),
        )

    def event(self, event: str, **details: object) -> None:
        """Append one line to the run's events.jsonl; NaN and infinity become null."""
        self._lock.require_own_folder()
        append_event(self.folder, event, **{name: json_value(value) for name, value in details.items()})

    def _write_table(self, path: pathlib.Path, rows: pa.Table) -> None:
        with self.file(path.relative_to(self.folder).as_posix()) as written:
            pq.write_table(rows, written)

    def _save(self, **changes: Any) -> None:
        self._lock.require_own_folder()
        self.manifest = replace(self.manifest, **changes)
        write_manifest(self.folder, self.manifest)


def _without_names(entries: Mapping[str, Any], gone: Sequence[str]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name not in gone}


def _is_about_variants(text: str, variants: Sequence[str]) -> bool:
    """Return True if a notice or warning names one of these variants, as in "task cars, VARIANT: ..."."""
    return any(f"{variant}{end}" in text for variant in variants for end in (":", ","))


def _merge_entries(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping):
        return {**old, **new}
    if isinstance(old, Sequence) and not isinstance(old, str):
        return [*old, *(item for item in new if item not in old)]
    return new


@contextmanager
def attach_file(run: str | pathlib.Path, relative: str) -> Iterator[pathlib.Path]:
    """Yield a path to write to; on success the file is added to the run as `relative` and listed in the manifest."""
    folder = pathlib.Path(run)
    # Before the lock, which would leave a file in a folder that is no run.
    read_manifest(folder)
    with RunLock(folder) as lock:
        writer = RunWriter(folder, recover_manifest(folder, read_manifest(folder)), lock)
        with writer.file(relative) as written:
            yield written
            lock.require_own_folder()
            new = _describe_file(written)
        writer._save(files=dict(sorted({**writer.manifest.files, relative: new}.items())))


def remove_tree(entry: pathlib.Path) -> None:
    """Remove a file or folder if it exists; symbolic links are not followed."""
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        hint = "Remove it, or choose another folder."
        raise RunError(f"can't remove {entry}: {error.strerror}", hint=hint) from error


def peak_rss_bytes() -> int | None:
    """Return the peak resident memory of this process in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:
        # Windows.
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS reports bytes, Linux kilobytes.
    return peak if platform.system() == "Darwin" else peak * 1024


def cpu_energy_wh(counters: pathlib.Path = pathlib.Path("/sys/class/powercap")) -> float | None:
    """Return the energy used by the CPUs of this machine, in Wh; None without readable RAPL counters."""
    files = counters.glob("intel-rapl:[0-9]*/energy_uj")
    try:
        # `intel-rapl:0:0` is a part of `intel-rapl:0`, whose counter includes it.
        readings = [int(file.read_text()) for file in files if file.parent.name.count(":") == 1]
    except (OSError, ValueError):
        return None
    return sum(readings) / 3.6e9 if readings else None


def refuse_occupied_folder(folder: pathlib.Path, *, force: bool) -> None:
    """Raise a `SpecError` if `folder` is not empty; with `force`, unless it holds a run to replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SpecError(f"{folder} is a file", hint="Choose a new or empty folder.")
    names = {child.name for child in folder.iterdir()} - {LOCK, GUARD}
    if not names:
        return
    if not force:
        holds, action = "", "write the run next to these files"
        if MANIFEST in names:
            holds, action = ": it holds a run", "replace the run"
        raise SpecError(f"{folder} is not empty{holds}", hint=f"Choose another folder, or --force to {action}.")
    conflicts = sorted(names.intersection(ENTRIES))
    # A guard without a manifest: creating or removing a run was interrupted here.
    if not conflicts or ((folder / GUARD).exists() and MANIFEST not in names):
        return
    try:
        read_manifest(folder)
    except RunError as error:
        raise SpecError(
            f"{folder} holds {conflicts[0]}, but no run that could be replaced",
            hint="Choose another folder, or empty this one.",
        ) from error


def run_files(folder: pathlib.Path) -> Iterator[str]:
    """Yield the relative paths of all files of a run that its manifest should list."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if relative.parts[0] not in VOLATILE and path.is_file():
            yield relative.as_posix()


def _describe_file(path: pathlib.Path) -> FileInfo:
    return FileInfo(file_sha256(path), path.stat().st_size)


def is_unchanged_file(path: pathlib.Path, described: FileInfo) -> bool:
    """Return True if a file has the size and SHA-256 digest of its manifest entry."""
    try:
        return path.stat().st_size == described.bytes and file_sha256(path) == described.sha256
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}", hint="Check its permissions.") from error


def recover_manifest(folder: pathlib.Path, manifest: Manifest) -> Manifest:
    """Correct manifest entries of files that were being replaced when the writer died.

    A file that is neither the old nor the new one keeps its old entry, so that `verify` reports it.
    """
    replaced = {
        name: new
        for name, new in manifest.rewriting.items()
        if (folder / name).is_file() and is_unchanged_file(folder / name, new)
    }
    return replace(manifest, files={**manifest.files, **replaced}, rewriting={})
