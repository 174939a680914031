"""Which files a run consists of, and what its manifest says of each."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq

from driftlens.errors import RunError
from driftlens.files import sha256_of
from driftlens.records.layout import VOLATILE
from driftlens.records.manifest import FileInfo, Manifest


def run_files(folder: pathlib.Path) -> Iterator[str]:
    """Paths, relative to the run and with forward slashes, of all files that a manifest lists."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if relative.parts[0] not in VOLATILE and path.is_file():
            yield relative.as_posix()


def describe_file(path: pathlib.Path) -> FileInfo:
    """Digest, size and, of a table or an array, the number of rows of a file just written."""
    return FileInfo(sha256_of(path), path.stat().st_size, _rows(path))


def is_as_described(path: pathlib.Path, described: FileInfo) -> bool:
    """Whether a file that is there has the size and digest that a manifest gives it.

    Raises:
        RunError: it can't be read.
    """
    try:
        return path.stat().st_size == described.bytes and sha256_of(path) == described.sha256
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}", hint="Check its permissions.") from error


def settled(folder: pathlib.Path, manifest: Manifest) -> dict[str, FileInfo]:
    """The files of a manifest, where those that a writer was replacing when it died are what they are now.

    A file that is neither the old nor the new one keeps its old entry: `verify` is to find it.

    Raises:
        RunError: a file can't be read.
    """
    landed = {
        name: new
        for name, new in manifest.rewriting.items()
        if (folder / name).is_file() and is_as_described(folder / name, new)
    }
    return {**manifest.files, **landed}


def _rows(path: pathlib.Path) -> int | None:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    if path.suffix == ".npy":
        shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        return shape[0] if shape else None
    return None
