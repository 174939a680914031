"""Images with labels: folders of them, `.npz` arrays, a function of the user's."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from driftlens.data.sources import (
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
from driftlens.utils.distributed import Access
from driftlens.utils.errors import DataError
from driftlens.utils.files import plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from driftlens.config.data import ImageFolderData, NpzArrays, NpzData, PythonData


# Extensions of image files: the list of torchvision's ImageFolder.
SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
# Folders that operating systems add.
_LEFT_BEHIND = frozenset(["$RECYCLE.BIN", "@eaDir", "__MACOSX", "__pycache__", "lost+found"])


@data_sources.register("imagefolder")
def _open_image_folder(entry: ImageFolderData, split: Split, access: Access) -> SplitView:
    """Open the images of a split's folder, sorted by class and path; ids are paths relative to the folder.

    As in torchvision's ImageFolder, a class is a direct sub-folder with images at any depth. A class of calibration may
    have no test images. Images without class folders, or with those that the entry calls unlabelled, have no labels.
    """
    folder = Path(getattr(entry, split))
    images = sorted(_walk(folder))
    nested = [parts for parts in images if len(parts) > 1]
    is_labelled = bool(nested) and split not in entry.unlabelled
    if is_labelled and len(nested) < len(images):
        loose = next(parts for parts in images if len(parts) == 1)
        raise DataError(
            f"{folder}: images ({loose[0]}) next to class folders ({nested[0][0]})",
            hint="Move the images into class folders; if folders are not classes, set "
            f"`unlabelled: [{split}]`.",
        )
    classes = {parts[0] for parts in nested} if is_labelled else set()
    absent = _absent(entry, classes) if split == "test" and classes else []
    ids = tuple("/".join(parts) for parts in images)
    return SplitView(
        origin=str(folder.resolve()),
        ids=ids,
        class_names=tuple(sorted([*classes, *absent])) or None,
        label=lambda position: images[position][0] if is_labelled else None,
        read=lambda position: read_image(folder / ids[position]),
        notices=tuple(f"{folder}: no images of calibration's class {name!r}" for name in absent),
    )


def _absent(entry: ImageFolderData, classes: set[str]) -> list[str]:
    """Return classes that only calibration has; none where the test split has others, which may be misspelled."""
    if "calibration" in entry.unlabelled:
        return []
    place = Path(entry.calibration)
    names = {folder.name for folder in place.iterdir() if folder.is_dir() and not _is_hidden(folder.name)}
    return [name for name in names - classes if next(_walk(place / name), None)] if classes <= names else []


def _walk(top: Path) -> Iterator[tuple[str, ...]]:
    """Yield the path of every image below `top` in parts, so that sorting doesn't depend on the separator."""

    def fail(error: OSError) -> None:
        raise error

    # Not the builder `imagefolder` of `datasets`: it takes the innermost folder for the class, passes over linked
    # folders, and writes a table of all files first (of 50,000 images in 14 seconds instead of one).
    for current, folders, files in os.walk(top, onerror=fail, followlinks=True):
        # In place, because `os.walk` descends into what is left in the list.
        folders[:] = [name for name in folders if not _is_hidden(name)]
        parts = Path(current).relative_to(top).parts
        yield from ((*parts, name) for name in files if _is_image(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _LEFT_BEHIND


def _is_image(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def read_image(source: Path | BinaryIO, where: str = "") -> Image:
    """Return the image in a file, decoded, upright as its EXIF orientation says, in RGB without its alpha channel."""
    from PIL import Image
    from PIL.ImageOps import exif_transpose

    with (
        refused(f"{where or source}"),
        Image.open(plain_file(source) if isinstance(source, Path) else source) as image,
    ):
        # Pillow would start Ghostscript to read it.
        if image.format == "EPS":
            raise ValueError("PostScript is a program, which is not run")
        as_picture(image, f"{where or source}")
        return exif_transpose(image).convert("RGB")


@data_sources.register("npz")
def _open_npz(entry: NpzData, split: Split, access: Access) -> SplitView:
    """Open the images of one split: array `x_train` gives the ids `train/0`, `train/1` ...; `x` serves all splits.

    Labels are class names, or numbers that index the array `class_names`; without it, the numbers are the names.
    """
    arrays: NpzArrays | None = getattr(entry, split)
    file = Path((arrays and arrays.file) or entry.file or "")
    # Its stub wants an open file, which nothing would close where it is no archive.
    opened = np.lib.npyio.NpzFile(plain_file(file), allow_pickle=False)  # type: ignore[arg-type]
    with opened as archive:
        images, labels = (arrays.x, arrays.y) if arrays else _arrays(archive.files, split)
        pixels = archive[images]
        check_pixels(pixels.shape[1:], pixels.dtype, f"{file}, array {images}")
        names: list[str | None] = [None] * len(pixels)
        class_names = None
        if labels is not None:
            numbers = archive[labels]
            if numbers.shape != (len(pixels),):
                raise DataError(
                    f"{file}, array {labels}: shape {list(numbers.shape)} for {len(pixels)} images"
                )
            has_names = "class_names" in archive.files
            listed_names = tuple(_decoded_values(archive["class_names"])) if has_names else None
            names, class_names = named(_decoded_values(numbers), listed_names, f"{file}, array {labels}")
    prefix = images.removeprefix("x_")
    return SplitView(
        origin=f"{file.resolve()}[{images}]",
        ids=tuple(f"{prefix}/{row}" for row in range(len(pixels))),
        class_names=class_names,
        label=names.__getitem__,
        read=pixels.__getitem__,
    )


def _arrays(keys: Sequence[str], split: Split) -> tuple[str, str | None]:
    """Return the names of a split's image and label arrays (None: unlabelled)."""
    end = "_train" if split == "calibration" else "_test"
    if f"x{end}" not in keys and "x" in keys:
        end = ""
    return f"x{end}", f"y{end}" if f"y{end}" in keys else None


def _decoded_values(array: np.ndarray[Any, np.dtype[Any]]) -> list[Any]:
    """Return an array's values, bytes as text."""
    return [*(np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array).tolist()]


@data_sources.register("python")
def _open_python(entry: PythonData, split: Split, access: Access) -> SplitView:
    """Open the data that `package.module:function` returns for a split: (image, label) pairs with length and index.

    Images are PIL images or uint8 arrays. Labels are class names, numbers that index the attribute `class_names` or
    `classes`, or None. Ids are positions.
    """
    items, where = access.function(entry.target, "data source")(split), f"{entry.target}({split!r})"
    names = names_of(items)
    # A method, or text, of that name says nothing about classes.
    classes = tuple(map(str, names)) if isinstance(names, Iterable) and not isinstance(names, str) else None

    def pair(position: int) -> tuple[Any, Any]:
        item = items[position]
        if not isinstance(item, tuple) or len(item) != 2:
            raise DataError(
                f"{where}[{position}] is {type(item).__name__}, expected (image, label)",
                hint="Without labels, return (image, None).",
            )
        return item

    def label(position: int) -> str | None:
        of_sample = pair(position)[1]
        if of_sample is None or isinstance(of_sample, str):
            return of_sample
        return class_name(operator.index(of_sample), classes, f"{where}[{position}]")

    return SplitView(
        origin=where,
        ids=tuple(map(str, range(len(items)))),
        class_names=classes,
        label=label,
        read=lambda position: as_picture(pair(position)[0], f"{where}[{position}]"),
    )
