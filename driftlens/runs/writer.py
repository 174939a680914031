"""Writing a run: one process at a time, from the first file to the list of all of them."""

from __future__ import annotations

import dataclasses
import pathlib
import platform
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from driftlens.runs import layout
from driftlens.runs.manifest import (
    FileInfo,
    Manifest,
    PhaseInfo,
    ids_digest,
    is_phase_of,
    new_manifest,
    read_manifest,
    versions,
    write_manifest,
)
from driftlens.runs.schema import SCHEMA_VERSION, TABLES, refuse_newer
from driftlens.runs.status import Failure, Owner, RunLock, StatusBoard, append_event, final_state, utc_now
from driftlens.runs.tables import appended, filled, plain, without, write_rows
from driftlens.utils.diagnostic import Column
from driftlens.utils.errors import Cancelled, RunError, SpecError
from driftlens.utils.files import (
    PathLike,
    atomic_path,
    forget_undo,
    sha256_of,
    undo_if_stopped,
    write_json_atomic,
    write_text_atomic,
)
from driftlens.utils.variants import calibrated, control_of


class RunWriter:
    """The one process that writes to a run directory; every file is whole or absent. Use it as a context manager.

    Leaving the block finishes the run: every file is listed with its digest, and the state becomes "done".
    After an exception the state is "failed" or "cancelled", and what was written stays. Either way the lock
    is released.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, lock: RunLock) -> None:
        """Use `create` or `resume`."""
        self.folder = folder
        self.manifest = manifest
        self._lock = lock
        self._board = StatusBoard(folder, lock)
        self.status, self.progress = self._board.post, self._board.progress

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
        """A writer for a new run in a folder that is new or empty; with `force` a run that is there is replaced.

        Files that are not the run's stay. `live` is the manifest's entry of that name.
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
        """A writer for a run that exists: one that was interrupted, or one that something is added to."""
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

        It yields what else was used, to be filled in: other columns of the table `resources`.
        """
        used: dict[str, Any] = {}
        started, clock, energy = utc_now(), self._board.clock(), energy_wh()
        self._set_phase(name, PhaseInfo("running", 0.0, started))
        self.status("running", phase=name)
        try:
            yield used
        except BaseException as error:
            error.add_note(f"while {name} was done for {self.folder}")
            with suppress(OSError):  # the disk may be what failed; the error at hand is the one to report
                self._set_phase(name, PhaseInfo(final_state(error), self._board.clock() - clock, started))
            raise
        seconds = self._board.clock() - clock
        row = {"phase": name, "seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), **used}
        if energy is not None and (spent := (energy_wh() or 0.0) - energy) >= 0:  # a counter may start again
            row["energy_wh"] = spent
        self.append("resources", pd.DataFrame([row]), replace=True)
        self._set_phase(name, PhaseInfo("done", seconds, started))

    def done(self, phase: str) -> bool:
        """Whether the phase was finished, now or before the run was interrupted."""
        return phase in self.manifest.phases and self.manifest.phases[phase].state == "done"

    def finish(self) -> None:
        """List every file with its digest, size and rows, and say that the run is done."""
        listed = dict(self.manifest.files)  # these keep their entries: nothing was written to them since
        new = [relative for relative in run_files(self.folder) if relative not in listed]
        listed.update({relative: _describe_file(self.folder / relative) for relative in new})
        self._save(files=dict(sorted(listed.items())), finished=utc_now())
        append_event(self.folder, "finished")
        self.status("done")

    @contextmanager
    def _beginning(self, how: str, previous: Owner | None) -> Iterator[None]:
        """A block that begins the run; what ends it ends the run."""
        undo_if_stopped(self, lambda: self._abandon(KeyboardInterrupt()))
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
        forget_undo(self)

    def _end(self, error: BaseException) -> None:
        """Record how the run ended; a disk that takes no more must not hide the error that is on its way."""
        with suppress(OSError):
            failure, at = Failure.of(error), self._board.status
            self.status(final_state(error), phase=at.phase, done=at.done, total=at.total, error=failure)
            append_event(self.folder, final_state(error), **dataclasses.asdict(failure))
            self._save()

    def _set_phase(self, name: str, phase: PhaseInfo) -> None:
        self.describe(phases={name: phase})
        self.event("phase", name=name, state=phase.state, seconds=phase.seconds)

    def describe(self, **entries: Any) -> None:
        """Add entries to the manifest, by the names of its attributes.

        Mappings are merged, sequences extended by what is new, everything else is set.
        """
        self._save(**{name: _merged(getattr(self.manifest, name), value) for name, value in entries.items()})

    def warn(self, text: str) -> None:
        """Record something that may spoil the numbers."""
        self.describe(warnings=[text])
        self.event("warning", text=text)

    def notice(self, text: str) -> None:
        """Record something a reader should know."""
        self.describe(notices=[text])
        self.event("notice", text=text)

    def append(
        self, table: str, frame: pd.DataFrame, *, replace: bool = False, columns: Sequence[Column] = ()
    ) -> None:
        """Add rows to a table; rows that are there keep their exact values, but those of the same key with `replace`.

        `columns` are such that a diagnostic adds beyond the schema; the file says what they mean from then on.
        """
        path = self.folder / layout.table_file(table)
        self._write(table, appended(path, TABLES[table].extended(columns), frame, replace=replace))

    def fill(self, table: str, frame: pd.DataFrame, columns: Sequence[Column] = ()) -> None:
        """Put values into columns of rows that are there, by key; everything else keeps its exact values.

        `columns` as for `append`.
        """
        path = self.folder / layout.table_file(table)
        self._write(table, filled(path, TABLES[table].extended(columns), frame))

    def drop(self, table: str, column: str, values: Collection[str]) -> None:
        """Take out the rows of a table whose text `column` holds one of `values`."""
        rows = without(self.folder / layout.table_file(table), TABLES[table], column, values)
        if rows is not None:
            self._write(table, rows)

    def write_features(self, task: str, variant: str, layer: int, array: NDArray[np.floating[Any]]) -> None:
        """Store features [n, d] as float16, rows in the order of the task's diagnosis samples.

        An array with values beyond float16 is stored as float32, and a notice says so.
        """
        assert array.ndim == 2, array.shape
        with np.errstate(over="ignore"):
            stored: NDArray[np.floating[Any]] = array.astype(np.float16)
        if np.isinf(stored).any() and not np.isinf(array).any():
            stored = array.astype(np.float32)
            where = f"task {task}, variant {variant}, layer {layer}"
            self.notice(f"features of {where} exceed float16 and are stored as float32")
        with self.file(layout.feature_file(task, variant, layer)) as path, path.open("wb") as file:
            np.save(file, stored, allow_pickle=False)

    def write_sample_ids(self, task: str, split: str, ids: Sequence[str], origin: str = "") -> None:
        """Record which samples a split of a task consists of, in order; "diagnosis" names the rows of the features.

        `origin` is a digest of the data that they are ids of; without it no other run is known to have the same.
        """
        entries: dict[str, Any] = {"sample_ids": list(ids), "sample_id_digests": ids_digest(ids)}
        if origin:
            entries["sample_origins"] = origin
        before = {name: getattr(self.manifest, name).get(split, {}) for name in entries}
        self.describe(**{name: {split: {**before[name], task: value}} for name, value in entries.items()})
        if split == "diagnosis":
            with self.file(layout.sample_ids_file(task)) as path:
                write_json_atomic(path, list(ids))

    @contextmanager
    def file(self, relative: str) -> Iterator[pathlib.Path]:
        """A path to write to; the file lands at `relative` inside the run, whole or not at all.

        A file that is listed stays listed whatever happens: until its successor is whole nothing is said of it, and
        then both are, because the two files can't be replaced in one step.
        """
        self._lock.require_own()  # before a folder is made that may be somebody else's
        is_listed = relative in self.manifest.files
        with atomic_path(self.folder / relative) as written:
            yield written
            if is_listed:
                new = _describe_file(written)
                self._save(rewriting={relative: new})
        if is_listed:
            # Not saved: the next entry brings it along, and until then the one above holds.
            self.manifest = dataclasses.replace(
                self.manifest, files={**self.manifest.files, relative: new}, rewriting={}
            )

    def begin_variants(self, variants: Sequence[str]) -> None:
        """Rows of these variants may be written from now on; readers see them when `finish_variants` says so."""
        self._save(
            variants=[name for name in self.manifest.variants if name not in variants],
            unfinished=_merged(self.manifest.unfinished, variants),
        )

    def finish_variants(self, variants: Sequence[str], **entries: Any) -> None:
        """These variants are whole: readers see them, and in the same moment the `entries` of the manifest."""
        self._save(
            variants=_merged(self.manifest.variants, variants),
            unfinished=[name for name in self.manifest.unfinished if name not in variants],
            **{name: _merged(getattr(self.manifest, name), value) for name, value in entries.items()},
        )

    def remove_calibration(self, name: str) -> None:
        """Take a calibration out: its entries, its control's, their rows, then their files.

        Readers stop seeing it first, and nothing is listed that is not there any more, whenever this is stopped;
        what a stopped removal leaves is removed by the next one. Other rows keep their exact values.
        """
        gone = (control_of(name), calibrated(name))
        phases = [phase for phase in self.manifest.phases if is_phase_of(name, phase)]
        self.begin_variants(gone)
        self._save(
            calibrations=_without(self.manifest.calibrations, [name]),
            models=_without(self.manifest.models, gone),
            warnings=[text for text in self.manifest.warnings if not _mentions(text, gone)],
            notices=[text for text in self.manifest.notices if not _mentions(text, gone)],
        )
        by_variant = [(name, "variant", gone) for name, table in TABLES.items() if "variant" in table.names]
        belonging = [("calibration", "name", [name]), ("resources", "phase", phases)]
        for table, column, values in (*by_variant, *belonging):
            self.drop(table, column, values)
        folders = [layout.feature_folder(task, variant) for task in self.manifest.tasks for variant in gone]
        folders.append(layout.calibration_folder(name))
        # Unlisted first: whenever this is stopped, nothing is listed that is not there any more.
        starts = tuple(f"{folder}/" for folder in folders)
        self._save(
            files={path: at for path, at in self.manifest.files.items() if not path.startswith(starts)}
        )
        for folder in folders:
            remove_tree(self.folder / folder)
        # Last, because they also say which rows of the resources are meant.
        self._save(
            unfinished=[variant for variant in self.manifest.unfinished if variant not in gone],
            phases=_without(self.manifest.phases, phases),
        )

    def event(self, event: str, **details: object) -> None:
        """Add one line to the run's events; a number that is not finite becomes null."""
        self._lock.require_own()
        append_event(self.folder, event, **{name: plain(value) for name, value in details.items()})

    def _write(self, table: str, rows: pa.Table) -> None:
        with self.file(layout.table_file(table)) as path:
            write_rows(rows, path)

    def _save(self, **changes: Any) -> None:
        self._lock.require_own()
        self.manifest = dataclasses.replace(self.manifest, **changes)
        write_manifest(self.folder, self.manifest)


def _without(entries: Mapping[str, Any], gone: Sequence[str]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name not in gone}


def _mentions(text: str, variants: Sequence[str]) -> bool:
    """Whether a notice or warning is about one of these variants: "task cars, VARIANT: ..." and the like."""
    return any(f"{variant}{end}" in text for variant in variants for end in (":", ","))


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping):
        return {**old, **new}
    if isinstance(old, Sequence) and not isinstance(old, str):
        return [*old, *(item for item in new if item not in old)]
    return new


@contextmanager
def attach(run: str | pathlib.Path, relative: str) -> Iterator[pathlib.Path]:
    """A path to write to; the file lands at `relative` ("reports/report.html") inside the run, and is listed."""
    folder = pathlib.Path(run)
    read_manifest(folder)  # before the lock, which would leave a file in a folder that is no run
    with RunLock(folder) as lock:
        writer = RunWriter(folder, settled(folder, read_manifest(folder)), lock)
        with writer.file(relative) as written:
            yield written
            lock.require_own()
            new = _describe_file(written)
        writer._save(files=dict(sorted({**writer.manifest.files, relative: new}.items())))


def remove_tree(entry: pathlib.Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there; of a link only the link."""
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"can't remove {entry}: {error.strerror}", hint="Remove it, or give another folder."
        ) from error


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
        readings = [
            int(file.read_text())
            for file in counters.glob("intel-rapl:[0-9]*/energy_uj")
            if ":" not in file.parent.name[11:]
        ]
    except (OSError, ValueError):
        return None
    return sum(readings) / 3.6e9 if readings else None


def refuse_occupied(folder: pathlib.Path, *, force: bool) -> None:
    """Raise unless a new run may begin in `folder`, which need not exist; `force` lets a run in it be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SpecError(f"{folder} is a file", hint="Give a folder that is new or empty.")
    there = {child.name for child in folder.iterdir()} - {layout.LOCK, layout.GUARD}
    if not there:
        return
    if not force:
        held, way = (
            (": it holds a run", "replace the run in it")
            if layout.MANIFEST in there
            else ("", "write the run beside what is there")
        )
        raise SpecError(f"{folder} is not empty{held}", hint=f"Give another folder, or --force to {way}.")
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


def run_files(folder: pathlib.Path) -> Iterator[str]:
    """Yield the paths, relative to the run and with forward slashes, of all files that a manifest lists."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if relative.parts[0] not in layout.VOLATILE and path.is_file():
            yield relative.as_posix()


def _describe_file(path: pathlib.Path) -> FileInfo:
    """Return digest, size and, of a table or an array, the number of rows of a file."""
    return FileInfo(sha256_of(path), path.stat().st_size, _rows(path))


def is_as_described(path: pathlib.Path, described: FileInfo) -> bool:
    """Return True if a file has the size and digest that a manifest gives it."""
    try:
        return path.stat().st_size == described.bytes and sha256_of(path) == described.sha256
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}", hint="Check its permissions.") from error


def settled(folder: pathlib.Path, manifest: Manifest) -> Manifest:
    """Return the manifest with the current entries of files that a writer was replacing when it died.

    A file that is neither the old nor the new one keeps its old entry: `verify` is to find it.
    """
    landed = {
        name: new
        for name, new in manifest.rewriting.items()
        if (folder / name).is_file() and is_as_described(folder / name, new)
    }
    return dataclasses.replace(manifest, files={**manifest.files, **landed}, rewriting={})


def _rows(path: pathlib.Path) -> int | None:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    if path.suffix == ".npy":
        shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        return shape[0] if shape else None
    return None
