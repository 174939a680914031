"""What becomes of whole runs: another name, or another place. Nothing of a run is ever erased here."""

from __future__ import annotations

import os
import pathlib
from dataclasses import replace

from driftlens.base.errors import RunError
from driftlens.runs.manifest import read_manifest, write_manifest
from driftlens.runs.status import RunLock

LONGEST_NAME = 120
"""Characters of a run's name."""


def rename(folder: pathlib.Path, name: str) -> None:
    """Call the run in `folder` otherwise; its id, by which links and other runs know it, stays."""
    wanted = " ".join(name.split())
    if not wanted or len(wanted) > LONGEST_NAME or not wanted.isprintable():
        raise RunError(
            f"a run can't be called {name!r}",
            hint=f"Use 1 to {LONGEST_NAME} printable characters on one line.",
        )
    with RunLock(folder):
        write_manifest(folder, replace(read_manifest(folder), name=wanted))


def set_aside(folder: pathlib.Path, into: pathlib.Path) -> pathlib.Path:
    """Move a run into another folder of the same disk, which is made where it isn't there; returns where it is now."""
    with RunLock(folder):
        pass  # nobody is at work; the lock's own file moves along
    try:
        into.mkdir(exist_ok=True)
        names = (f"{folder.name}-{number}" if number else folder.name for number in range(10_000))
        to = next(into / name for name in names if not os.path.lexists(into / name))
        folder.rename(to)
    except OSError as error:
        raise RunError(
            f"{folder} can't be moved into {into}: {error.strerror}", hint="It is still where it was."
        ) from error
    return to
