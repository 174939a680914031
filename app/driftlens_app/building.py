"""Files that the command line builds for a download: in a process of its own, from a folder that is gone afterwards."""

from __future__ import annotations

import io
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from driftlens_app.jobs import command_line
from driftlens_app.jobs.log import told_failure

_PATIENCE_SECONDS = 300.0
_LOG_LINES = 20


@dataclass(frozen=True)
class Built:
    """What one command wrote, or why it did not.

    Attributes:
        name: what was asked for.
        files: contents by path, relative to the command's folder; empty where it failed.
        problem: the command's own message; empty where it succeeded.
        hint: its hint, if it gave one.
        log: the end of what it printed.
    """

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    problem: str = ""
    hint: str = ""
    log: str = ""

    @property
    def file_name(self) -> str:
        """Name of the one file to hand out."""
        return Path(next(iter(self.files))).name if len(self.files) == 1 else f"{self.name}.zip"

    def download(self) -> bytes:
        """The one file to hand out: the only one there is, or an archive of all."""
        return next(iter(self.files.values())) if len(self.files) == 1 else zipped(self.files)


def build(name: str, arguments: Sequence[str], folder: Path) -> Built:
    """Run `driftlens ARGUMENTS --out FOLDER` and collect what it wrote.

    Args:
        name: of the result.
        arguments: of the command line, without `--out`.
        folder: where the command runs.
    """
    with tempfile.TemporaryDirectory(prefix="driftlens-") as made:
        out = Path(made) / "out"
        try:
            done = command_line.answer([*arguments, "--out", str(out)], folder, _PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return Built(name, problem=f"it took longer than {_PATIENCE_SECONDS:.0f} seconds")
        log = "\n".join((done.stdout + done.stderr).replace(made, "").splitlines()[-_LOG_LINES:])
        if done.returncode:
            failure = told_failure(done.stderr.replace(made, ""))
            if failure is None:
                return Built(name, problem=f"it ended with exit code {done.returncode}", log=log)
            return Built(name, problem=failure.message, hint=failure.hint, log=log)
        files = {
            path.relative_to(out).as_posix(): path.read_bytes()
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }
        return Built(name, files, problem="" if files else "it wrote nothing", log=log)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of the files, the same bytes every time."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return target.getvalue()
