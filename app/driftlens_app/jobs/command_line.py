"""How the command line is called: the program, the environment it gets, and a run of it that is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from driftlens_app.settings import Settings

COMMAND = (sys.executable, "-m", "driftlens")
"""The program; tests put a stand-in here."""


def environment() -> dict[str, str]:
    """The environment of a job: this server's, without its own settings, and without colours in the log."""
    own = Settings.variables()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def answer(arguments: Sequence[str], folder: Path, patience: float) -> subprocess.CompletedProcess[str]:
    """The ended command `driftlens ARGUMENTS`, run in `folder`, with what it said.

    Raises:
        subprocess.TimeoutExpired: it took longer than `patience` seconds, and was ended.
    """
    return subprocess.run(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=patience,
        check=False,
    )
