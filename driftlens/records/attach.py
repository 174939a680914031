"""Adding a report or a figure to a run that exists."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

from driftlens.files import atomic_path
from driftlens.records.file_list import describe_file, settled
from driftlens.records.lock import RunLock
from driftlens.records.manifest import read_manifest, write_manifest


@contextmanager
def attach(run: str | pathlib.Path, relative: str) -> Iterator[pathlib.Path]:
    """A path to write to; the file lands at `relative` inside the run, and the manifest lists it.

    Args:
        run: the run directory.
        relative: where the file goes, with forward slashes, for example "reports/report.html".

    Raises:
        RunError: there is no run, or it can't be written to.
        RunLockedError: another process is writing to it.
    """
    folder = pathlib.Path(run)
    read_manifest(folder)  # before the lock, which would leave a file in a folder that is no run
    lock = RunLock(folder)
    lock.acquire()
    try:
        manifest = read_manifest(folder)
        manifest = dataclasses.replace(manifest, files=settled(folder, manifest), rewriting={})
        with atomic_path(folder / relative) as written:
            yield written
            lock.require_own()
            new = describe_file(written)
            if relative in manifest.files:
                # Whatever stops the next two steps, it is listed as the old or the new one.
                write_manifest(folder, dataclasses.replace(manifest, rewriting={relative: new}))
        listed = dict(sorted({**manifest.files, relative: new}.items()))
        write_manifest(folder, dataclasses.replace(manifest, files=listed))
    finally:
        lock.release()
