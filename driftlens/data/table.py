"""CSV, TSV and Parquet files that list images by path, with their labels, or hold texts."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.base.files import plain_file
from driftlens.data.image_folder import read_image
from driftlens.data.sources import (
    PATHS_HINT,
    Split,
    SplitView,
    data_sources,
    listed_classes,
    named,
    refused,
    require_column,
)
from driftlens.data.text_rows import columns_asked, text_view

if TYPE_CHECKING:
    from driftlens.spec.data import TableData


@data_sources.register("table")
def open_table(entry: TableData, split: Split, access: Access) -> SplitView:
    """The images that a split's rows name; ids are the paths as they stand there, relative ones to the file's folder.

    Labels are text, or numbers that index `classes`; a split that serves no accuracy may lack their column. Where rows
    are texts, ids are their numbers, counted from 0 over the whole file.
    """
    if entry.holds_texts:
        return _open_texts(entry, split)
    wanted = {"image": entry.image, "label": entry.label}
    file, where, origin, _, columns = _rows(entry, split, wanted)
    paths = _paths(columns[entry.image], file.parent, where)
    labels = [None if label == "" else label for label in columns.get(entry.label or "", [None] * len(paths))]
    names, class_names = named(labels, listed_classes(entry.classes), where)
    if split != "calibration" and getattr(entry, split) != entry.calibration:
        _require_apart(entry, _places(paths, file.parent), where, origin)
    return SplitView(
        origin=origin,
        ids=tuple(paths),
        class_names=class_names,
        label=lambda position: names[position],
        read=lambda position: read_image(file.parent / paths[position]),
    )


def _open_texts(entry: TableData, split: Split) -> SplitView:
    wanted = {
        **{f"{{{name}}}": column for name, column in columns_asked(entry).items()},
        "target": entry.answers,
    }
    _, where, origin, rows, columns = _rows(entry, split, wanted)

    def row(position: int) -> dict[str, Any]:
        return {name: values[position] for name, values in columns.items()}

    return text_view(entry, split, list(map(str, rows)), columns, row, where=where, origin=origin)


def _rows(
    entry: TableData, split: Split, wanted: Mapping[str, str | None]
) -> tuple[Path, str, str, Sequence[int], dict[str, list[Any]]]:
    """A split's file, what messages call its rows, where they stand, their numbers, and the columns that are wanted."""
    value = getattr(entry, split)
    file, where = Path(entry.file or value), f"{entry.file}, {entry.split} {value}" if entry.file else value
    wanted = {**wanted, "split": entry.split if entry.file else None}
    columns = _columns(file, wanted.values())
    optional = {"target"} if entry.target is None else set()
    optional |= {"label", "target"} if split != "test" else set()
    wanted = {key: column for key, column in wanted.items() if key not in optional or column in columns}
    for key, column in wanted.items():
        if column is not None:
            require_column(column, columns, key, str(file))
    rows: Sequence[int] = range(max(map(len, columns.values()), default=0))
    if entry.file:
        splits = [str(chosen) for chosen in columns[entry.split]]
        rows = [row for row in rows if splits[row] == value]
    if not rows:
        there = f"; the column {entry.split!r} holds {', '.join(sorted(set(splits)))}" if entry.file else ""
        raise DataError(f"{where}: no rows{there}", hint="Every task needs samples in each split.")
    origin = f"{file.resolve()}[{entry.split}={value}]" if entry.file else str(file.resolve())
    chosen = {column: [columns[column][row] for row in rows] for column in wanted.values() if column}
    return file, where, origin, rows, chosen


def _require_apart(entry: TableData, places: Iterable[str], where: str, origin: str) -> None:
    """Refuse images that are calibration samples too, unless one list serves both: then drawing keeps them apart."""
    file, _, calibration, _, columns = _rows(entry, "calibration", {"image": entry.image})
    listed = [path for path in columns[entry.image] if isinstance(path, str)]
    shared = sorted(set(places).intersection(_places(listed, file.parent)))
    if shared and calibration != origin:
        raise DataError(
            f"{where}: {len(shared)} of its images are calibration samples too, the first is {shared[0]}",
            hint="Name each image for one of both, or the same rows for both: then other samples are drawn of them.",
        )


def _places(paths: Iterable[str], folder: Path) -> list[str]:
    """Paths written in one way, so that they can be compared; links behind the folder are not followed."""
    folder = folder.resolve()
    return [os.path.normpath(folder / path) for path in paths]


def _columns(file: Path, wanted: Collection[str | None]) -> dict[str, list[Any]]:
    """Columns of a file by name, of Parquet only those wanted (the others are empty)."""
    unreadable = refused(f"{file}: can't be read", PATHS_HINT, OSError)
    kinds = (csv.Error, ValueError, NotImplementedError)  # the last of Parquet that this pyarrow can't unpack
    damaged = refused(f"{file}: no table", "Save it as CSV, TSV or Parquet.", *kinds)
    with unreadable, damaged:
        plain_file(file)
        if file.suffix.lower() in (".parquet", ".pq"):
            from pyarrow.parquet import ParquetFile

            with ParquetFile(file) as table:
                names = table.schema_arrow.names
                read = table.read(columns=[name for name in names if name in wanted])
            return {name: [] for name in names} | read.to_pydict()
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(
                text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True
            )
            rows, names = list(reader), list(reader.fieldnames or ())
    for row in rows:
        if None in row:
            raise DataError(
                f"{file}: the row {list(row.values())} is longer than the header",
                hint="Put text with commas in quotes.",
            )
    return {name: [row[name] for row in rows] for name in names}


def _paths(paths: Sequence[Any], folder: Path, where: str) -> list[str]:
    """Paths of images that are all there, each once."""
    odd = [path for path in paths if not isinstance(path, str) or not path]
    if odd:
        raise DataError(
            f"{where}: a path is {type(odd[0]).__name__} {str(odd[0])[:40]!r}, expected text",
            hint="Images themselves can't stand in the table; a data set that holds them is of kind hf.",
        )
    twice = [path for path, count in Counter(_places(paths, folder)).items() if count > 1]
    if twice:
        raise DataError(f"{where}: {twice[0]} occurs more than once", hint="Name every image once.")
    with refused(f"{where}: a path can't be looked up", "Paths of images are expected.", OSError, ValueError):
        missing = [path for path in paths if not (folder / path).is_file()]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(paths)} images are not there, the first is {missing[0]}",
            hint=f"Relative paths are resolved against {folder}.",
        )
    return list(paths)
