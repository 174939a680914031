"""What may be put into a run directory: rows, features, sample ids, files, entries of the manifest."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from driftlens.base.diagnostic import Column
from driftlens.base.errors import RunError
from driftlens.base.files import atomic_path, write_json_atomic
from driftlens.base.variants import calibrated, control_of
from driftlens.runs import layout
from driftlens.runs.lock import RunLock
from driftlens.runs.manifest import Manifest, ids_digest, read_manifest, write_manifest
from driftlens.runs.schema import TABLES
from driftlens.runs.status import append_event
from driftlens.runs.tables import appended, filled, plain, without, write_rows
from driftlens.runs.verify import describe_file, settled

LATER = ("calibrate:", "sweep:")
"""How phases begin that are no part of a run's own analysis."""


class RunContents:
    """The files of a run and the manifest that describes them; every file is whole or absent.

    Attributes:
        folder: the run directory.
        manifest: what the run says about itself, as of now.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, lock: RunLock) -> None:
        self.folder = folder
        self.manifest = manifest
        self._lock = lock

    def describe(self, **entries: Any) -> None:
        """Add entries to the manifest, by the names of its attributes.

        Mappings are merged, sequences extended by what is new, everything else is set.
        """
        self._save(**{name: _merged(getattr(self.manifest, name), value) for name, value in entries.items()})

    def warn(self, text: str) -> None:
        """Record something that may spoil the numbers."""
        self.describe(warnings=[text])
        append_event(self.folder, "warning", text=text)

    def notice(self, text: str) -> None:
        """Record something a reader should know."""
        self.describe(notices=[text])
        append_event(self.folder, "notice", text=text)

    def append(
        self, table: str, frame: pd.DataFrame, *, replace: bool = False, columns: Sequence[Column] = ()
    ) -> None:
        """Add rows to a table; rows that are there keep their exact values.

        Args:
            table: name in `schema.TABLES`.
            frame: the rows; columns left out are null.
            replace: whether a row with a key that is there takes its place, as when a phase is done again.
            columns: that a diagnostic adds beyond the schema; the file says what they mean from then on.

        Raises:
            ValueError: a row does not fit the table, or its key is there already.
            RunError: the table can't be read or written.
        """
        path = self.folder / layout.table_file(table)
        self._write(table, appended(path, TABLES[table].extended(columns), frame, replace=replace))

    def fill(self, table: str, frame: pd.DataFrame) -> None:
        """Put values into columns of rows that are there; everything else keeps its exact values.

        Args:
            table: name in `schema.TABLES`.
            frame: the key and the columns to fill.

        Raises:
            ValueError: a row is not there, or does not fit the table.
            RunError: the table can't be read or written.
        """
        self._write(table, filled(self.folder / layout.table_file(table), TABLES[table], frame))

    def drop(self, table: str, column: str, values: Collection[str]) -> None:
        """Take out the rows of a table whose text `column` holds one of `values`; the others keep their exact values.

        Raises:
            RunError: the table can't be read or written.
        """
        kept = without(self.folder / layout.table_file(table), TABLES[table], column, values)
        if kept is not None:
            self._write(table, kept)

    def write_features(self, task: str, variant: str, layer: int, array: NDArray[np.floating[Any]]) -> None:
        """Store features [n, d] as float16, rows in the order of the task's diagnosis samples.

        An array with values beyond float16 is stored as float32, and a notice says so.

        Raises:
            RunError: the file can't be written.
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
        """Record which samples a split of a task consists of; "diagnosis" names the rows of the features.

        Args:
            task: the task.
            split: calibration, diagnosis or test.
            ids: in the order of the rows.
            origin: digest of the data that they are ids of; without it no other run is known to have the same samples.

        Raises:
            RunError: the file can't be written.
        """
        found: dict[str, Any] = {"sample_ids": list(ids), "sample_id_digests": ids_digest(ids)}
        if origin:
            found["sample_origins"] = origin
        before = {name: getattr(self.manifest, name).get(split, {}) for name in found}
        self.describe(**{name: {split: {**before[name], task: value}} for name, value in found.items()})
        if split == "diagnosis":
            with self.file(layout.sample_ids_file(task)) as path:
                write_json_atomic(path, list(ids))

    @contextmanager
    def file(self, relative: str) -> Iterator[pathlib.Path]:
        """A path to write to; the file lands at `relative` inside the run, whole or not at all.

        A file that is listed stays listed whatever happens: until its successor is whole nothing is said of it, and
        then both are, because the two files can't be replaced in one step.

        Raises:
            RunError: the file can't be written.
        """
        self._lock.require_own()  # before a folder is made that may be somebody else's
        is_listed = relative in self.manifest.files
        with atomic_path(self.folder / relative) as written:
            yield written
            if is_listed:
                new = describe_file(written)
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

        Raises:
            RunError: a table can't be read or written, or a file can't be removed.
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
        others = [("calibration", "name", [name]), ("resources", "phase", phases)]
        for table, column, values in (*by_variant, *others):
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


def is_phase_of(name: str, phase: str) -> bool:
    """Whether a phase of the run belongs to the calibration `name`."""
    return phase == f"calibrate:{name}" or phase.startswith(f"calibrate:{name}:")


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
    """A path to write to; the file lands at `relative` inside the run, and the manifest lists it.

    Args:
        run: the run directory.
        relative: where the file goes, with forward slashes, for example "reports/report.html".

    Raises:
        RunError: there is no run, or it can't be written to.
        RunLockedError: another process is writing to it.
    """
    folder = pathlib.Path(run)
    read_manifest(folder)  # before the lock, which would leave a file in a folder that is no run
    with RunLock(folder) as lock:
        contents = RunContents(folder, settled(folder, read_manifest(folder)), lock)
        with contents.file(relative) as written:
            yield written
            lock.require_own()
            new = describe_file(written)
        contents._save(files=dict(sorted({**contents.manifest.files, relative: new}.items())))


def remove_tree(entry: pathlib.Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there; of a link only the link.

    Raises:
        RunError: something can't be removed.
    """
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"can't remove {entry}: {error.strerror}", hint="Remove it, or give another folder."
        ) from error
