"""Data sets in the Hugging Face `datasets` format, from disk or from the Hub, and WebDataset tar files."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from driftlens.data.images import read_image
from driftlens.data.library import read_shards
from driftlens.data.related import related_columns
from driftlens.data.rows import columns_asked, text_view
from driftlens.data.sources import (
    Picture,
    Split,
    SplitView,
    data_sources,
    listed_classes,
    named,
    require_column,
)
from driftlens.utils.distributed import Access
from driftlens.utils.errors import DataError, did_you_mean
from driftlens.utils.files import plain_file

if TYPE_CHECKING:
    from driftlens.config.data import HfData, WebdatasetData

log = logging.getLogger(__name__)


@data_sources.register("hf")
def open_hf(entry: HfData, split: Split, access: Access) -> SplitView:
    """Open the rows of one split; ids are row numbers, class names come from the label column's ClassLabel.

    Args:
        entry: the spec's entry.
        split: the split.
        access: permissions.
    """
    splits, name = _load(entry, access), getattr(entry, split)
    if name not in splits:
        raise DataError(
            f"{entry.path}: no split {name!r}, expected {', '.join(splits)}", hint=did_you_mean(name, splits)
        )
    # A saved data set may have a format, such as torch, which would change the values of cells.
    rows, where = splits[name].with_format(None), f"{entry.path}, split {name}"
    origin = f"{entry.path}[{entry.config or ''}]:{name}"
    if entry.holds_texts:
        return _open_texts(entry, split, rows, where, origin)
    pictures = _pictures(entry, rows, entry.pixels, where)
    names, class_names = _labels(rows, entry.label, where) if entry.label else (None, None)
    return SplitView(
        origin=origin,
        ids=tuple(str(row) for row in range(len(rows))),
        class_names=class_names,
        label=lambda position: names[position] if names else None,
        read=lambda position: pictures(position)[0](),
    )


def _pictures(
    entry: HfData, rows: Any, column: str, where: str
) -> Callable[[int], Sequence[Callable[[], Picture]]]:
    """Return a function from a row to readers of its images."""
    from datasets import Image

    feature = rows.features.get(column)
    are_lists = entry.holds_texts and isinstance(getattr(feature, "feature", None), Image)
    require_column(column, rows.column_names, "image", where)
    # `datasets` would read texts as paths.
    if not are_lists and not isinstance(feature, Image):
        images = [name for name, kind in rows.features.items() if isinstance(kind, Image)]
        raise DataError(
            f"{where}: the column {column!r} holds no images; image columns are {', '.join(images) or 'none'}",
            hint="Set `image: COLUMN`, or use cast_column(name, datasets.Image()).",
        )
    # Not decoded by `datasets`, which would download any address and let Pillow start Ghostscript for PostScript.
    mode, encoded = (feature.feature if are_lists else feature).mode, Image(decode=False)
    images = rows.select_columns([column]).cast_column(
        column, type(feature)(encoded) if are_lists else encoded
    )
    folders = _folders(entry)

    def read(row: int, position: int) -> Picture:
        cell, place = images[row][column], f"{where}, row {row}"
        content = (cell[position] if are_lists else cell) or {"bytes": None, "path": None}
        source: Any = None if content["bytes"] is None else io.BytesIO(content["bytes"])
        if source is None:
            source = Path(content["path"] or "").resolve()
            if not any(source.is_relative_to(folder.resolve()) for folder in folders):
                raise DataError(
                    f"{place}: no image, and the path {content['path']!r} is outside the data set",
                    hint="Save it with save_to_disk, which copies local files.",
                )
        picture = read_image(source, place)
        return picture.convert(mode) if mode else picture

    def readers_of(row: int) -> Sequence[Callable[[], Picture]]:
        count = len(images[row][column] or ()) if are_lists else 1
        return [partial(read, row, position) for position in range(count)]

    return readers_of


def _open_texts(entry: HfData, split: Split, rows: Any, where: str, origin: str) -> SplitView:
    from datasets import ClassLabel

    columns = rows.column_names
    named_columns = (*columns_asked(entry).values(), entry.answers, *related_columns(entry).values())
    present = [column for column in named_columns if column in columns]
    feature, plain = rows.features.get(entry.answers), rows.select_columns(list(dict.fromkeys(present)))
    beside = _pictures(entry, rows, entry.pictures, where) if entry.pictures else None

    def row(position: int) -> dict[str, Any]:
        return plain[position] if present else {}

    return text_view(
        entry,
        split,
        list(map(str, range(len(rows)))),
        columns,
        row,
        where=where,
        origin=origin,
        names=feature.names if isinstance(feature, ClassLabel) else None,
        beside=beside,
    )


@data_sources.register("webdataset")
def open_webdataset(entry: WebdatasetData, split: Split, access: Access) -> SplitView:
    """Open the samples of a split's tar files in their order; ids are file name and sample key.

    Args:
        entry: the spec's entry.
        split: the split.
        access: permissions.
    """
    from datasets import Image

    place = getattr(entry, split)
    shards = _shards(Path(place))
    origin = _origin(entry, place, shards)
    rows = read_shards(shards)
    # Names with two underscores are the library's own columns.
    endings = [name for name in rows.column_names if not name.startswith("__")]
    by_ending = {name.lower(): name for name in endings}
    label = by_ending.get((entry.label or "").lower())
    images = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
    image = by_ending.get(entry.image.lower()) if entry.image else images[0] if len(images) == 1 else None
    if image is None or (split == "test" and entry.label and label is None):
        raise DataError(
            f"{place}: members end in {', '.join(endings)}; expected one image"
            f"{f' and .{entry.label}' if entry.label else ''}",
            hint="Set `image: ENDING` and `label: ENDING`; without labels, `label: null`.",
        )
    keys = zip(rows["__url__"], rows["__key__"], strict=True)
    ids = tuple(f"{Path(url).name}/{key}" for url, key in keys)
    cells = [None] * len(rows) if label is None else rows[label]
    values = [cell.get(entry.key) if isinstance(cell, dict) else cell for cell in cells]
    values = [(value.strip() or None) if isinstance(value, str) else value for value in values]
    names, class_names = named(values, listed_classes(entry.classes), place)
    encoded = rows.select_columns([image]).cast_column(image, Image(decode=False))

    def read(position: int) -> Picture:
        return read_image(io.BytesIO(encoded[position][image]["bytes"]), ids[position])

    return SplitView(origin, ids, class_names, names.__getitem__, read)


def _shards(place: Path) -> list[Path]:
    """List a tar file, the tar files of a folder, or those that match a pattern."""
    if place.is_file():
        return [place]
    files = sorted(place.glob("*.tar") if place.is_dir() else place.parent.glob(place.name))
    if not files:
        raise DataError(
            f"{place}: no tar files",
            hint="Give one, a folder, or a pattern such as train-*.tar.",
        )
    return files


def _origin(entry: WebdatasetData, place: str, shards: list[Path]) -> str:
    """Return the origin of a split's tar files: the calibration samples' origin if the files are the same."""
    if place != entry.calibration:
        of_split, other = (
            {file.name: file.resolve() for file in shards_of}
            for shards_of in (shards, _shards(Path(entry.calibration)))
        )
        shared = sorted(set(of_split.values()) & set(other.values()))
        if shared and of_split != other:
            raise DataError(
                f"{place}: files shared with calibration: {len(shared)}, such as {shared[0]}",
                hint="List different files, or the same ones in both splits, which then get different samples.",
            )
        place = entry.calibration if shared else place
    return str(Path(place).resolve())


def _load(entry: HfData, access: Access) -> Any:
    import datasets

    if Path(entry.path).is_dir():
        # Devices and pipes may be endless, and the library would read them.
        for file in Path(entry.path).rglob("*"):
            plain_file(file)
        loaded = datasets.load_from_disk(entry.path)
        if not isinstance(loaded, datasets.DatasetDict):
            raise DataError(
                f"{entry.path}: one data set without splits",
                hint="Save its splits: DatasetDict(train=..., test=...).save_to_disk(path).",
            )
        return loaded
    if access.offline or datasets.config.HF_HUB_OFFLINE:
        return _cached(entry)
    log.info("loading data set %s from the Hugging Face Hub", entry.path)
    return datasets.load_dataset(entry.path, entry.config, revision=entry.revision)


def _cached(entry: HfData) -> Any:
    """Load a Hub data set from the local cache: as loaded before, or from its downloaded repository."""
    import datasets
    from huggingface_hub import constants, snapshot_download

    with (
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
    ):
        # The cache of earlier loads has no revisions, so it serves only where none is requested.
        # The downloaded repository may still be in the cache.
        with contextlib.suppress(Exception):
            if entry.revision is None:
                return datasets.load_dataset(entry.path, entry.config)
        try:
            folder = snapshot_download(
                entry.path, repo_type="dataset", revision=entry.revision, local_files_only=True
            )
        except Exception as error:  # the library's own errors
            flag = f" --revision {entry.revision}" if entry.revision else ""
            raise DataError(
                f"{entry.path}: no such folder, not in the local cache, and offline",
                hint=f"Run once online: hf download --repo-type dataset {entry.path}{flag}",
            ) from error
        return datasets.load_dataset(folder, entry.config)


def _folders(entry: HfData) -> list[Path]:
    """List the folders that rows may refer to: the data set's own, or the caches it is loaded into."""
    if Path(entry.path).is_dir():
        return [Path(entry.path)]
    from datasets import config
    from huggingface_hub import constants

    return [config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, Path(constants.HF_HUB_CACHE)]


def _labels(rows: Any, column: str, where: str) -> tuple[list[str | None], tuple[str, ...] | None]:
    """Return the class name per row, and all class names."""
    from datasets import ClassLabel

    require_column(column, rows.column_names, "label", where)
    feature = rows.features[column]
    return named(rows[column][:], tuple(feature.names) if isinstance(feature, ClassLabel) else None, where)
