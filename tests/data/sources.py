"""Small data sources on disk, and short ways to open them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from driftlens.config.data import TaskData as TaskEntry
from driftlens.config.spec import load_spec
from driftlens.data.sources import Split, SplitView, open_split
from driftlens.utils.distributed import Permissions


def entry_of(**values: Any) -> TaskEntry:
    """One task's entry of a spec's `data` section, checked as in a file."""
    spec = load_spec(
        {
            "version": 1,
            "architecture": {"loader": "open-clip", "source": "any"},
            "merged": {"weights": "org/merged"},
            "experts": {"task": {"weights": "org/expert"}},
            "data": {"task": values},
        }
    )
    return spec.data.tasks["task"]


def opened(split: Split = "test", *, trust: bool = False, offline: bool = False, **values: Any) -> SplitView:
    """One split of a source."""
    return open_split(entry_of(**values), split, Permissions(trust=trust, offline=offline))


def images(split: Split = "test", **values: Any) -> SplitView:
    """One split of a source of images."""
    view = opened(split, **values)
    assert view.holds == "image"
    return view


def colour(shade: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A 4 x 6 image, every pixel (shade, 0, 255)."""
    return np.tile(np.array([shade, 0, 255], dtype=np.uint8), (4, 6, 1))


def encoded(shade: int, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(colour(shade)).save(stream, form)
    return stream.getvalue()


DEEP = [("uint16", "TIFF"), ("uint16", "PNG"), (">u2", "TIFF"), ("int32", "TIFF"), ("float32", "TIFF")]
"""Kinds of samples beyond a byte and formats that keep them."""


def deep(kind: str, form: str) -> bytes:
    """A grey image of such samples, which `convert("RGB")` would make white or black."""
    stream = io.BytesIO()
    Image.fromarray(np.linspace(256, 9000, 24).reshape(4, 6).astype(kind)).save(stream, form)
    return stream.getvalue()


def shard(file: Path, members: Mapping[str, bytes], *extra: tarfile.TarInfo) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in extra:
            tar.addfile(info)
    return str(file)


def write_images(folder: Path, files: Mapping[str, int]) -> Path:
    """Lossless images below `folder`: relative path -> shade."""
    for name, shade in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colour(shade)).save(path)
    return folder


def labels_of(view: SplitView) -> list[str | None]:
    return [view.label(position) for position in range(len(view))]


def shades(pictures: Sequence[Any]) -> list[int]:
    """The red of the first pixel of each picture."""
    return [int(np.asarray(picture)[0, 0, 0]) for picture in pictures]
