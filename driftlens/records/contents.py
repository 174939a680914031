"""What may be put into a run directory: rows, features, sample ids, files, entries of the manifest."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.files import atomic_path, write_json_atomic
from driftlens.records import layout
from driftlens.records.events import append_event
from driftlens.records.manifest import Manifest, ids_digest, write_manifest
from driftlens.records.schema import TABLES
from driftlens.records.tables import append_rows


class RunContents:
    """The files of a run and the manifest that describes them; every file is whole or absent.

    Attributes:
        folder: the run directory.
        manifest: what the run says about itself, as of now.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

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

    def append(self, table: str, frame: pd.DataFrame, *, replace: bool = False) -> None:
        """Add rows to a table; rows that are there keep their exact values.

        Args:
            table: name in `schema.TABLES`.
            frame: the rows; columns left out are null.
            replace: whether a row with a key that is there takes its place, as when a phase is done again.

        Raises:
            ValueError: a row does not fit the table, or its key is there already.
            RunError: the table can't be read or written.
        """
        relative = layout.table_file(table)
        self._unlist(relative)
        append_rows(self.folder / relative, TABLES[table], frame, replace=replace)

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

    def write_sample_ids(self, task: str, split: str, ids: Sequence[str]) -> None:
        """Record which samples a split of a task consists of; "diagnosis" names the rows of the features.

        Raises:
            RunError: the file can't be written.
        """
        manifest = self.manifest
        kept, digests = manifest.sample_ids.get(split, {}), manifest.sample_id_digests.get(split, {})
        self.describe(
            sample_ids={split: {**kept, task: list(ids)}},
            sample_id_digests={split: {**digests, task: ids_digest(ids)}},
        )
        if split == "diagnosis":
            relative = layout.sample_ids_file(task)
            self._unlist(relative)
            write_json_atomic(self.folder / relative, list(ids))

    @contextmanager
    def file(self, relative: str) -> Iterator[pathlib.Path]:
        """A path to write to; the file lands at `relative` inside the run, whole or not at all.

        Raises:
            RunError: the file can't be written.
        """
        self._unlist(relative)
        with atomic_path(self.folder / relative) as written:
            yield written

    def _unlist(self, relative: str) -> None:
        """A file leaves the list before it changes, so that none is listed with another one's digest."""
        if relative in self.manifest.files:
            self._save(files={name: file for name, file in self.manifest.files.items() if name != relative})

    def _save(self, **changes: Any) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)
        write_manifest(self.folder, self.manifest)


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping):
        return {**old, **new}
    if isinstance(old, Sequence) and not isinstance(old, str):
        return [*old, *(item for item in new if item not in old)]
    return new
