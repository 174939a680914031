"""Data sources: functions, registered under a `kind`, that list a split's samples unread; the sources of images."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np

from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError, DriftLensError, did_you_mean
from driftlens.utils.files import regular_file
from driftlens.utils.registry import Registry

if TYPE_CHECKING:
    from PIL.Image import Image

    from driftlens.config.data import ImageFolderData, NpzArrays, NpzData, PythonData

    Picture: TypeAlias = Image | np.ndarray[Any, np.dtype[np.uint8]]
else:
    Picture: TypeAlias = Any

Split: TypeAlias = Literal["calibration", "diagnosis", "test"]


class RelatedTexts(NamedTuple):
    """The texts that a text is compared with: the other text of a pair, or positives and negatives of a query."""

    pair: str = ""
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitView:
    """The samples of one split of a data set, in a fixed order, each read when requested.

    Attributes:
        origin: the place, for messages; equal origins mean the same samples under the same ids.
        ids: one identifier per sample (path, `test/17`, row index, line number).
        read: position -> the image (PIL, or a uint8 array), or the pair of texts (input, target).
        holds: kind of samples, `image` or `text`; a model reads one of them (`models.chain.Modality`).
    """

    origin: str
    ids: tuple[str, ...]
    class_names: tuple[str, ...] | None
    label: Callable[[int], str | None]
    read: Callable[[int], Any]
    holds: str = "image"
    notices: tuple[str, ...] = ()
    related: Callable[[int], RelatedTexts] | None = None

    def __len__(self) -> int:
        return len(self.ids)


# (the task's entry in the spec, split, access) -> samples of the split.
DataSource = Callable[[Any, Split, Permissions], SplitView]

data_sources: Registry[DataSource] = Registry("data source", "driftlens.data", "driftlens.data_sources")

BYTES_REMEDY = (
    "Convert all images to uint8 by one rule: (255 * x).round().astype('uint8') for values in [0, 1], "
    "(x / 257).round().astype('uint8') for 16 bits."
)


@contextmanager
def wrap_read_errors(where: str) -> Iterator[None]:
    """Convert a library's error in the block to a `DataError` that names the file or sample."""
    try:
        yield
    except DriftLensError:
        raise
    except Exception as error:
        # `datasets` wraps the errors of its readers.
        cause = error.__cause__ or error
        words = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
        hint = "Check the file; docs/data.md describes each kind of data."
        if isinstance(cause, FileNotFoundError):
            hint = "Paths are relative to the spec's folder."
        if isinstance(cause, UnicodeError):
            hint = "Save it as UTF-8; for Excel's CSV files set `encoding: cp1252` or `encoding: utf-16`."
        raise DataError(f"{where}: can't be read: {words}", hint=hint) from error


def open_split(entry: Any, split: Split, access: Permissions) -> SplitView:
    """Open one split of a task's data; raise a `DataError` if it can't be read, now or later, or has no samples."""
    places = (getattr(entry, name, None) for name in ("path", "file", "target", split))
    place = ", ".join(value for value in places if isinstance(value, str)) or entry.kind
    with wrap_read_errors(place):
        view = data_sources[entry.kind](entry, split, access)
        # File names that are not valid text can't be written into tables.
        "".join(view.ids).encode()
    if not view.ids:
        raise DataError(f"{place}: no samples", hint="Each split needs samples.")
    if len({*view.ids}) < len(view.ids):
        twice = next(name for name, count in Counter(view.ids).items() if count > 1)
        raise DataError(f"{place}: {twice} occurs more than once", hint="List every sample once.")

    # Samples are read later, where a damaged one would otherwise be reported without its place.
    def ask_about_sample(position: int, ask: Callable[[int], Any]) -> Any:
        with wrap_read_errors(f"{place}, {view.ids[position]}"):
            return ask(position)

    return replace(
        view, label=partial(ask_about_sample, ask=view.label), read=partial(ask_about_sample, ask=view.read)
    )


def _require_byte_pixels(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    """Refuse image arrays other than uint8 grey [h, w] or colour [h, w, 3]."""
    if dtype != np.uint8:
        raise DataError(f"{where}: pixels are {dtype}, expected uint8", hint=BYTES_REMEDY)
    if len(shape) != 2 and not (len(shape) == 3 and shape[2] == 3):
        raise DataError(
            f"{where}: images have shape {list(shape)}, expected [h, w, 3] or [h, w]",
            hint="Put channels last, and remove others.",
        )


def _require_byte_image(value: Any, where: str) -> Picture:
    """Return a PIL image of at most 8 bits per channel or a uint8 array unchanged; refuse others."""
    from PIL import Image, ImageMode

    # The white level of 16 or 32 bits and of floats is unknown, and Pillow would clip at 255.
    if isinstance(value, Image.Image):
        kind = np.dtype(ImageMode.getmode(value.mode).typestr)
        if kind.itemsize > 1:
            raise DataError(
                f"{where}: pixels are {kind.newbyteorder('=')} (Pillow's mode {value.mode}), expected 8 bits a channel",
                hint=BYTES_REMEDY,
            )
        return value
    if isinstance(value, np.ndarray):
        _require_byte_pixels(value.shape, value.dtype, where)
        return value
    raise DataError(f"{where}: expected a PIL image or a uint8 array, got {type(value).__name__}", hint=BYTES_REMEDY)


def label_to_class(label: int | str, classes: Sequence[str] | None, where: str) -> str:
    """Return the class name of a label, which is a name or an index into the class names."""
    if isinstance(label, str):
        return label
    if classes is None:
        return str(label)
    if not 0 <= label < len(classes):
        raise DataError(
            f"{where}: label {label} is outside 0 to {len(classes) - 1}", hint="Labels index the class names, from 0."
        )
    return classes[label]


def resolve_labels(
    labels: Sequence[int | str | None], classes: tuple[str, ...] | None, where: str
) -> tuple[list[str | None], tuple[str, ...] | None]:
    """Return the class name of every sample, and all class names: the given ones, or those that occur, sorted.

    Numbers may be written as text. They index the known names, unless they are all names themselves.
    """
    odd = [label for label in labels if not isinstance(label, int | str | None)]
    if odd:
        raise DataError(f"{where}: label {str(odd[0])[:40]!r} is neither text nor an integer")
    if classes is not None and len({*classes}) < len(classes):
        raise DataError(f"{where}: class names occur more than once: {', '.join(classes)}")
    present = {label for label in labels if label is not None}
    # CSV files hold numbers as text.
    are_numbers = all(isinstance(label, int) or label.isdecimal() for label in present)
    if classes is not None and are_numbers and not present <= set(classes):
        labels = [None if label is None else int(label) for label in labels]
    names = [
        None if label is None else label_to_class(label, classes, f"{where}, sample {row}")
        for row, label in enumerate(labels)
    ]
    in_order = sorted(present, key=lambda label: (int(label) if are_numbers else 0, str(label)))
    return names, classes or tuple(map(str, in_order)) or None


def entry_class_names(stated: Sequence[str] | str | bool | None) -> tuple[str, ...] | None:
    """Return the class names that a spec entry lists or that its JSON file contains; None if it has none."""
    from driftlens.models.heads import class_names

    return None if stated is None or isinstance(stated, bool) else class_names(stated)


def find_class_names(samples: Any) -> Any:
    """Return `class_names` or `classes` of a data set or of the one that it wraps; None if it has neither."""
    owners = (samples, getattr(samples, "dataset", None))
    candidates = (getattr(owner, name, None) for owner in owners for name in ("class_names", "classes"))
    names = next((candidate for candidate in candidates if candidate is not None), None)
    if not isinstance(names, list | tuple):
        return names
    # torchvision's ImageNet has a tuple of words for a class.
    return [", ".join(name) if isinstance(name, tuple) else name for name in names]


def require_column(column: str, columns: Collection[str], key: str, where: str) -> None:
    """Raise an error if the column that the spec's `key` names is not among `columns`."""
    if column not in columns:
        way = "In `prompt`, write {COLUMN}." if key == "prompt" else f"Set `{key}: COLUMN`."
        raise DataError(
            f"{where}: no column {column!r}; columns are {', '.join(columns)}",
            hint=f"{did_you_mean(column, columns)} {way}".lstrip(),
        )


# Extensions of image files: the list of torchvision's ImageFolder.
SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
# Folders that operating systems add.
_LEFT_BEHIND = frozenset(["$RECYCLE.BIN", "@eaDir", "__MACOSX", "__pycache__", "lost+found"])


@data_sources.register("imagefolder")
def _open_image_folder(entry: ImageFolderData, split: Split, access: Permissions) -> SplitView:
    """Open the images of a split's folder, sorted by class and path; ids are paths relative to the folder.

    As in torchvision's ImageFolder, a class is a direct sub-folder with images at any depth. Images without class
    folders, or with those that the entry calls unlabelled, have no labels.
    """
    folder = Path(getattr(entry, split))
    images = sorted(_image_paths(folder))
    nested = [parts for parts in images if len(parts) > 1]
    is_labelled = bool(nested) and split not in entry.unlabelled
    if is_labelled and len(nested) < len(images):
        loose = next(parts for parts in images if len(parts) == 1)
        raise DataError(
            f"{folder}: images ({loose[0]}) next to class folders ({nested[0][0]})",
            hint=f"Move the images into class folders; if folders are not classes, set `unlabelled: [{split}]`.",
        )
    classes = {parts[0] for parts in nested} if is_labelled else set()
    absent = _classes_without_test_images(entry, classes) if split == "test" and classes else []
    ids = tuple("/".join(parts) for parts in images)
    return SplitView(
        origin=str(folder.resolve()),
        ids=ids,
        class_names=tuple(sorted([*classes, *absent])) or None,
        label=lambda position: images[position][0] if is_labelled else None,
        read=lambda position: read_image(folder / ids[position]),
        notices=tuple(f"{folder}: no images of calibration's class {name!r}" for name in absent),
    )


def _classes_without_test_images(entry: ImageFolderData, classes: set[str]) -> list[str]:
    """Return classes with only calibration images; none if the test split has further classes, perhaps misspelled."""
    if "calibration" in entry.unlabelled:
        return []
    place = Path(entry.calibration)
    names = {folder.name for folder in place.iterdir() if folder.is_dir() and not _is_hidden(folder.name)}
    return [name for name in names - classes if next(_image_paths(place / name), None)] if classes <= names else []


def _image_paths(top: Path) -> Iterator[tuple[str, ...]]:
    """Yield the path of every image below `top` as a tuple of its parts."""

    def raise_error(error: OSError) -> None:
        raise error

    # Not the builder `imagefolder` of `datasets`: it takes the innermost folder for the class, passes over linked
    # folders, and writes a table of all files first (of 50,000 images in 14 seconds instead of one).
    for current, folders, files in os.walk(top, onerror=raise_error, followlinks=True):
        # In place, because `os.walk` descends into what is left in the list.
        folders[:] = [name for name in folders if not _is_hidden(name)]
        parts = Path(current).relative_to(top).parts
        yield from ((*parts, name) for name in files if Path(name).suffix.lower() in SUFFIXES and name[0] != ".")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _LEFT_BEHIND


def read_image(source: Path | BinaryIO, where: str = "") -> Image:
    """Read an image file as RGB, rotated by its EXIF orientation and without alpha channel."""
    from PIL import Image
    from PIL.ImageOps import exif_transpose

    with (
        wrap_read_errors(f"{where or source}"),
        Image.open(regular_file(source) if isinstance(source, Path) else source) as image,
    ):
        # Pillow would start Ghostscript to read it.
        if image.format == "EPS":
            raise ValueError("PostScript is a program, which is not run")
        _require_byte_image(image, f"{where or source}")
        return exif_transpose(image).convert("RGB")


@data_sources.register("npz")
def _open_npz(entry: NpzData, split: Split, access: Permissions) -> SplitView:
    """Open the images of one split of an `.npz` file; ids are `train/0`, `train/1`, ... for array `x_train`.

    Labels are class names, or numbers that index the array `class_names`; without it, the numbers are the names.
    """
    arrays: NpzArrays | None = getattr(entry, split)
    file = Path((arrays and arrays.file) or entry.file or "")
    # Its stub wants an open file, which nothing would close where it is no archive.
    opened = np.lib.npyio.NpzFile(regular_file(file), allow_pickle=False)  # type: ignore[arg-type]
    with opened as archive:
        images, labels = (arrays.x, arrays.y) if arrays else _split_array_names(archive.files, split)
        pixels = archive[images]
        _require_byte_pixels(pixels.shape[1:], pixels.dtype, f"{file}, array {images}")
        names: list[str | None] = [None] * len(pixels)
        class_names = None
        if labels is not None:
            numbers = archive[labels]
            if numbers.shape != (len(pixels),):
                raise DataError(f"{file}, array {labels}: shape {list(numbers.shape)} for {len(pixels)} images")
            has_names = "class_names" in archive.files
            listed_names = tuple(_decoded_values(archive["class_names"])) if has_names else None
            names, class_names = resolve_labels(_decoded_values(numbers), listed_names, f"{file}, array {labels}")
    return SplitView(
        origin=f"{file.resolve()}[{images}]",
        ids=tuple(f"{images.removeprefix('x_')}/{row}" for row in range(len(pixels))),
        class_names=class_names,
        label=names.__getitem__,
        read=pixels.__getitem__,
    )


def _split_array_names(keys: Sequence[str], split: Split) -> tuple[str, str | None]:
    """Return the names of a split's image and label arrays in an `.npz` file; None for missing labels."""
    end = "_train" if split == "calibration" else "_test"
    if f"x{end}" not in keys and "x" in keys:
        end = ""
    return f"x{end}", f"y{end}" if f"y{end}" in keys else None


def _decoded_values(array: np.ndarray[Any, np.dtype[Any]]) -> list[Any]:
    """Return an array's values as a list, with bytes decoded to text."""
    return [*(np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array).tolist()]


@data_sources.register("python")
def _open_python(entry: PythonData, split: Split, access: Permissions) -> SplitView:
    """Open the (image, label) pairs that the user's `package.module:function` returns for a split.

    Labels are class names, numbers that index the attribute `class_names` or `classes`, or None.
    """
    items, where = access.import_function(entry.target, "data source")(split), f"{entry.target}({split!r})"
    names = find_class_names(items)
    # A method, or text, of that name says nothing about classes.
    classes = tuple(map(str, names)) if isinstance(names, Iterable) and not isinstance(names, str) else None

    def image_and_label(position: int) -> tuple[Any, Any]:
        item = items[position]
        if not isinstance(item, tuple) or len(item) != 2:
            raise DataError(
                f"{where}[{position}] is {type(item).__name__}, expected (image, label)",
                hint="Without labels, return (image, None).",
            )
        return item

    def label_of_item(position: int) -> str | None:
        of_sample = image_and_label(position)[1]
        if of_sample is None or isinstance(of_sample, str):
            return of_sample
        return label_to_class(operator.index(of_sample), classes, f"{where}[{position}]")

    return SplitView(
        origin=where,
        ids=tuple(map(str, range(len(items)))),
        class_names=classes,
        label=label_of_item,
        read=lambda position: _require_byte_image(image_and_label(position)[0], f"{where}[{position}]"),
    )
