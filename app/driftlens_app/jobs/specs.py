"""The spec files that a job may read: under the root, of a sane size, found by looking and not by typing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from driftlens.errors import SpecError
from driftlens.records.layout import MANIFEST
from driftlens_app.inside import is_inside, require_root

_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 1_000_000
_MOST_FILES = 200


def spec_files(root: Path) -> list[str]:
    """Paths, relative to the root, of the YAML files in it and in its folders; a run's own spec is none of them.

    Raises:
        RunError: the root is gone.
    """
    require_root(root)
    found = sorted(
        file.relative_to(root).as_posix() for file in _candidates(root) if _may_be_read(root, file)
    )
    return found[:_MOST_FILES]


def spec_file(root: Path, relative: str) -> Path:
    """The spec file at `relative`, checked again: what a browser sends may be anything.

    Raises:
        SpecError: it is not one of `spec_files`.
        RunError: the root is gone.
    """
    if relative not in spec_files(root):
        raise SpecError(f"no spec {relative!r} is in this folder any more", hint="Choose one from the list.")
    return root / relative


def _candidates(root: Path) -> Iterator[Path]:
    for folder in (root, *(child for child in _entries(root) if child.is_dir())):
        if not folder.name.startswith(".") and not (folder / MANIFEST).exists() and is_inside(folder, root):
            yield from (file for file in _entries(folder) if file.suffix.lower() in _SUFFIXES)


def _entries(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except OSError:  # removed a moment ago, or not ours to look into
        return []


def _may_be_read(root: Path, file: Path) -> bool:
    return file.is_file() and is_inside(file, root) and file.stat().st_size <= _MOST_BYTES
