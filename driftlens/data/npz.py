"""Images and labels as arrays of an `.npz` file."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.base.files import plain_file
from driftlens.data.sources import PATHS_HINT, Split, SplitView, check_pixels, data_sources, named, refused

if TYPE_CHECKING:
    from driftlens.spec.data import NpzArrays, NpzData

Array = np.ndarray[Any, np.dtype[Any]]


@data_sources.register("npz")
def open_npz(entry: NpzData, split: Split, access: Access) -> SplitView:
    """The images of one split; array `x_train` gives the ids `train/0`, `train/1` and so on.

    Pixels are read from the file when the first image is asked for. Labels are class names, or numbers that
    index the array `class_names`; without that array the numbers themselves are the names.
    """
    file, images, labels = _arrays(entry, split)
    shape, dtype = file.header(images)
    where = f"{file.path}, array {images}"
    if shape[:1] == (0,):
        raise DataError(
            f"{where}: it is empty, no image at all", hint="Every task needs samples in each split."
        )
    if len(shape) < 3:
        raise DataError(
            f"{where}: shape {list(shape)}, expected [n, h, w, 3] or [n, h, w]", hint="One image per row."
        )
    check_pixels(shape[1:], dtype, where)
    names, class_names = _labels(file, labels, shape[0]) if labels else (None, None)
    prefix = images.removeprefix("x_")
    pixels = functools.cache(lambda: file.read(images))
    return SplitView(
        origin=f"{file.path.resolve()}[{images}]",
        ids=tuple(f"{prefix}/{row}" for row in range(shape[0])),
        class_names=class_names,
        label=lambda position: names[position] if names else None,
        read=lambda position: pixels()[position],
    )


def _arrays(entry: NpzData, split: Split) -> tuple[_File, str, str | None]:
    """The file of a split and the names of its image and label arrays (None: unlabelled)."""
    arrays: NpzArrays | None = getattr(entry, split)
    path = (arrays and arrays.file) or entry.file
    assert path is not None  # the spec refuses entries without a file
    file = _File(Path(path))
    if arrays is not None:
        return file, arrays.x, arrays.y
    part = "train" if split == "calibration" else "test"
    return file, f"x_{part}", f"y_{part}" if f"y_{part}" in file.keys else None


def _labels(file: _File, key: str, count: int) -> tuple[list[str | None], tuple[str, ...] | None]:
    """Class name per sample, and all class names."""
    labels = file.read(key)
    where = f"{file.path}, array {key}"
    if labels.shape != (count,):
        raise DataError(
            f"{where}: shape {list(labels.shape)} for {count} images", hint="One label per image: shape [n]."
        )
    if labels.dtype.kind not in "iuUS":
        raise DataError(
            f"{where}: labels are {labels.dtype}, expected whole numbers or text", hint="Cast the labels."
        )
    values = labels.tolist() if labels.dtype.kind in "iu" else _texts(labels, where)
    return named(values, _class_names(file), where)


def _class_names(file: _File) -> tuple[str, ...] | None:
    if "class_names" not in file.keys:
        return None
    names = file.read("class_names")
    where = f"{file.path}, array class_names"
    if names.ndim != 1 or names.dtype.kind not in "US" or not len(names):
        raise DataError(f"{where}: expected a list of text", hint="Store it as numpy.array(list_of_names).")
    texts = tuple(_texts(names, where))
    if len(set(texts)) < len(texts):
        raise DataError(f"{where}: a name occurs more than once", hint="Each class needs a name of its own.")
    return texts


def _texts(array: Array, where: str) -> list[str]:
    try:
        return [str(text) for text in (np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array)]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text", hint="Store names as text, not as bytes.") from error


@dataclass(frozen=True)
class _File:
    """An `.npz` file, of which only what is asked for is read."""

    path: Path

    @functools.cached_property
    def keys(self) -> list[str]:
        hint = "Write it anew with numpy.savez."
        kinds = (zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError)
        no_zip = refused(f"{self.path}: not an .npz file, or cut short", hint, *kinds)
        unreadable = refused(f"{self.path}: can't be read", PATHS_HINT, OSError)
        with unreadable, no_zip, zipfile.ZipFile(plain_file(self.path)) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]

    def header(self, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of an array, without its contents."""
        form = np.lib.format
        with self._reading(key), zipfile.ZipFile(self.path) as archive, archive.open(f"{key}.npy") as stream:
            is_first = form.read_magic(stream) == (1, 0)
            read = form.read_array_header_1_0 if is_first else form.read_array_header_2_0
            shape, _, dtype = read(stream)
            return shape, dtype

    def read(self, key: str) -> Array:
        """An array with its contents."""
        with self._reading(key), np.load(self.path, allow_pickle=False) as archive:
            return np.asarray(archive[key])

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        if key not in self.keys:
            raise DataError(
                f"{self.path}: no array {key}; there are {', '.join(self.keys)}",
                hint="Name the arrays in the spec: `calibration: {x: KEY, y: KEY}`, and likewise for test.",
            )
        try:
            yield
        except Exception as error:  # encryption, odd compression, names that differ: zip files have many ways
            hint = "Write the file anew with numpy.savez."
            if "allow_pickle" in str(error):
                hint = "Object arrays are pickles and never read; store text as numpy.array(list_of_names)."
            raise DataError(f"{self.path}, array {key}: can't be read: {error}", hint=hint) from error
