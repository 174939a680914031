"""Making room for a new run without ever removing what DriftLens did not write."""

from __future__ import annotations

import pathlib
import shutil

from driftlens.errors import RunError, SpecError
from driftlens.records.layout import ENTRIES, GUARD, LOCK, PARTIAL
from driftlens.records.manifest import read_manifest


def refuse_occupied(folder: pathlib.Path, *, force: bool) -> None:
    """Raise unless a new run may begin in `folder`; nothing is changed.

    Args:
        folder: where the run is to go; it need not exist.
        force: whether a run that is there may be replaced, and other files may stay beside the new one.

    Raises:
        SpecError: the folder is not empty and `force` is not given, or what is in the way is not a run.
    """
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file", hint="Give a folder that is new or empty.")
    there = {child.name for child in folder.iterdir()} - {LOCK, GUARD} if folder.exists() else set()
    if not there:
        return
    if not force:
        raise SpecError(
            f"{folder} is not empty", hint="Give another one, or --force to replace the run in it."
        )
    in_the_way = sorted(there.intersection(ENTRIES))
    if in_the_way and not _is_run(folder):
        raise SpecError(
            f"{folder} holds {in_the_way[0]}, but no run that could be replaced",
            hint="Give another folder, or remove what is in this one yourself.",
        )


def clear(folder: pathlib.Path) -> None:
    """Remove the run in `folder`; its lock and files of other names stay.

    Raises:
        RunError: something can't be removed.
    """
    for name in ENTRIES:
        if name not in (LOCK, GUARD):
            remove_tree(folder / name)


def remove_tree(entry: pathlib.Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there; of a link only the link.

    Raises:
        RunError: something can't be removed.
    """
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"can't remove {entry}: {error.strerror}", hint="Remove it, or give another folder."
        ) from error


def sweep(folder: pathlib.Path) -> None:
    """Remove the scratch folders that a killed writer left behind."""
    for scratch in folder.rglob(PARTIAL):
        shutil.rmtree(scratch, ignore_errors=True)


def _is_run(folder: pathlib.Path) -> bool:
    try:
        read_manifest(folder)
    except RunError:
        return False
    return True
