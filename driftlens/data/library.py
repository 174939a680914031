"""Data files: read by the library `datasets`, and described as spec entries.

Entry points: `read_rows` for one file, `read_shards` for tar files, `column_names` for the header, `data_entry` for
the spec entry, inferred from names of files, folders and columns.
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import tarfile
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from driftlens.data.images import SUFFIXES
from driftlens.data.sources import refused
from driftlens.utils.errors import DataError, SpecError
from driftlens.utils.files import entries, from_json, plain_file

PARQUET = (".parquet", ".pq")
# UTF-8, with or without a byte order mark.
UTF8 = "utf-8-sig"
# Bytes read of a first line for its column names: a file without line ends is not read whole.
_LONGEST_LINE = 1 << 20


def _separator_of(file: Path) -> str:
    """Return a tab for a name that ends in `.tsv`, else a comma."""
    return "\t" if file.suffix.lower() == ".tsv" else ","


def column_names(file: Path, encoding: str = UTF8, separator: str | None = None) -> list[str]:
    """List the column names of a CSV, TSV or Parquet file, or the keys of the first JSON line.

    Args:
        file: the file.
        encoding: of CSV files.
        separator: of CSV files.

    Raises:
        OSError, ValueError: the file can't be read or has no header.
    """
    if file.suffix.lower() in PARQUET:
        from pyarrow.parquet import read_schema

        return list(read_schema(plain_file(file)).names)
    with plain_file(file).open(encoding=encoding, newline="") as opened:
        if file.suffix.lower() == ".jsonl":
            return [*json.loads(opened.readline(_LONGEST_LINE))]
        return next(csv.reader(opened, delimiter=separator or _separator_of(file)), [])


def read_table(
    file: Path, selected: Collection[str | None], encoding: str | None = None, separator: str | None = None
) -> dict[str, list[Any]]:
    """Read the columns of a CSV, TSV or Parquet file by name; unwanted columns of Parquet files are empty.

    Args:
        file: its extension gives the format.
        selected: names of columns; others may be left out.
        encoding: of CSV files; None for UTF-8.
        separator: of CSV files; None for the extension's default.

    Raises:
        DataError: two columns have one name. The library's errors pass through.
    """
    encoding, separator = encoding or UTF8, separator or _separator_of(file)
    names = column_names(file, encoding, separator)
    if file.suffix.lower() in PARQUET:
        columns = [name for name in names if name in selected]
        read = read_rows("parquet", file, columns=columns)[:] if columns else {}
        return {name: [] for name in names} | dict(read)
    names = [name or f"column {place}" for place, name in enumerate(names)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{file}: several columns named {twice[0]!r}", hint="Rename all but one.")
    if not names:
        return {}
    from datasets import Features, Value

    # Cells stay text: `datasets` would turn 007 into 7, and NA into a missing value.
    settings = {"column_names": names, "header": 0, "index_col": False, "na_filter": False}
    text = Features({name: Value("string") for name in names})
    return dict(read_rows("csv", file, features=text, encoding=encoding, sep=separator, **settings)[:])


def read_rows(builder: str, file: Path, **options: Any) -> Any:
    """Return a `datasets.Dataset` of one file, in memory; nothing of it is left on disk.

    Args:
        builder: the library's name of the format: csv, parquet, text.
        file: a local file.
        options: settings of the builder.
    """
    with tempfile.TemporaryDirectory() as cache:
        return _load(builder, [file], cache_dir=cache, keep_in_memory=True, **options)


def read_shards(shards: Sequence[Path]) -> Any:
    """Return a `datasets.Dataset` of WebDataset tar files, whose content the library keeps in its cache."""
    for shard in shards:
        with refused(str(shard)):
            _require_whole(shard)
    with refused(str(shards[0] if len(shards) == 1 else shards[0].parent)):
        return _load("webdataset", shards)


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


def _load(builder: str, files: Sequence[Path], **options: Any) -> Any:
    import datasets

    # Otherwise every read of a local file contacts the Hub.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # The library reads `[` and `*` in paths as patterns.
    paths = [glob.escape(str(plain_file(file).resolve(strict=True))) for file in files]
    with quiet(), warnings.catch_warnings():
        # pandas cuts rows that are longer than the header, and warns.
        warnings.filterwarnings("error", message="Length of header or names")
        return datasets.load_dataset(builder, data_files={"train": paths}, split="train", **options)


@contextmanager
def quiet() -> Iterator[None]:
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


# Kinds of data by file extension.
ROWS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "table", ".tsv": "table", ".parquet": "table"}
# Common names of the splits for calibration and measurement.
SPLITS = (("train", "calibration"), ("test", "val", "validation"))

_TEXTS = ("input", "text", "prompt", "question", "instruction", "sentence", "query", "content")
_ANSWERS = ("target", "label", "answer", "output", "response", "completion")


def data_entry(place: Path, *, reads: str) -> dict[str, str]:
    """Infer the spec entry of the data at a place, for a model that `reads` text or image.

    One file, or one folder of images, serves all splits; sampling keeps them disjoint.

    Raises:
        SpecError: there is no known data.
    """
    if not place.exists():
        raise SpecError(f"--data: no file or folder {place}", hint="Check the path.")
    path = str(place.resolve())
    entry = _split_entry(place, path)
    if entry is None and place.is_file() and place.suffix.lower() in ROWS:
        entry = {"kind": ROWS[place.suffix.lower()], "calibration": path, "test": path}
    if entry is None and place.is_dir() and _holds_images(place):
        entry = {"kind": "imagefolder", "calibration": path, "test": path}
    if entry is None:
        raise SpecError(
            f"--data: unrecognized data format of {place}",
            hint=f"Give a file ({', '.join(ROWS)}), an image folder, or a folder with train and test. For other "
            "kinds write a spec: `driftlens init`, docs/data.md.",
        )
    is_rows = entry["kind"] in ("jsonl", "table", "hf")
    return {**entry, **_columns(place, entry)} if reads == "text" and is_rows else entry


def _columns(place: Path, entry: dict[str, str]) -> dict[str, str]:
    """Find the columns of texts and answers by common names."""
    file = Path(entry.get("test", ""))
    if entry["kind"] == "hf":
        file = place / entry["test"] / "dataset_info.json"
    names = columns_of(file)
    # The reader of the file reports that it is empty or broken.
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


def columns_of(file: Path) -> Sequence[str]:
    """List the columns, or the keys of the first row; empty if the file can't be read, which is reported later."""
    with suppress(OSError, ValueError, AttributeError, csv.Error):
        if file.name == "dataset_info.json":
            return [*from_json(plain_file(file).read_bytes())["features"]]
        return column_names(file)
    return []


def _holds_images(folder: Path) -> bool:
    """Return True if a folder or one of its folders contains images."""

    def some(places: Collection[Path]) -> bool:
        return any(place.suffix.lower() in SUFFIXES for place in places)

    inside = entries(folder)
    return some(inside) or any(some(entries(place)) for place in inside if place.is_dir())


def _split_entry(place: Path, name: str) -> dict[str, str] | None:
    """Infer the entry of a folder with splits, or of an archive of arrays, called `name`; None for others."""
    if place.suffix.lower() == ".npz":
        return {"kind": "npz", "file": name}
    splits = [_split(place, names) for names in SPLITS]
    if not place.is_dir() or None in splits:
        return None
    if (place / "dataset_dict.json").is_file():
        return {"kind": "hf", "path": name, "calibration": splits[0].name, "test": splits[1].name}
    kinds = {"imagefolder" if split.is_dir() else ROWS.get(split.suffix.lower(), "") for split in splits}
    kind = kinds.pop()
    if kinds or not kind:
        return None
    return {
        "kind": kind,
        **{key: f"{name}/{path.name}" for key, path in zip(("calibration", "test"), splits, strict=True)},
    }


def _split(folder: Path, names: Sequence[str]) -> Any:
    """Return the first entry of a folder with one of these names, ignoring extensions; None without."""
    there = {entry.stem.lower(): entry for entry in sorted(entries(folder), reverse=True)}
    return next((there[name] for name in names if name in there), None)
