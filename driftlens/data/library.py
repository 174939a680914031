"""CSV, Parquet and WebDataset files, read by the library `datasets`."""

from __future__ import annotations

import csv
import glob
import io
import logging
import tarfile
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.data.images import read_image
from driftlens.data.sources import Picture, Split, SplitView, data_sources, listed_classes, named, refused
from driftlens.utils.distributed import Access
from driftlens.utils.errors import DataError
from driftlens.utils.files import from_json, plain_file

if TYPE_CHECKING:
    from driftlens.config.data import WebdatasetData

# UTF-8, with or without a byte order mark.
UTF8 = "utf-8-sig"
_PARQUET = (".parquet", ".pq")
# Bytes read of a first line for its column names: a file without line ends is not read whole.
_LONGEST_LINE = 1 << 20


def column_names(file: Path, encoding: str = UTF8, separator: str = "") -> list[str]:
    """List the column names of a CSV, TSV or Parquet file, or the keys of the first JSON line."""
    if file.suffix.lower() in _PARQUET:
        from pyarrow.parquet import read_schema

        return list(read_schema(plain_file(file)).names)
    with plain_file(file).open(encoding=encoding, newline="") as lines:
        if file.suffix.lower() == ".jsonl":
            return [*from_json(lines.readline(_LONGEST_LINE))]
        return next(csv.reader(lines, delimiter=separator or _separator(file)), [])


def read_table(
    file: Path, wanted: Collection[str | None], encoding: str | None = None, separator: str | None = None
) -> dict[str, list[Any]]:
    """Read a CSV, TSV or Parquet file by column; cells of Parquet files in other than the wanted columns are None."""
    encoding, separator = encoding or UTF8, separator or _separator(file)
    names = column_names(file, encoding, separator)
    if file.suffix.lower() in _PARQUET:
        columns = [name for name in names if name in wanted]
        cells = _load("parquet", [file], columns=columns)[:] if columns else {}
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
    return dict(_load("csv", [file], features=text, encoding=encoding, sep=separator, **settings)[:])


def _separator(file: Path) -> str:
    return "\t" if file.suffix.lower() == ".tsv" else ","


def _load(builder: str, files: Sequence[Path], **options: Any) -> Any:
    """Return a `datasets.Dataset` of local files; only that of tar files stays in the library's cache."""
    import datasets

    # Otherwise every read of a local file contacts the Hub.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # The library reads `[` and `*` in paths as patterns.
    paths = [glob.escape(str(plain_file(file).resolve(strict=True))) for file in files]
    with _quiet(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as cache:
        # pandas cuts rows that are longer than the header, and warns.
        warnings.filterwarnings("error", message="Length of header or names")
        if builder != "webdataset":
            options |= {"cache_dir": cache, "keep_in_memory": True}
        return datasets.load_dataset(builder, data_files={"train": paths}, split="train", **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` from showing bars and logging errors that are raised anyway."""
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


@data_sources.register("webdataset")
def _open_webdataset(entry: WebdatasetData, split: Split, access: Access) -> SplitView:
    """Open the samples of a split's tar files in their order; ids are file name and sample key."""
    from datasets import Image

    place = getattr(entry, split)
    shards = _shards(Path(place))
    origin = _origin(entry, place, shards)
    for shard in shards:
        with refused(str(shard)):
            _require_whole(shard)
    with refused(str(shards[0] if len(shards) == 1 else shards[0].parent)):
        rows = _load("webdataset", shards)
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


def _require_whole(shard: Path) -> None:
    """Raise if a tar file is damaged."""
    with tarfile.open(plain_file(shard)) as tar:
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


def _shards(place: Path) -> list[Path]:
    """List a tar file, the tar files of a folder, or those that match a pattern."""
    if place.is_file():
        return [place]
    files = sorted(place.glob("*.tar") if place.is_dir() else place.parent.glob(place.name))
    if not files:
        raise DataError(
            f"{place}: no tar files", hint="Give one, a folder, or a pattern such as train-*.tar."
        )
    return files


def _origin(entry: WebdatasetData, place: str, shards: list[Path]) -> str:
    """Return the origin of a split's tar files: the calibration samples' origin if the files are the same."""
    if place != entry.calibration:
        of_split = {file.resolve() for file in shards}
        other = {file.resolve() for file in _shards(Path(entry.calibration))}
        shared = sorted(file.name for file in of_split & other)
        if shared and of_split != other:
            raise DataError(
                f"{place}: files shared with calibration: {len(shared)}, such as {shared[0]}",
                hint="List different files, or the same ones in both splits, which then get different samples.",
            )
        place = entry.calibration if shared else place
    return str(Path(place).resolve())
