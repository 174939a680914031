"""Folders of images: one sub-folder per class, or images alone without labels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.base.files import plain_file
from driftlens.data.sources import PATHS_HINT, Split, SplitView, data_sources, refused

if TYPE_CHECKING:
    from PIL.Image import Image

    from driftlens.spec.data import ImageFolderData

SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
"""Endings of image files, in either case; the list of torchvision's ImageFolder."""


@data_sources.register("imagefolder")
def open_image_folder(entry: ImageFolderData, split: Split, access: Access) -> SplitView:
    """The images below a split's folder, sorted by class and path; ids are paths relative to that folder.

    As in torchvision's ImageFolder, a class is a direct sub-folder whose images may lie at any depth. Hidden
    files and folders are skipped. Images without class folders make an unlabelled split, and so does a split that the
    entry calls so, whose images may lie at any depth.
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
    paths = [(name, path) for name in classes for path in _images_of_class(folder, name)]
    paths = paths or [("", name) for name in loose]
    ids = tuple(path for _, path in paths)
    return SplitView(
        origin=str(folder.resolve()),
        ids=ids,
        class_names=tuple(classes) or None,
        label=lambda position: paths[position][0] or None,
        read=lambda position: read_image(folder / ids[position]),
    )


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the class folders and of the images directly in `folder`, each sorted."""
    with refused(f"{folder}: the image folder can't be listed", PATHS_HINT, OSError):
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    check_names(entry.name for entry in entries)
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    images = sorted(entry.name for entry in entries if entry.is_file() and _is_image(entry.name))
    return classes, images


def _images_of_class(folder: Path, name: str) -> list[str]:
    files = sorted(_walk(folder / name))
    if not files:
        raise DataError(
            f"{folder / name}: the class folder holds no images",
            hint=f"Add images of {name!r}, or remove the folder if it is no class.",
        )
    return ["/".join((name, *parts)) for parts in files]


def _walk(top: Path) -> Iterator[tuple[str, ...]]:
    """Path of every image below `top`, in parts, so that sorting doesn't depend on the separator."""
    for current, folders, files in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        images = [name for name in files if _is_image(name)]
        check_names([*folders, *images])
        parts = Path(current).relative_to(top).parts
        yield from ((*parts, name) for name in images)


def _is_image(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def check_names(names: Iterable[str]) -> None:
    """Refuse names of files that can't be written into a table."""
    for name in names:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"the file name {name!r} is not valid UTF-8", hint="Rename the file.") from None


def read_image(source: Path | BinaryIO, where: str = "", mode: str | None = "RGB") -> Image:
    """The image in a file, or in an open one that messages call `where`, fully decoded; without `mode` in its own."""
    from PIL import Image

    hint = "Replace the file, or take the image out."
    kinds = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    not_read = refused(f"{where or source}: the image can't be read", hint, *kinds)
    with not_read, Image.open(plain_file(source) if isinstance(source, Path) else source) as image:
        if image.format == "EPS":  # Pillow would start Ghostscript to read it
            raise ValueError("it is PostScript, a program that would have to be run")
        return image.convert(mode) if mode else image.copy()
