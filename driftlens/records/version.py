"""Which versions of the schema this DriftLens reads: its own major version, any minor one."""

from __future__ import annotations

import pathlib

from driftlens.errors import RunError, SchemaTooNewError
from driftlens.records.schema import SCHEMA_VERSION


def refuse_newer(version: str, path: pathlib.Path, *, minor: bool = False) -> None:
    """Raise unless a file of schema `version` can be read.

    Args:
        version: "major.minor", as the file states it.
        path: the file, for messages.
        minor: whether a newer minor version is refused too, as it must be before writing: what this DriftLens
            does not know it can't keep.

    Raises:
        SchemaTooNewError: the version is newer.
        RunError: the version is no version.
    """
    ours = _parsed(SCHEMA_VERSION)
    try:
        theirs = _parsed(version)
    except ValueError:
        raise RunError(
            f"{path} states the schema version {version!r}; expected one like {SCHEMA_VERSION!r}"
        ) from None
    if theirs[0] > ours[0] or (minor and theirs > ours):
        raise SchemaTooNewError(
            f"{path} has schema {version}; this DriftLens knows {SCHEMA_VERSION}",
            hint="Install a newer DriftLens: pip install --upgrade driftlens",
        )


def _parsed(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
