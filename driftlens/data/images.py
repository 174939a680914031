"""Images with labels: folders of them, `.npz` arrays, a function of the user's."""

from __future__ import annotations

import functools
import operator
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.base.files import plain_file
from driftlens.base.words import some_of
from driftlens.data.sources import (
    PATHS_HINT,
    Split,
    SplitView,
    as_picture,
    check_pixels,
    class_name,
    data_sources,
    named,
    names_of,
    refused,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from driftlens.spec.data import ImageFolderData, NpzArrays, NpzData, PythonData


SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
"""Endings of image files, in either case; the list of torchvision's ImageFolder."""
_LEFT_BEHIND = frozenset(["$RECYCLE.BIN", "@eaDir", "__MACOSX", "__pycache__", "lost+found"])
"""Folders that systems put beside those of somebody's data."""


@data_sources.register("imagefolder")
def open_image_folder(entry: ImageFolderData, split: Split, access: Access) -> SplitView:
    """The images below a split's folder, sorted by class and path; ids are paths relative to that folder.

    As in torchvision's ImageFolder, a class is a direct sub-folder whose images may lie at any depth. Hidden files and
    folders are skipped, and what systems leave behind. A class may be empty in one split where another fills it, and
    the folder of one that calibration has may be missing in the test split. Images without class folders make an
    unlabelled split, and so does a split that the entry calls so, whose images may lie at any depth.
    """
    folder = Path(getattr(entry, split))
    classes, loose = _listing(folder)
    if split in entry.unlabelled:
        classes, loose = [], ["/".join(parts) for parts in sorted(_walk(folder))]
    if classes and loose:
        raise DataError(
            f"{folder}: holds images ({loose[0]}) beside class folders ({classes[0]})",
            hint="Move the images into class folders, or the folders elsewhere; where folders are no classes, set "
            f"`unlabelled: [{split}]`.",
        )
    if not classes and not loose:
        raise DataError(f"{folder}: no images", hint=f"Images end in {', '.join(sorted(SUFFIXES))}.")
    images = {name: _images_of_class(folder, name) for name in classes}
    empty = [name for name, there in images.items() if not there]
    _require_filled_elsewhere(entry, folder, empty)
    absent = _absent(entry, classes) if split == "test" and classes else []
    paths = [(name, path) for name, there in images.items() for path in there] or [
        ("", name) for name in loose
    ]
    ids = tuple(path for _, path in paths)
    return SplitView(
        origin=str(folder.resolve()),
        ids=ids,
        class_names=tuple(sorted([*classes, *absent])) or None,
        label=lambda position: paths[position][0] or None,
        read=lambda position: read_image(folder / ids[position]),
        notices=(
            *(_no_images(folder / name) for name in empty),
            *(f"{folder}: there is no class folder {name!r}, which calibration has" for name in absent),
        ),
    )


def _absent(entry: ImageFolderData, classes: list[str]) -> list[str]:
    """Classes that calibration has and the test split lacks; none where that has others, which may be misspelled."""
    if "calibration" in entry.unlabelled:
        return []
    place = Path(entry.calibration)
    names = _listing(place)[0]
    lacking = [name for name in names if name not in classes] if {*classes} <= {*names} else []
    return [name for name in lacking if _images_of_class(place, name)]


def _require_filled_elsewhere(entry: ImageFolderData, folder: Path, empty: Iterable[str]) -> None:
    """Refuse a folder without images that no other split of its task fills."""
    splits: tuple[Split, ...] = ("calibration", "test", "diagnosis")
    places = [getattr(entry, split) for split in splits if split not in entry.unlabelled]
    for name in empty:
        if not any(_images_of_class(Path(place), name) for place in places if place is not None):
            raise DataError(
                _no_images(folder / name),
                hint=f"Add images of {name!r}, or remove the folder if it is no class; images end in "
                f"{', '.join(sorted(SUFFIXES))}.",
            )


def _no_images(folder: Path) -> str:
    """What is said of a class folder without images, with what its files are instead."""
    names = (Path(name) for _, _, files in os.walk(folder) for name in files)
    endings = sorted({name.suffix.lower() for name in names if not _is_hidden(name.name)} - {""})
    others = f", but files that end in {some_of(endings)}" if endings else ""
    return f"{folder}: the class folder holds no images{others}"


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the class folders and of the images directly in `folder`, each sorted."""
    with refused(f"{folder}: the image folder can't be listed", PATHS_HINT, OSError):
        entries = [entry for entry in os.scandir(folder) if not _is_hidden(entry.name)]
    check_names(entry.name for entry in entries)
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    images = sorted(entry.name for entry in entries if entry.is_file() and _is_image(entry.name))
    return classes, images


def _images_of_class(folder: Path, name: str) -> list[str]:
    return ["/".join((name, *parts)) for parts in sorted(_walk(folder / name))]


def _walk(top: Path) -> Iterator[tuple[str, ...]]:
    """Path of every image below `top`, in parts, so that sorting doesn't depend on the separator."""
    # Not the builder `imagefolder` of `datasets`: it takes the innermost folder for the class, passes over linked
    # folders, and writes a table of all files first (of 50,000 images in 14 seconds instead of one).
    for current, folders, files in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        images = [name for name in files if _is_image(name)]
        check_names([*folders, *images])
        parts = Path(current).relative_to(top).parts
        yield from ((*parts, name) for name in images)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _LEFT_BEHIND


def _is_image(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def check_names(names: Iterable[str]) -> None:
    """Refuse names of files that can't be written into a table."""
    for name in names:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"the file name {name!r} is not valid UTF-8", hint="Rename the file.") from None


def read_image(source: Path | BinaryIO, where: str = "") -> Image:
    """Return the image in a file, decoded, upright as its EXIF orientation says, in RGB without its alpha channel.

    Args:
        source: a path, or an open file.
        where: what messages call an open file.
    """
    from PIL import Image
    from PIL.ImageOps import exif_transpose

    hint = "Replace the file, or take the image out."
    kinds = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    not_read = refused(f"{where or source}: the image can't be read", hint, *kinds)
    with not_read, Image.open(plain_file(source) if isinstance(source, Path) else source) as image:
        if image.format == "EPS":  # Pillow would start Ghostscript to read it
            raise ValueError("it is PostScript, a program that would have to be run")
        as_picture(image, f"{where or source}")
        return exif_transpose(image).convert("RGB")


Array = np.ndarray[Any, np.dtype[Any]]


@data_sources.register("npz")
def open_npz(entry: NpzData, split: Split, access: Access) -> SplitView:
    """The images of one split; array `x_train` gives the ids `train/0`, `train/1` ...; `x` is of all splits.

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
    end = "_train" if split == "calibration" else "_test"
    if f"x{end}" not in file.keys and "x" in file.keys:
        end = ""
    return file, f"x{end}", f"y{end}" if f"y{end}" in file.keys else None


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
                hint="Call the images x (and their labels y), or x_train and x_test; or name the arrays in the spec: "
                "`calibration: {x: KEY, y: KEY}`, and likewise for test.",
            )
        try:
            yield
        except Exception as error:  # encryption, odd compression, names that differ: zip files have many ways
            hint = "Write the file anew with numpy.savez."
            if "allow_pickle" in str(error):
                hint = "Object arrays are pickles and never read; store text as numpy.array(list_of_names)."
            raise DataError(f"{self.path}, array {key}: can't be read: {error}", hint=hint) from error


DEBUG_HINT = "The traceback is shown with --debug."


@data_sources.register("python")
def open_python(entry: PythonData, split: Split, access: Access) -> SplitView:
    """What `package.module:function` returns for a split: (image, label) pairs, with a length and an index.

    A data set of torchvision is one. Images are PIL images or uint8 arrays. Labels are class names, numbers that
    index the attribute `class_names` or `classes` of what was returned, or None. Ids are positions.
    """
    function, where = access.function(entry.target, "data source"), f"{entry.target}({split!r})"
    with refused(f"{where} failed", DEBUG_HINT):
        items = function(split)
    names = _classes_of(items, where)
    return SplitView(
        origin=where,
        ids=tuple(str(position) for position in range(_length(items, where))),
        class_names=names,
        label=lambda position: _label_of(_item(items, position, where)[1], names, f"{where}[{position}]"),
        read=lambda position: as_picture(_item(items, position, where)[0], f"{where}[{position}]"),
    )


def _length(items: Any, where: str) -> int:
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise DataError(
            f"{where} returned {type(items).__name__}, expected something with a length and an index",
            hint="Return a list of (image, label) pairs, or a map-style data set.",
        )
    if not len(items):
        raise DataError(f"{where} returned no samples", hint="Return at least one (image, label) pair.")
    return len(items)


def _classes_of(items: Any, where: str) -> tuple[str, ...] | None:
    names = names_of(items)
    if not isinstance(names, Iterable):  # a method or a number of that name says nothing about classes
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: the class names are {names!r}", hint="Make them a list of text.")
    return tuple(names)


def _item(items: Any, position: int, where: str) -> tuple[Any, Any]:
    with refused(f"{where}[{position}] failed", DEBUG_HINT):
        item = items[position]
    if not isinstance(item, tuple) or len(item) != 2:
        raise DataError(
            f"{where}[{position}] is {type(item).__name__}, expected a pair (image, label)",
            hint="Without labels, return (image, None).",
        )
    return item


def _label_of(label: Any, names: tuple[str, ...] | None, where: str) -> str | None:
    if label is None or isinstance(label, str):
        return label
    if not hasattr(label, "__index__") or isinstance(label, bool):
        raise DataError(
            f"{where}: the label {label!r} is neither text nor a whole number", hint="Return class names."
        )
    return class_name(operator.index(label), names, where)
