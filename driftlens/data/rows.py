"""Rows of data sets, tables, tar files and JSON lines: images, or columns that become questions and answers."""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import logging
import os
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from driftlens.data.sources import (
    SUFFIXES,
    Picture,
    RelatedTexts,
    Split,
    SplitView,
    data_sources,
    entry_class_names,
    read_image,
    require_column,
    resolve_labels,
    wrap_read_errors,
)
from driftlens.models.texts import ImageTextSample, TextSample
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError, SpecError, did_you_mean
from driftlens.utils.files import list_folder, parse_json, regular_file

if TYPE_CHECKING:
    from driftlens.config.data import HfData, JsonlData, TableData, TextEntry, WebdatasetData

log = logging.getLogger(__name__)

# UTF-8, with or without a byte order mark.
_UTF8 = "utf-8-sig"
_PARQUET = (".parquet", ".pq")
# Bytes read of a first line for its column names: a file without line ends is not read whole.
_LONGEST_LINE = 1 << 20
# Position of a row -> readers of its images.
_Beside = Callable[[int], Sequence[Callable[[], Picture]]]


def _prompt_columns(entry: TextEntry) -> dict[str, str]:
    """Map the fields of an entry's prompt to columns of its rows."""
    from driftlens.config.data import template_fields

    names = template_fields(entry.prompt or "{input}")
    return {name: entry.input if name == "input" and entry.input is not None else name for name in names}


def text_split_view(
    entry: TextEntry,
    split: Split,
    ids: Sequence[str],
    columns: Collection[str],
    row: Callable[[int], Mapping[str, Any]],
    *,
    where: str,
    origin: str,
    names: Sequence[str] | None = None,
    beside: _Beside | None = None,
) -> SplitView:
    """Build the `SplitView` of rows of text; test rows need an answer if the spec names its column.

    Args:
        entry: the spec's entry.
        split: the split.
        ids: one identifier per row.
        columns: existing columns.
        row: position -> values by column.
        where: the place in messages.
        origin: that of `SplitView`.
        names: meaning of integers among the targets.
        beside: position -> readers of the row's images.
    """
    from driftlens.config.data import fill_template

    asked = _prompt_columns(entry)
    for name, column in asked.items():
        require_column(column, columns, name if name == "input" else "prompt", where)
    if split == "test" and entry.target is not None:
        require_column(entry.target, columns, "target", where)
    classes = entry_class_names(entry.classes)
    if entry.words is not None:
        classes = tuple(dict.fromkeys(entry.words.values()))
    elif classes is None and entry.classes is True and names is not None:
        classes = tuple(names)
    are_classes = entry.classes not in (None, False) or entry.words is not None

    def row_location(position: int) -> str:
        return f"{where}, {'line' if entry.kind == 'jsonl' else 'row'} {ids[position]}"

    def answer_of_row(position: int) -> str:
        return _answer_of_target(entry, row(position).get(entry.answer_column), names, classes, row_location(position))

    def label_of_row(position: int) -> str | None:
        return (answer_of_row(position) or None) if are_classes else None

    def read_text_row(position: int) -> TextSample | ImageTextSample:
        values = row(position)
        fields = {name: _cell_text(values, column, row_location(position)) for name, column in asked.items()}
        if not any(text.strip() for text in fields.values()):
            raise DataError(
                f"{row_location(position)}: the text is empty ({', '.join(map(repr, asked.values()))})",
                hint="Remove such rows, or set `input` to the text column.",
            )
        question = fill_template(entry.prompt or "{input}", fields)
        if beside is None:
            return TextSample(question, answer_of_row(position))
        images = tuple(beside(position))
        if not images:
            raise DataError(f"{row_location(position)}: no image", hint="Add one, or remove the row.")
        return ImageTextSample(question, answer_of_row(position), images)

    related = _related_texts_reader(entry, columns, row, row_location, where) if split == "test" else None
    return SplitView(origin, tuple(ids), classes, label_of_row, read_text_row, holds="text", related=related)


def _cell_text(values: Mapping[str, Any], column: str, where: str) -> str:
    value = values.get(column)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise DataError(f"{where}: {column!r} is {value!r}, expected text; columns are {', '.join(values)}")
    return str(value)


def _answer_of_target(
    entry: TextEntry, value: Any, names: Sequence[str] | None, classes: Sequence[str] | None, where: str
) -> str:
    """Return the answer for a row's target value; empty if the row has no target."""
    # `datasets` marks unlabelled rows of a ClassLabel column with -1.
    if value is None or value == "" or (names is not None and value == -1):
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(f"{where}: {entry.answer_column!r} is {value!r}, expected text or a number")
    # As in JSON and YAML, not as Python prints a bool.
    spelled = [str(value).lower() if isinstance(value, bool) else str(value)]
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        spelled.append(names[value])
    if entry.words is not None:
        key, allowed = "words", list(entry.words)
        answer = next((entry.words[text] for text in spelled if text in entry.words), None)
    else:
        key, allowed = "classes", spelled[-1:] if classes is None else list(classes)
        answer = spelled[-1] if spelled[-1] in allowed else None
    if answer is not None:
        return answer
    raise DataError(
        f"{where}: target {spelled[-1]!r} is not in the {key}: {', '.join(allowed)}",
        hint=f"{did_you_mean(spelled[-1], allowed)} Add it, or remove the row.".lstrip(),
    )


def related_text_columns(entry: TextEntry) -> dict[str, str]:
    """Map `pair`, `positive` and `negative` to the columns that the entry names for them."""
    keys = ("pair", "positive", "negative")
    return {key: column for key in keys if (column := getattr(entry, key)) is not None}


def _related_texts_reader(
    entry: TextEntry,
    columns: Collection[str],
    row: Callable[[int], Mapping[str, Any]],
    place: Callable[[int], str],
    where: str,
) -> Callable[[int], RelatedTexts] | None:
    """Return a function from a row's position to its paired, positive and negative texts; None if there are none."""
    from driftlens.config.data import fill_template, template_fields

    related = related_text_columns(entry)
    for key, column in related.items():
        require_column(column, columns, key, where)
    if not related:
        return None

    def read_related_texts(position: int) -> RelatedTexts:
        values = row(position)
        shown = {key: _list_of_texts(values.get(column), column, place(position)) for key, column in related.items()}
        if "pair" in shown and len(shown["pair"]) != 1:
            raise DataError(f"{place(position)}: {entry.pair!r} has {len(shown['pair'])} texts, expected one")
        if not shown.get("positive", ("",)):
            raise DataError(
                f"{place(position)}: {entry.positive!r} is empty, expected an answer",
                hint="Add one, or remove the row.",
            )
        pair = "".join(shown.get("pair", ()))
        if pair and entry.prompt is not None:
            # The second text takes the first one's place in the prompt.
            names = template_fields(entry.prompt)
            replaced = names if len(names) == 1 else ("input", entry.input)
            fields = {name: pair if name in replaced else str(values.get(name)) for name in names}
            pair = fill_template(entry.prompt, fields)
        return RelatedTexts(pair, shown.get("positive", ()), shown.get("negative", ()))

    return read_related_texts


def _list_of_texts(value: Any, column: str, place: str) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
    if odd := [one for one in values if isinstance(one, bool) or not isinstance(one, str | int | float)]:
        raise DataError(
            f"{place}: {column!r} holds {odd[0]!r}, expected text",
            hint="Give a text or a list of texts; in CSV files one text per row.",
        )
    return tuple(str(one) for one in values)


@data_sources.register("jsonl")
def _open_jsonl(entry: JsonlData, split: Split, access: Permissions) -> SplitView:
    """Open a split's JSON lines file; ids are line numbers from 1, and blank lines are skipped."""
    file = Path(getattr(entry, split))
    rows: dict[str, dict[str, Any]] = {}
    # Read as lines and parsed here: the JSON reader of `datasets` would turn some texts into dates, and a 1 in a column
    # with 2.5 into 1.0.
    lines = _load_dataset_files("text", [file], encoding=_UTF8)[:].get("text", [])
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with wrap_read_errors(f"{file}, line {number}"):
                rows[str(number)] = {**parse_json(line)}
    values = list(rows.values())
    keys = dict.fromkeys(key for row in values for key in row)
    where, beside = str(file), _row_image_readers(entry, keys, values, file, str(file))
    origin = str(file.resolve())
    return text_split_view(
        entry, split, list(rows), keys, values.__getitem__, where=where, origin=origin, beside=beside
    )


def _row_image_readers(
    entry: TextEntry, columns: Collection[str], rows: Sequence[Mapping[str, Any]], file: Path, where: str
) -> _Beside | None:
    """Return a function from a row's position to readers of its images; None if the entry names no image column."""
    column = entry.image_column
    if column is None:
        return None
    require_column(column, columns, "image", where)
    cells = [cell if isinstance(cell := row.get(column), list) else [cell] for row in rows]
    _require_image_files([path for listed in cells for path in listed], file.parent, where)
    return lambda position: [partial(read_image, file.parent / str(path)) for path in cells[position]]


@data_sources.register("table")
def _open_table(entry: TableData, split: Split, access: Permissions) -> SplitView:
    """Open a split of a table; ids are image paths as written, or row numbers for texts."""
    wanted = {entry.path_column, entry.label, entry.image_column, entry.answer_column}
    if entry.has_text_column:
        wanted |= {*_prompt_columns(entry).values(), *related_text_columns(entry).values()}
    file, where, origin, numbers, columns = _read_table_split(entry, split, wanted)
    if entry.has_text_column:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        beside, ids = _row_image_readers(entry, columns, rows, file, where), list(map(str, numbers))
        return text_split_view(entry, split, ids, columns, rows.__getitem__, where=where, origin=origin, beside=beside)
    require_column(entry.path_column, columns, "image", str(file))
    if entry.label is not None and split == "test":
        require_column(entry.label, columns, "label", str(file))
    paths = columns[entry.path_column]
    _require_image_files(paths, file.parent, where)
    places = _normalized_paths(paths, file.parent)
    if twice := [path for path, count in Counter(places).items() if count > 1]:
        raise DataError(f"{where}: {twice[0]} occurs more than once", hint="List every image once.")
    labels = [None if label == "" else label for label in columns.get(entry.label or "", [None] * len(paths))]
    names, class_names = resolve_labels(labels, entry_class_names(entry.classes), where)
    if split != "calibration" and getattr(entry, split) != entry.calibration:
        _refuse_shared_images(entry, places, where, origin)
    return SplitView(
        origin=origin,
        ids=tuple(paths),
        class_names=class_names,
        label=names.__getitem__,
        read=lambda position: read_image(file.parent / paths[position]),
    )


def _read_table_split(
    entry: TableData, split: Split, wanted: Collection[str | None]
) -> tuple[Path, str, str, Sequence[int], dict[str, list[Any]]]:
    """Return a split's file, its name in messages, a string that identifies it, row numbers and wanted columns."""
    value = getattr(entry, split)
    file, where = Path(entry.file or value), f"{entry.file}, {entry.split} {value}" if entry.file else value
    columns = _read_table(file, {*wanted, entry.split}, entry.encoding, entry.separator)
    rows: Sequence[int] = range(max(map(len, columns.values()), default=0))
    origin = str(file.resolve())
    if entry.file:
        require_column(entry.split, columns, "split", str(file))
        rows = [row for row in rows if str(columns[entry.split][row]) == value]
        origin = f"{origin}[{entry.split}={value}]"
    return file, where, origin, rows, {name: [cells[row] for row in rows] for name, cells in columns.items()}


def column_names(file: Path, encoding: str = _UTF8, separator: str = "") -> list[str]:
    """List the column names of a CSV, TSV or Parquet file, or the keys of the first JSON line."""
    if file.suffix.lower() in _PARQUET:
        from pyarrow.parquet import read_schema

        return list(read_schema(regular_file(file)).names)
    with regular_file(file).open(encoding=encoding, newline="") as lines:
        if file.suffix.lower() == ".jsonl":
            return [*parse_json(lines.readline(_LONGEST_LINE))]
        return next(csv.reader(lines, delimiter=separator or _default_separator(file)), [])


def _read_table(
    file: Path, wanted: Collection[str | None], encoding: str | None = None, separator: str | None = None
) -> dict[str, list[Any]]:
    """Read a CSV, TSV or Parquet file by column; unwanted columns of Parquet files are filled with None."""
    encoding, separator = encoding or _UTF8, separator or _default_separator(file)
    names = column_names(file, encoding, separator)
    if file.suffix.lower() in _PARQUET:
        columns = [name for name in names if name in wanted]
        cells = _load_dataset_files("parquet", [file], columns=columns)[:] if columns else {}
        count = max(map(len, cells.values()), default=0)
        return {name: cells.get(name, [None] * count) for name in names}
    names = [name or f"column {place}" for place, name in enumerate(names)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{file}: several columns named {twice[0]!r}", hint="Rename all but one.")
    if not names:
        return {}
    from datasets import Features, Value

    # Cells stay text: `datasets` would turn 007 into 7, and NA into a missing value.
    settings = {"column_names": names, "header": 0, "index_col": False, "na_filter": False}
    text = Features({name: Value("string") for name in names})
    return dict(_load_dataset_files("csv", [file], features=text, encoding=encoding, sep=separator, **settings)[:])


def _default_separator(file: Path) -> str:
    return "\t" if file.suffix.lower() == ".tsv" else ","


def _load_dataset_files(builder: str, files: Sequence[Path], **options: Any) -> Any:
    """Load local files as a `datasets.Dataset`; only tar files are kept in the library's cache."""
    import datasets

    # Otherwise every read of a local file contacts the Hub.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # The library reads `[` and `*` in paths as patterns.
    paths = [glob.escape(str(regular_file(file).resolve(strict=True))) for file in files]
    with _silence_datasets(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as cache:
        # pandas cuts rows that are longer than the header, and warns.
        warnings.filterwarnings("error", message="Length of header or names")
        if builder != "webdataset":
            options |= {"cache_dir": cache, "keep_in_memory": True}
        return datasets.load_dataset(builder, data_files={"train": paths}, split="train", **options)


@contextlib.contextmanager
def _silence_datasets() -> Iterator[None]:
    """Disable progress bars and error logging of the library `datasets` in the block."""
    import datasets

    level, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if had_bars:
            datasets.enable_progress_bars()


def _refuse_shared_images(entry: TableData, places: Iterable[str], where: str, origin: str) -> None:
    """Refuse images that calibration also lists, unless both splits sample from the same list."""
    file, _, calibration, _, columns = _read_table_split(entry, "calibration", {entry.path_column})
    listed = [path for path in columns.get(entry.path_column, ()) if isinstance(path, str)]
    shared = sorted(set(places).intersection(_normalized_paths(listed, file.parent)))
    if shared and calibration != origin:
        raise DataError(
            f"{where}: images shared with calibration: {len(shared)}, such as {shared[0]}",
            hint="List different images, or the same rows in both splits, which then get different samples.",
        )


def _normalized_paths(paths: Iterable[str], folder: Path) -> list[str]:
    """Normalize paths for comparison without following links."""
    folder = folder.resolve()
    return [os.path.normpath(folder / path) for path in paths]


def _require_image_files(paths: Sequence[Any], folder: Path, where: str) -> None:
    missing = [path for path in paths if not (folder / path).is_file()]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(paths)} images are missing, such as {missing[0]}",
            hint=f"Paths are relative to {folder}.",
        )


@data_sources.register("hf")
def _open_hf(entry: HfData, split: Split, access: Permissions) -> SplitView:
    """Open the rows of one split of a Hugging Face data set; ids are row numbers."""
    from datasets import ClassLabel

    splits, name = _load_hf_dataset(entry, access), getattr(entry, split)
    if name not in splits:
        raise DataError(
            f"{entry.path}: no split {name!r}, expected {', '.join(splits)}", hint=did_you_mean(name, splits)
        )
    # A saved data set may have a format, such as torch, which would change the values of cells.
    rows, where = splits[name].with_format(None), f"{entry.path}, split {name}"
    ids, origin = tuple(map(str, range(len(rows)))), f"{entry.path}[{entry.config or ''}]:{name}"
    column = entry.image_column if entry.has_text_column else entry.image or "image"
    beside = None if column is None else _hf_image_readers(entry, rows, column, where)
    label = entry.answer_column if entry.has_text_column else entry.label
    feature = rows.features.get(label)
    classes = tuple(feature.names) if isinstance(feature, ClassLabel) else None
    if entry.has_text_column:
        columns = rows.column_names
        wanted = (*_prompt_columns(entry).values(), entry.answer_column, *related_text_columns(entry).values())
        present = [name for name in dict.fromkeys(wanted) if name in columns]
        read = rows.select_columns(present).__getitem__ if present else lambda _: {}
        about = {"where": where, "origin": origin}
        return text_split_view(entry, split, ids, columns, read, **about, names=classes, beside=beside)
    assert beside is not None
    labels: list[str | None] = [None] * len(rows)
    if label:
        require_column(label, rows.column_names, "label", where)
        labels, classes = resolve_labels(rows[label][:], classes, where)
    return SplitView(origin, ids, classes, labels.__getitem__, lambda position: beside(position)[0]())


def _hf_image_readers(entry: HfData, rows: Any, column: str, where: str) -> _Beside:
    """Return a function from a row's position in a Hugging Face data set to readers of its images."""
    from datasets import Image

    require_column(column, rows.column_names, "image", where)
    feature = rows.features[column]
    are_lists = entry.has_text_column and isinstance(getattr(feature, "feature", None), Image)
    # `datasets` would read texts as paths.
    if not are_lists and not isinstance(feature, Image):
        images = [name for name, kind in rows.features.items() if isinstance(kind, Image)]
        raise DataError(
            f"{where}: the column {column!r} holds no images; image columns are {', '.join(images) or 'none'}",
            hint="Set `image: COLUMN`, or use cast_column(name, datasets.Image()).",
        )
    # Not decoded by `datasets`, which would download any address and let Pillow start Ghostscript for PostScript.
    mode, encoded = (feature.feature if are_lists else feature).mode, Image(decode=False)
    images = rows.select_columns([column]).cast_column(column, type(feature)(encoded) if are_lists else encoded)
    folders = _allowed_image_folders(entry)

    def read_row_image(row: int, position: int) -> Picture:
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

    def image_readers_of_row(row: int) -> Sequence[Callable[[], Picture]]:
        count = len(images[row][column] or ()) if are_lists else 1
        return [partial(read_row_image, row, position) for position in range(count)]

    return image_readers_of_row


def _allowed_image_folders(entry: HfData) -> list[Path]:
    """List folders from which a data set's rows may load images: its own, or the caches of the Hub libraries."""
    if Path(entry.path).is_dir():
        return [Path(entry.path)]
    from datasets import config
    from huggingface_hub import constants

    return [config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, Path(constants.HF_HUB_CACHE)]


def _load_hf_dataset(entry: HfData, access: Permissions) -> Any:
    import datasets

    if Path(entry.path).is_dir():
        # Devices and pipes may be endless, and the library would read them.
        for file in Path(entry.path).rglob("*"):
            regular_file(file)
        loaded = datasets.load_from_disk(entry.path)
        if not isinstance(loaded, datasets.DatasetDict):
            raise DataError(
                f"{entry.path}: one data set without splits",
                hint="Save its splits: DatasetDict(train=..., test=...).save_to_disk(path).",
            )
        return loaded
    if access.offline or datasets.config.HF_HUB_OFFLINE:
        return _load_hf_from_cache(entry)
    log.info("loading data set %s from the Hugging Face Hub", entry.path)
    return datasets.load_dataset(entry.path, entry.config, revision=entry.revision)


def _load_hf_from_cache(entry: HfData) -> Any:
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
            folder = snapshot_download(entry.path, repo_type="dataset", revision=entry.revision, local_files_only=True)
        except Exception as error:  # the library's own errors
            flag = f" --revision {entry.revision}" if entry.revision else ""
            raise DataError(
                f"{entry.path}: no such folder, not in the local cache, and offline",
                hint=f"Run once online: hf download --repo-type dataset {entry.path}{flag}",
            ) from error
        return datasets.load_dataset(folder, entry.config)


@data_sources.register("webdataset")
def _open_webdataset(entry: WebdatasetData, split: Split, access: Permissions) -> SplitView:
    """Open the samples of a split's tar files in stored order; ids are file name and sample key."""
    from datasets import Image

    place = getattr(entry, split)
    shards = _list_tar_files(Path(place))
    origin = _origin_of_shards(entry, place, shards)
    for shard in shards:
        with wrap_read_errors(str(shard)):
            _require_intact_tar(shard)
    with wrap_read_errors(str(shards[0] if len(shards) == 1 else shards[0].parent)):
        rows = _load_dataset_files("webdataset", shards)
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
    names, class_names = resolve_labels(values, entry_class_names(entry.classes), place)
    encoded = rows.select_columns([image]).cast_column(image, Image(decode=False))

    def read_member_image(position: int) -> Picture:
        return read_image(io.BytesIO(encoded[position][image]["bytes"]), ids[position])

    return SplitView(origin, ids, class_names, names.__getitem__, read_member_image)


def _require_intact_tar(shard: Path) -> None:
    with tarfile.open(regular_file(shard)) as tar:
        for member in tar:
            # A negative size would make tarfile loop forever.
            if member.size < 0:
                raise ValueError(f"{member.name} has {member.size} bytes")
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        # A tar file ends in a block of zeros. The library takes any other block for the end, too, and would drop
        # the samples after it.
        if any(tar.fileobj.read(tarfile.BLOCKSIZE)):
            raise ValueError(f"damaged after byte {tar.offset}")


def _list_tar_files(place: Path) -> list[Path]:
    """List the tar files at a path, in a folder, or that match a pattern."""
    if place.is_file():
        return [place]
    files = sorted(place.glob("*.tar") if place.is_dir() else place.parent.glob(place.name))
    if not files:
        raise DataError(f"{place}: no tar files", hint="Give one, a folder, or a pattern such as train-*.tar.")
    return files


def _origin_of_shards(entry: WebdatasetData, place: str, shards: list[Path]) -> str:
    """Return a string that identifies a split's tar files, the same as for calibration if the files are the same."""
    if place != entry.calibration:
        of_split = {file.resolve() for file in shards}
        other = {file.resolve() for file in _list_tar_files(Path(entry.calibration))}
        shared = sorted(file.name for file in of_split & other)
        if shared and of_split != other:
            raise DataError(
                f"{place}: files shared with calibration: {len(shared)}, such as {shared[0]}",
                hint="List different files, or the same ones in both splits, which then get different samples.",
            )
        place = entry.calibration if shared else place
    return str(Path(place).resolve())


# Kinds of data by file extension.
_KINDS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "table", ".tsv": "table", ".parquet": "table"}
# Common names of the splits for calibration and measurement.
_SPLITS = (("train", "calibration"), ("test", "val", "validation"))

_TEXTS = ("input", "text", "prompt", "question", "instruction", "sentence", "query", "content")
_ANSWERS = ("target", "label", "answer", "output", "response", "completion")


def infer_data_entry(place: Path, *, reads: str) -> dict[str, str]:
    """Infer the spec entry for data at a path, for a model whose modality `reads` is text or image.

    One file, or one folder of images, serves all splits; sampling keeps them disjoint.
    """
    if not place.exists():
        raise SpecError(f"--data: no file or folder {place}", hint="Check the path.")
    path = str(place.resolve())
    entry = _infer_split_entry(place, path)
    if entry is None and place.is_file() and place.suffix.lower() in _KINDS:
        entry = {"kind": _KINDS[place.suffix.lower()], "calibration": path, "test": path}
    files = (file for pattern in ("*", "*/*") for file in place.glob(pattern))
    if entry is None and place.is_dir() and any(file.suffix.lower() in SUFFIXES for file in files):
        entry = {"kind": "imagefolder", "calibration": path, "test": path}
    if entry is None:
        raise SpecError(
            f"--data: unrecognized data format of {place}",
            hint=f"Give a file ({', '.join(_KINDS)}), an image folder, or a folder with train and test. For other "
            "kinds write a spec: `driftlens init`, docs/data.md.",
        )
    is_rows = entry["kind"] in ("jsonl", "table")
    return {**entry, **_infer_text_columns(place, entry)} if reads == "text" and is_rows else entry


def _infer_text_columns(place: Path, entry: dict[str, str]) -> dict[str, str]:
    """Find the columns of questions and answers by common column names."""
    names: list[str] = []
    # The reader of the file reports that it is empty or broken.
    with contextlib.suppress(OSError, ValueError, AttributeError, LookupError, csv.Error):
        names = column_names(Path(entry["test"]))
    if not names:
        return {"input": _TEXTS[0]}
    text = next((name for name in _TEXTS if name in names), None)
    if text is None:
        raise SpecError(
            f"--data: no text column found in {place}; its columns are {', '.join(names)}",
            hint=f"Rename the text column to one of {', '.join(_TEXTS)}.",
        )
    answer = next((name for name in _ANSWERS if name in names), None)
    return {"input": text} | ({"target": answer} if answer else {})


def _infer_split_entry(place: Path, name: str) -> dict[str, str] | None:
    """Infer the entry of a folder with train and test splits, or of an `.npz` file, at a path; None for others."""
    if place.suffix.lower() == ".npz":
        return {"kind": "npz", "file": name}
    splits = [_find_split(place, names) for names in _SPLITS]
    if not place.is_dir() or None in splits:
        return None
    kinds = {"imagefolder" if split.is_dir() else _KINDS.get(split.suffix.lower(), "") for split in splits}
    kind = kinds.pop()
    if kinds or not kind:
        return None
    return {
        "kind": kind,
        **{key: f"{name}/{path.name}" for key, path in zip(("calibration", "test"), splits, strict=True)},
    }


def _find_split(folder: Path, names: Sequence[str]) -> Any:
    """Return the first file or folder in a folder with one of these names, ignoring extensions; None without."""
    there = {entry.stem.lower(): entry for entry in sorted(list_folder(folder), reverse=True)}
    return next((there[name] for name in names if name in there), None)
