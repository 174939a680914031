"""Data sets in the Hugging Face `datasets` format, from disk or from the Hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.access import Access
from driftlens.data.sources import (
    Split,
    SplitView,
    as_picture,
    data_sources,
    named,
    refused,
    require_column,
)
from driftlens.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from driftlens.spec.data import HfData

log = logging.getLogger(__name__)


@data_sources.register("hf")
def open_hf(entry: HfData, split: Split, access: Access) -> SplitView:
    """The rows of one split; ids are row numbers, class names those of the label column's ClassLabel.

    Raises:
        DataError: `datasets` is not installed, no such data set, split or column, a column of another kind, a
            row without a label, or a Hub id while offline.
    """
    splits, name = _load(entry, access), getattr(entry, split)
    if name not in splits:
        raise DataError(
            f"{entry.path}: no split {name!r}; there are {', '.join(splits)}", hint=did_you_mean(name, splits)
        )
    rows, where = splits[name], f"{entry.path}, split {name}"
    _check_image_column(rows, entry.image, where)
    names, class_names = _labels(rows, entry.label, where) if entry.label else (None, None)
    images = rows.select_columns([entry.image])
    if not len(rows):
        raise DataError(f"{where}: no rows", hint="Choose another split.")
    return SplitView(
        origin=f"{entry.path}[{entry.config or ''}]:{name}",
        ids=tuple(str(row) for row in range(len(rows))),
        class_names=class_names,
        label=lambda position: names[position] if names else None,
        read=lambda position: as_picture(images[position][entry.image], f"{where}, row {position}"),
    )


def _load(entry: HfData, access: Access) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data sets of kind hf need the package `datasets`", hint="pip install driftlens[data]"
        ) from error
    if Path(entry.path).is_dir():
        hint = "Write it with DatasetDict.save_to_disk."
        with refused(f"{entry.path}: not a folder written by save_to_disk", hint):
            loaded = datasets.load_from_disk(entry.path)
        if not isinstance(loaded, datasets.DatasetDict):
            raise DataError(
                f"{entry.path}: holds one data set without splits",
                hint="Save one entry per split: DatasetDict(train=..., test=...).save_to_disk(path).",
            )
        return loaded
    if access.offline:
        raise DataError(
            f"{entry.path}: no such folder, and nothing is downloaded while offline",
            hint="Save the data set with save_to_disk on a machine with a network and name the folder.",
        )
    log.info("loading the data set %s from the Hugging Face Hub", entry.path)
    hint = "Check the id and `config`, or name a folder written by save_to_disk."
    with refused(f"{entry.path}: the data set can't be loaded", hint):
        return datasets.load_dataset(entry.path, entry.config)


def _check_image_column(rows: Any, column: str, where: str) -> None:
    from datasets import Image

    require_column(column, rows.column_names, "image", where)
    if not isinstance(rows.features[column], Image):
        images = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
        found = f"image columns are {', '.join(images)}" if images else "there is no image column"
        raise DataError(
            f"{where}: the column {column!r} holds no images; {found}",
            hint="Name it as `image: COLUMN`, or cast the column: cast_column(name, datasets.Image()).",
        )


def _labels(rows: Any, column: str, where: str) -> tuple[list[str | None], tuple[str, ...] | None]:
    """Class name per row, and all class names."""
    from datasets import ClassLabel

    require_column(column, rows.column_names, "label", where)
    values = list(rows[column])
    feature = rows.features[column]
    known = tuple(feature.names) if isinstance(feature, ClassLabel) else None
    for row, value in enumerate(values):
        if value is None or (known is not None and not 0 <= value < len(known)):
            raise DataError(
                f"{where}: row {row} has no label in the column {column!r} ({value})",
                hint="Filter such rows out, or set `label: null` for a split without labels.",
            )
        if not isinstance(value, int | str):
            raise DataError(
                f"{where}: the column {column!r} holds {type(value).__name__}, expected class labels or text",
                hint="Name the column of class labels as `label: COLUMN`.",
            )
    return named(values, known, where)
