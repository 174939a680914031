"""What the dashboard may look at and do; nothing behind a link that leaves its one folder is read or written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from driftlens.base.errors import RunError
from driftlens.runs.layout import MANIFEST

_ROOT, _READ_ONLY = "DRIFTLENS_APP_ROOT", "DRIFTLENS_APP_READ_ONLY"
_HINT = "Remove the link, or put a copy of what it stands for in its place."


@dataclass(frozen=True)
class Settings:
    """What the dashboard may look at, one folder of runs or a run, links resolved, and whether it starts no jobs."""

    root: Path
    read_only: bool = False

    @property
    def is_one_run(self) -> bool:
        """Whether the root is a run itself, so that no other run can be added."""
        return (self.root / MANIFEST).is_file()

    def environment(self) -> dict[str, str]:
        """Environment variables from which `from_environment` reads these settings back."""
        return {_ROOT: str(self.root), _READ_ONLY: "1" if self.read_only else ""}

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the launcher left; without any, the current folder, read-only."""
        root = os.environ.get(_ROOT)
        return cls(
            root=Path(root or ".").resolve(),
            read_only=root is None or os.environ.get(_READ_ONLY, "") == "1",
        )


def is_inside(path: Path, root: Path | None = None) -> bool:
    """Whether `path`, which need not exist, is `root`, by default the dashboard's, or below it, all links followed."""
    try:
        real = os.path.realpath(path)  # unlike Path.resolve, it takes links that run in circles
    except (OSError, ValueError):  # no name that a file can have
        return False
    return Path(real).is_relative_to(Settings.from_environment().root if root is None else root)


def require_root(root: Path) -> None:
    """Refuse, by a RunError, to look into a folder that was removed while the dashboard was open on it."""
    if not root.is_dir():
        raise RunError(
            f"the folder {root}, which the dashboard was opened on, is gone",
            hint="Put it back, or open the dashboard on another one: `driftlens ui FOLDER`.",
        )


def is_file_inside(path: Path) -> bool:
    """Whether `path` is a regular file inside the root; a pipe, which would block its reader, is none."""
    return path.is_file() and is_inside(path)  # most are not there, which is known sooner


def require_inside(path: Path) -> None:
    """Refuse, by a RunError, a path that leaves the root."""
    if not is_inside(path):
        raise RunError(f"{path} is, or lies behind, a link that leaves this folder", hint=_HINT)


def require_links_inside(run: Path, root: Path) -> None:
    """Refuse a run with a link that leaves the root or a folder that can't be searched for one. Slow: cache it."""

    def unsearched(error: OSError) -> None:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return  # a job that is at work has removed it
        name = os.path.relpath(error.filename, run)
        raise RunError(
            f"its folder {name} can't be searched for links: {error.strerror}", hint="Check its permissions."
        ) from error

    seen: set[str] = set()
    for folder, folders, files in os.walk(run, followlinks=True, onerror=unsearched):
        real = os.path.realpath(folder)
        if real in seen:  # links may run in circles
            folders.clear()
            continue
        seen.add(real)
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            if path.is_symlink() and not is_inside(path, root):
                raise RunError(
                    f"its {path.relative_to(run)} is a link that leaves the folder {root}", hint=_HINT
                )
