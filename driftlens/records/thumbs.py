"""Small pictures of a run's diagnosis samples, so that a viewer can show them without the data."""

from __future__ import annotations

import pathlib
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftlens.errors import RunError
from driftlens.records.layout import escape
from driftlens.records.run import DriftRun

Pictures = NDArray[np.uint8]

SIDE = 64
"""Height and width of a picture, in pixels."""

MOST = 2000
"""Pictures of one task; later samples have none."""


def thumbs_file(task: str) -> str:
    """Path of a task's pictures, relative to the run directory."""
    return f"thumbs/{escape(task)}.npz"


def save_thumbs(path: pathlib.Path, pictures: Pictures) -> None:
    """Write `pictures` [n, SIDE, SIDE, 3] to `path`, the same bytes every time."""
    with path.open("wb") as file:
        np.savez_compressed(file, pictures=pictures)


def read_thumbs(run: DriftRun, task: str) -> Pictures | None:
    """Pictures [n, SIDE, SIDE, 3] of a task's first diagnosis samples, in their order; None where the run has none.

    Raises:
        RunError: the file is damaged.
    """
    path = run.path / thumbs_file(task)
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            found: NDArray[Any] = stored["pictures"]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise RunError(
            f"{path} can't be read: {error}", hint="Remove the file: pictures are only shown."
        ) from error
    if found.dtype != np.uint8 or found.shape[1:] != (SIDE, SIDE, 3):
        raise RunError(f"{path} holds no pictures of {SIDE} x {SIDE} pixels", hint="Remove the file.")
    return found
