"""Whether the files of a run are those that were written."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from driftlens.records.file_list import is_as_described, run_files
from driftlens.records.layout import MANIFEST
from driftlens.records.manifest import manifest_is_intact, read_manifest


@dataclass(frozen=True)
class VerifyResult:
    """What comparing a run's files with its manifest showed; paths are relative to the run.

    Attributes:
        checked: files whose digest was compared.
        missing: files that the manifest lists and that are not there.
        changed: files whose bytes are not those that were written.
        unlisted: files that the manifest does not list: of another program, or of an unfinished job.
    """

    checked: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every listed file is there, unchanged."""
        return not self.missing and not self.changed


def verify(path: str | pathlib.Path) -> VerifyResult:
    """Rehash a run's files and compare them with its manifest; status, events, lock and logs are left out.

    Raises:
        RunError: there is no manifest, or it can't be read.
        SchemaTooNewError: a newer DriftLens wrote the run.
    """
    folder = pathlib.Path(path)
    manifest = read_manifest(folder)
    listed = manifest.files
    there = set(run_files(folder))
    present = sorted(there.intersection(listed))
    changed = [
        name
        for name in present
        if not any(
            is_as_described(folder / name, entries[name])
            # A writer that died while replacing a file leaves the old one or the new one, both whole.
            for entries in (listed, manifest.rewriting)
            if name in entries
        )
    ]
    if not manifest_is_intact(folder):
        changed.append(MANIFEST)
    return VerifyResult(
        checked=len(present) + 1,
        missing=tuple(sorted(set(listed) - there)),
        changed=tuple(changed),
        unlisted=tuple(sorted(there - set(listed))),
    )
