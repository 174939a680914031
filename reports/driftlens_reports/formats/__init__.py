"""The formats of a report, one file each: from its content to bytes; `save_files` writes them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from driftlens.runs.run import DriftRun
from driftlens.runs.writer import attach_file
from driftlens.utils.files import atomic_path


def save_files(run: DriftRun, files: Mapping[str, bytes], folder: pathlib.Path | None) -> list[pathlib.Path]:
    """Write files atomically and return their paths.

    Args:
        run: the run that they are about.
        files: their bytes, by path relative to the folder.
        folder: where to write; None is the run's own `reports`, where the run lists them.
    """
    for name, data in files.items():
        opened = atomic_path(folder / name, need=len(data)) if folder else attach_file(run.path, f"reports/{name}")
        with opened as written:
            written.write_bytes(data)
    return [(folder or run.path / "reports") / name for name in files]
