"""Which files a run consists of, and what its manifest says of each."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq

from driftlens.files import sha256_of
from driftlens.records.layout import VOLATILE
from driftlens.records.manifest import FileInfo


def run_files(folder: pathlib.Path) -> Iterator[str]:
    """Paths, relative to the run and with forward slashes, of all files that a manifest lists."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if relative.parts[0] not in VOLATILE and path.is_file():
            yield relative.as_posix()


def describe_file(path: pathlib.Path) -> FileInfo:
    """Digest, size and, of a table or an array, the number of rows of a file just written."""
    return FileInfo(sha256_of(path), path.stat().st_size, _rows(path))


def _rows(path: pathlib.Path) -> int | None:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    if path.suffix == ".npy":
        shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        return shape[0] if shape else None
    return None
