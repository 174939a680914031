"""What the dashboard may look at and do, handed from the launcher to the app in its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from driftlens.records.layout import MANIFEST

_ROOT, _READ_ONLY = "DRIFTLENS_APP_ROOT", "DRIFTLENS_APP_READ_ONLY"


@dataclass(frozen=True)
class Settings:
    """What the dashboard may look at and do.

    Attributes:
        root: the one folder it reads and writes, links resolved: a folder of runs, or a single run.
        read_only: whether it starts no jobs.
    """

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

    @staticmethod
    def variables() -> tuple[str, str]:
        """Names of the variables; a job does not inherit them."""
        return _ROOT, _READ_ONLY
